"""`cbtop demo`: what becomes of a run that the guard stops."""

from __future__ import annotations

from typing import Any

import pytest

from cbtop.cli import main
from cbtop.compute import workload
from cbtop.compute.errors import GuardError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[str | None]:
    """What the guard was asked to do in each run of the workload, which it stops."""
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    reactions: list[str | None] = []

    def run(options: workload.WorkloadOptions, *_: Any) -> None:
        reactions.append(options.guard)
        raise GuardError("RmsNorm", 3, 57, "NaN")

    monkeypatch.setattr(workload, "run", run)
    return reactions


def test_a_run_that_the_guard_stops_ends_with_exit_code_4_and_one_line(
    asked: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--serve-only", "--guard", "stop"]) == 4
    said = capsys.readouterr().err.strip().splitlines()
    assert said == ["cbtop: RmsNorm in layer 3 computed a NaN at position 57; the guard stopped the run"]


def test_the_guard_logs_unless_told_otherwise(asked: list[str | None]) -> None:
    for option in ([], ["--guard", "fallback"], ["--guard", "off"]):
        main(["demo", "--serve-only", *option])
    assert asked == ["log", "fallback", None]
