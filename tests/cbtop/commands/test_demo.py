"""Tests of `cbtop demo`: the guard stops the run, or the run produces no token."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from cbtop.cli import main
from cbtop.commands import demo
from cbtop.compute import workload
from cbtop.compute.errors import GuardError, LossError, NoTokenError
from cbtop.compute.training import workload as training
from cbtop.profiler.profiler import BrickProfiler


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[str | None]:
    """Return a list that gets the guard's reaction that each demo run is started with.

    Each run ends as if the guard had stopped it.
    """
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    reactions: list[str | None] = []

    def run(options: workload.WorkloadOptions, *_: Any) -> None:
        reactions.append(options.guard)
        raise GuardError("RmsNorm", 3, 57, "NaN")

    monkeypatch.setattr(workload, "run", run)
    return reactions


def test_the_workload_is_starting_until_it_is_a_source_or_ends(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[object] = []
    monkeypatch.setattr(demo.DemoFeed, "sources", lambda _: tuple(sources))
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process,
        (tmp_path / "said").open("w+") as said,
        demo.DemoFeed(process, said, 10) as feed,
    ):
        assert feed.starting == f"the demo's workload (pid {process.pid})"
        sources.append(object())
        assert feed.starting == ""
        sources.clear()
        process.kill()
        process.wait()
        assert feed.starting == ""


def test_a_run_that_the_guard_stops_ends_with_exit_code_4_and_one_line(
    asked: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--serve-only", "--guard", "stop"]) == 4
    said = capsys.readouterr().err.strip().splitlines()
    assert said == ["cbtop: RmsNorm in layer 3 computed a NaN at position 57; the guard stopped the run"]


def test_a_run_that_comes_to_no_token_ends_as_a_wrong_computation_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run(*_: Any) -> None:
        raise NoTokenError

    goodbyes: list[str] = []
    monkeypatch.setattr(workload, "run", run)
    monkeypatch.setattr(BrickProfiler, "close", lambda _, reason="": goodbyes.append(reason))
    assert main(["demo", "--serve-only", "--guard", "off"]) == 4
    assert capsys.readouterr().err.startswith("cbtop: no token can be chosen: a logit is NaN or infinite; ")
    assert goodbyes == ["no token can be chosen: a logit is NaN or infinite"]


def test_the_guard_logs_unless_told_otherwise(asked: list[str | None]) -> None:
    for option in ([], ["--guard", "fallback"], ["--guard", "off"]):
        main(["demo", "--serve-only", *option])
    assert asked == ["log", "fallback", None]


def test_what_gpus_share_out_is_said_only_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--split", "heads", "--headless"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.endswith("--split heads: it says what --gpus N shares out; give --gpus 2 or more")


def test_goodbye_is_said_before_a_gpu_takes_back_what_the_model_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("signal.signal", lambda *_: None)

    class Held:
        """A stand-in for the GPU memory of a model."""

    ended: list[str] = []

    def ran(*given: Any) -> Held:
        held = Held()
        weakref.finalize(held, ended.append, "given back")
        return held

    close = BrickProfiler.close

    def closed(profiler: BrickProfiler, reason: str = "") -> None:
        ended.append(reason)
        close(profiler, reason)

    monkeypatch.setattr(workload, "run", ran)
    monkeypatch.setattr(BrickProfiler, "close", closed)
    assert main(["demo", "--serve-only"]) == 0
    assert ended == ["done", "given back"]


def test_training_on_a_gpu_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--train", "--backend", "cuda", "--headless"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.splitlines()[-1].endswith("--train: training runs on the CPU only; leave out --backend cuda")


@pytest.mark.parametrize("option", [["--prompt", "Once"], ["--trace", "all"], ["--tuned"], ["--check"]])
def test_options_of_decoding_are_refused_when_training(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--train", *option, "--headless"]) == 2
    assert capsys.readouterr().err.strip().endswith(f"{option[0]}: for decoding; leave out with --train")


def test_a_training_run_without_a_finite_loss_ends_with_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run(*_: Any) -> None:
        raise LossError(float("nan"), 3)

    monkeypatch.setattr(training, "run", run)
    assert main(["demo", "--train", "--serve-only"]) == 4
    assert capsys.readouterr().err.startswith("cbtop: the loss is nan in training step 3; ")
