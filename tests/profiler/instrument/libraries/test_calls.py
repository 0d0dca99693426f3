"""Tests of library calls as bricks: steps, nested and small calls, threads, forks."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import cbtop
from cbtop.profiler.instrument.libraries import calls
from cbtop.profiler.instrument.libraries.session import TimedLibraries
from cbtop.profiler.profiler import BrickProfiler


@pytest.fixture
def run(implementation: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TimedLibraries]:
    monkeypatch.setattr(calls, "SMALL_NS", 0)
    with cbtop.instrument("numpy", profiler=BrickProfiler()) as timed:
        yield timed
    timed.profiler.close()


def counted(run: TimedLibraries) -> dict[str, int]:
    return {one.name: one.calls.count for one in run.profiler.report().bricks}


def test_a_call_outside_of_steps_is_a_step_of_its_own(run: TimedLibraries) -> None:
    for _ in range(3):
        np.fft.fft(np.ones(64))
    report = run.profiler.report()
    assert (report.steps, report.recorded_steps, report.coverage) == (3, 3, 1.0)
    assert [phase for phase, _ in report.books] == ["call"]
    assert counted(run) == {"numpy.fft.fft": 3}


def test_calls_inside_a_named_step_are_its_bricks(run: TimedLibraries) -> None:
    for _ in range(2):
        with cbtop.step("frame"):
            np.fft.fft(np.ones(64))
            np.linalg.inv(np.eye(9))
    report = run.profiler.report()
    assert report.steps == 2
    assert [phase for phase, _ in report.books] == ["frame"]
    assert counted(run) == {"numpy.fft.fft": 2, "numpy.linalg.inv": 2}
    graph = run.profiler.execution_graph().to_ascii_tree()
    assert "numpy.fft.fft" in graph


def test_a_step_without_timed_libraries_does_nothing() -> None:
    with cbtop.step("frame") as step:
        np.fft.fft(np.ones(64))
    assert step is None


def test_calls_inside_a_call_and_its_callbacks_are_a_part_of_it(run: TimedLibraries) -> None:
    np.linalg.pinv(np.eye(9))  # calls svd, and products
    np.linalg.matrix_power(np.eye(9), 3)
    optimize = pytest.importorskip("scipy.optimize")
    with cbtop.instrument("scipy"):
        optimize.minimize(lambda x: float(np.sum(x**2)), np.ones(3))
    assert counted(run) == {"numpy.linalg.pinv": 1, "numpy.linalg.matrix_power": 1, "scipy.optimize.minimize": 1}


def test_each_type_of_numbers_is_a_node_with_its_work(run: TimedLibraries) -> None:
    for dtype in (np.float32, np.float64, np.complex128):
        matrix = np.ones((64, 64), dtype)
        for _ in range(2):
            matrix @ matrix
    stats = run.profiler.stats_for("numpy.matmul")
    assert stats is not None
    assert stats.calls.count == 6
    assert stats.flops == 2 * 2 * 64**3 * (1 + 1 + 4)
    assert stats.bytes == 2 * 3 * 64**2 * (4 + 8 + 16)
    assert set(stats.dtypes) == {"float32", "float64"}


def test_small_calls_are_counted_and_leave_no_record(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SMALL_NS", 1 << 60)
    with cbtop.instrument(np, profiler=BrickProfiler()) as run:
        for _ in range(5):
            np.fft.fft(np.ones(4))
        before = run.small_calls.get("numpy.add", 0)
        for _ in range(7):
            np.ones(4) + np.ones(4)  # a ufunc, too small to reach the timing
    assert run.small_calls["numpy.fft.fft"] == 5
    assert run.small_calls["numpy.add"] - before == 7
    assert counted(run) == {}


def test_calls_of_threads_are_steps_of_their_own(run: TimedLibraries) -> None:
    def work() -> None:
        for _ in range(50):
            np.fft.fft(np.ones(64))

    threads = [threading.Thread(target=work) for _ in range(4)]
    with cbtop.step("frame"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    report = run.profiler.report()
    assert report.steps == 201
    assert counted(run) == {"numpy.fft.fft": 200}


def test_a_disabled_profiler_and_an_unrecorded_step_record_no_calls(run: TimedLibraries) -> None:
    run.profiler.disable()
    np.fft.fft(np.ones(64))
    run.profiler.enable()
    run.profiler.sample_every = 2
    for _ in range(4):
        with run.profiler.step("frame"):
            np.fft.fft(np.ones(64))
    assert counted(run) == {"numpy.fft.fft": 2}


def test_a_forked_child_records_its_own_calls(run: TimedLibraries) -> None:
    np.fft.fft(np.ones(64))
    reads, writes = os.pipe()
    if not (child := os.fork()):
        try:
            np.fft.fft(np.ones(64))
            os.write(writes, str(counted(run)).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as said:
        assert said.read() == "{'numpy.fft.fft': 1}"
    os.waitpid(child, 0)
    assert counted(run) == {"numpy.fft.fft": 1}


def test_an_unknown_library_and_a_second_profiler_are_refused(run: TimedLibraries) -> None:
    with pytest.raises(ValueError, match="'json' has no table of functions; expected numpy, scipy, sklearn, cupy"):
        cbtop.instrument("json")
    with pytest.raises(ValueError, match="already timed by a different profiler"):
        cbtop.instrument(np, profiler=BrickProfiler())


def test_an_error_in_the_work_of_a_call_makes_it_unknown(run: TimedLibraries) -> None:
    np.fft.fftn(np.ones((8, 8)), axes=[0, 1])  # a list has no key
    np.linalg.cholesky(np.eye(4).tolist())  # a list has no shape
    stats = run.profiler.stats_for("numpy.fft.fftn")
    unknown = run.profiler.stats_for("numpy.linalg.cholesky")
    assert stats is not None
    assert unknown is not None
    assert stats.flops == 5 * 64 * 6
    assert unknown.flops is None


def test_an_object_of_the_host_does_not_outlive_its_call(run: TimedLibraries) -> None:
    integrate = pytest.importorskip("scipy.integrate")

    class Owner:
        def value(self, at: float) -> float:
            return at

    owner = Owner()
    reference = weakref.ref(owner)
    with cbtop.instrument("scipy"):
        integrate.quad(owner.value, 0, 1)
    del owner
    gc.collect()
    assert reference() is None
    assert counted(run) == {"scipy.integrate.quad": 1}
