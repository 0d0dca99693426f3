"""What `cbtop overhead` says about the recorder that it measured."""

from __future__ import annotations

import sys

import pytest

from cbtop.cli import main
from cbtop.commands import overhead

SAID = "measured of the recorder in Python"


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_brick_ns", lambda *_: {overhead.FLOOR: 50.0, overhead.OFF: 10.0})
    monkeypatch.setattr(overhead, "_step_us", lambda *_: {overhead.OFF: [100.0]})


def test_without_the_compiled_part_it_says_so_once_with_the_way_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CBTOP_PURE_PYTHON", raising=False)
    monkeypatch.setitem(sys.modules, "cbtop.profiler._hot_path", None)
    monkeypatch.delattr("cbtop.profiler._hot_path", raising=False)
    assert main(["overhead"]) == 0
    said = capsys.readouterr().out
    assert said.count(SAID) == 1
    assert "install a C compiler" in said


def test_a_recorder_in_python_that_was_asked_for_says_that(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CBTOP_PURE_PYTHON", "1")
    assert main(["overhead"]) == 0
    assert "CBTOP_PURE_PYTHON is set" in capsys.readouterr().out
