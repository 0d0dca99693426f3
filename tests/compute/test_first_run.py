"""Tests of the first run, which compiles kernels in a forked process.

All that remains of this process is the cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from cbtop.compute import backends, first_run
from cbtop.compute.decoder import FAMILIES, int8
from cbtop.compute.decoder.base import Model, read_model
from cbtop.compute.first_run import compile_in_fork
from cbtop.compute.settings import WorkloadOptions
from cbtop.compute.workload import run
from cbtop.profiler.profiler import BrickProfiler
from tests.representatives import first_by_default

from .conftest import ListRecorder

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process is forked")


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@linux
def test_it_runs_in_another_process_that_has_ended_when_this_one_goes_on(tmp_path: Path) -> None:
    told: list[int] = []
    compile_in_fork(lambda: (tmp_path / "pid").write_text(str(os.getpid())), lambda: told.append(1))
    pid = int((tmp_path / "pid").read_text())
    assert pid != os.getpid()
    assert not is_there(pid)


@linux
def test_what_goes_wrong_there_is_said_by_who_meets_it_again(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("in the fork")

    compile_in_fork(fail, lambda: None)
    assert capfd.readouterr() == ("", "")


@linux
def test_a_fork_that_hangs_is_ended_and_this_process_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(first_run, "MOST_S", 0.5)
    told: list[int] = []

    def hang() -> None:
        (tmp_path / "part").write_text(str(os.getpid()))
        (tmp_path / "part").rename(tmp_path / "pid")
        time.sleep(60)
        (tmp_path / "by itself").touch()

    # A fake clock: 0 until the forked process hangs, then 1, so that the time limit is reached. The first two
    # readings are always 0.
    looks = count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(looks) > 1 and (tmp_path / "pid").exists()))
    compile_in_fork(hang, lambda: told.append(1))
    assert told
    monkeypatch.undo()
    assert not is_there(int((tmp_path / "pid").read_text()))
    assert not (tmp_path / "by itself").exists()


@linux
def test_who_is_told_to_stop_meanwhile_leaves_no_fork_behind(tmp_path: Path) -> None:
    whole = tmp_path / "pid"

    def compile_for_long() -> None:
        (tmp_path / "part").write_text(str(os.getpid()))
        (tmp_path / "part").rename(whole)
        time.sleep(60)

    def stop() -> None:
        if whole.exists():
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        compile_in_fork(compile_for_long, stop)
    assert not is_there(int(whole.read_text()))


def test_where_no_process_can_be_had_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", refuse)
    compile_in_fork(lambda: pytest.fail("it ran here"), lambda: None)


@first_by_default(
    ("is_kept", "read"),
    [((True,), 1), ((False, True), 2), ((False, False), 1)],
    2,
    ids=["not the first", "the first", "nothing can be kept"],
)
def test_a_first_run_forks_and_reads_the_model_there_if_the_cache_is_kept(
    model_files: dict[str, Path],
    profiler: BrickProfiler,
    recorder: ListRecorder,
    monkeypatch: pytest.MonkeyPatch,
    is_kept: tuple[bool, ...],
    read: int,
) -> None:
    recorded_in_forks: list[int] = []
    models: list[Path] = []

    def compile_here(compile_all: Callable[[], object], meanwhile: object) -> None:
        compile_all()
        recorded_in_forks.append(len(recorder.records) + len(recorder.messages))

    def model_to_run(path: Path, *, is_exact: bool) -> Model:
        models.append(path)
        return read_model(path, FAMILIES)

    answers = iter(is_kept)
    monkeypatch.setattr(backends, "is_first_run", lambda: not next(answers))
    monkeypatch.setattr(first_run, "compile_in_fork", compile_here)
    monkeypatch.setattr(int8, "model_to_run", model_to_run)
    options = WorkloadOptions(model=model_files["llama"], steps=2, threads=1, check_contracts=True)
    run(options, profiler, lambda: False, lambda text, fraction: None)
    assert recorded_in_forks == [0] * (not is_kept[0])
    assert len(models) == read
    assert recorder.records
    assert list(answers) == []


ON_A_NEW_MACHINE = """
import sys
from pathlib import Path
from numba.core import event
from cbtop.compute.backends import is_first_run
from cbtop.compute.settings import WorkloadOptions
from cbtop.compute.workload import run
from cbtop.profiler.profiler import BrickProfiler

class Compiled(event.Listener):
    def on_start(self, one): found.append(one.data["dispatcher"].py_func.__qualname__)
    def on_end(self, one): pass

found = []
event.register("numba:compile", Compiled())
print(is_first_run())
options = WorkloadOptions(model=Path(sys.argv[1]), threads=2, steps=3)
run(options, BrickProfiler(enabled=False), lambda: False, lambda what, done: None)
print(is_first_run(), found)
"""


@pytest.mark.slow
@linux
def test_a_first_run_compiles_nothing_in_its_own_process(model_files: dict[str, Path], tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "CBTOP_RUNTIME_DIR": str(tmp_path / "runtime")}
    command = [sys.executable, "-c", ON_A_NEW_MACHINE, str(model_files["llama"])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\nFalse []\n"), done.stderr
