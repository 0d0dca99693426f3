"""Tests of timed library functions: the objects, results and errors are those of the library."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.fft import fft as fft_taken_before

import cbtop
from cbtop.profiler.instrument.libraries.functions import LibraryFunction
from cbtop.profiler.instrument.libraries.numpy_functions import NUMPY
from cbtop.profiler.instrument.libraries.replacing import found
from cbtop.profiler.instrument.libraries.scipy_functions import SCIPY
from cbtop.profiler.instrument.libraries.session import TimedLibraries
from cbtop.profiler.profiler import BrickProfiler


class Clock:
    """A clock that moves on by 20 us at each reading, so that no call is small."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 20_000
        return self.now_ns


@pytest.fixture
def run(implementation: str) -> Iterator[TimedLibraries]:
    with cbtop.instrument(np, profiler=BrickProfiler(clock_ns=Clock())) as timed:
        yield timed


def counted(run: TimedLibraries) -> dict[str, int]:
    return {one.name: one.calls.count for one in run.profiler.report().bricks}


@pytest.mark.parametrize("row", NUMPY, ids=lambda row: row.name)
def test_each_function_of_the_table_exists_in_numpy(row: LibraryFunction) -> None:
    assert callable(found(row))


@pytest.mark.parametrize("row", SCIPY, ids=lambda row: row.name)
def test_each_function_of_the_table_exists_in_scipy(row: LibraryFunction) -> None:
    pytest.importorskip(row.awaited)
    pytest.importorskip(row.module)
    assert callable(found(row))


FUNCTIONS = [np.fft.fft, np.linalg.solve, np.dot, np.matmul, np.exp, np.sum, np.einsum, np.random.Generator.normal]


def described(function: Any) -> list[object]:
    """Return what a program can see of a function."""
    seen: list[object] = [id(function), hash(function), type(function), repr(function), pickle.dumps(function)]
    seen += [getattr(function, name, None) for name in ("__name__", "__qualname__", "__module__", "__doc__")]
    seen += [copy.copy(function) is function, sorted(dir(function))]
    for ask in (inspect.signature, inspect.getsource, inspect.getfile):
        try:
            seen.append(str(ask(function)))
        except (TypeError, ValueError) as error:
            seen.append(type(error))
    return seen


def test_a_program_sees_the_same_functions(implementation: str) -> None:
    before = [described(one) for one in FUNCTIONS]
    with cbtop.instrument(np, profiler=BrickProfiler()):
        during = [described(one) for one in FUNCTIONS]
        assert pickle.loads(pickle.dumps(np.fft.fft)) is np.fft.fft is fft_taken_before
    assert during == before
    assert [described(one) for one in FUNCTIONS] == before


def test_a_name_taken_before_is_timed_too(run: TimedLibraries) -> None:
    fft_taken_before(np.ones(8))
    np.fft.fft(np.ones(8))
    assert counted(run) == {"numpy.fft.fft": 2}


def test_the_operator_of_products_is_timed(run: TimedLibraries) -> None:
    matrix = np.ones((64, 64))
    assert (matrix @ matrix)[0, 0] == 64
    matrix @= np.eye(64)
    assert counted(run) == {"numpy.matmul": 2}


def test_arrays_in_a_list_are_timed(run: TimedLibraries) -> None:
    np.concatenate([np.ones(8000), np.ones(8000)])
    assert counted(run) == {"numpy.concatenate": 1}


def results() -> list[Any]:
    """Return the results of calls with all kinds of arguments."""
    random = np.random.default_rng(7)
    matrix, vector = random.normal(size=(80, 80)), random.normal(size=6400)
    positive = matrix @ matrix.T + 80 * np.eye(80)
    out, real = np.zeros((80, 80)), np.zeros(6400, np.float32)
    made = [
        np.fft.fft(vector, n=5000, norm="ortho"),
        np.fft.rfft(matrix, axis=0),
        np.fft.irfft(vector),
        np.fft.fft2(matrix),
        np.linalg.solve(positive, vector[:80]),
        np.linalg.cholesky(positive),
        *np.linalg.qr(matrix),
        *np.linalg.svd(matrix),
        *np.linalg.eigh(positive),
        np.linalg.inv(positive),
        np.linalg.norm(matrix, ord=1),
        np.linalg.det(matrix),
        np.dot(matrix, matrix, out=out) is out,
        out,
        np.matmul(matrix, matrix),
        matrix @ vector[:80],
        np.vdot(vector, vector),
        np.exp(vector, out=real, where=vector > 0, casting="same_kind") is real,
        real[vector > 0],
        np.add(3, 4),
        np.sqrt(2.0),
        np.sum(matrix, axis=1, keepdims=True, dtype=np.float32),
        np.max(vector),
        np.einsum("ij,jk->ik", matrix, matrix),
        np.einsum(matrix, [0, 1], [1, 0], optimize=True),
        np.convolve(vector, vector[:9], "same"),
        np.sort(vector),
        np.where(vector > 0, vector, 0),
        np.concatenate([vector, vector]),
        random.integers(9, size=4),
        random.random(),
        np.add.reduce(vector),
        np.maximum.accumulate(vector),
        np.fft.fft([1, 2, 3]),
        np.dot([1, 2], [3, 4]),
        np.linalg.solve([[2.0, 0], [0, 2]], [1, 1]),
        np.random.RandomState(1).normal(size=3),
    ]
    return [(type(one), np.asarray(one).dtype, np.asarray(one).tobytes()) for one in made]


def test_results_are_equal_to_the_last_bit(implementation: str) -> None:
    before = results()
    with cbtop.instrument(np, profiler=BrickProfiler(clock_ns=Clock())):
        assert results() == before
    assert results() == before


def test_errors_reach_the_program_as_without_cbtop(run: TimedLibraries) -> None:
    with pytest.raises(np.linalg.LinAlgError, match="Singular matrix") as failure:
        np.linalg.solve(np.zeros((9, 9)), np.ones(9))
    assert "cbtop" not in str(failure.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'axes'"):
        np.fft.fft(np.ones(4), axes=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="mismatch in its core dimension"):
        np.ones((70, 70)) @ np.ones((71, 71))
    stats = run.profiler.stats_for("numpy.linalg.solve")
    assert stats is not None
    assert (stats.calls.count, stats.calls.failed) == (1, 1)


class Diverted:
    """An array of a different library, as CuPy's are."""

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> object:
        return "diverted", function.__name__

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> object:
        return "diverted", ufunc.__name__


def test_arrays_of_other_libraries_are_dispatched_as_before(run: TimedLibraries) -> None:
    other: Any = Diverted()
    assert np.fft.fft(other) == ("diverted", "fft")
    assert np.dot(other, other) == ("diverted", "dot")
    assert np.ones((80, 80)) @ other == ("diverted", "matmul")


def files_of_error() -> list[str]:
    """Return the files of a traceback through a function of NumPy, and the stack that its callback sees."""
    with pytest.raises(np.linalg.LinAlgError) as failure:
        np.linalg.solve(np.zeros((9, 9)), np.ones(9))
    seen = np.apply_along_axis(lambda _: len(inspect.stack()), 0, np.ones((2, 1)))
    return [str(entry.path) for entry in failure.traceback] + [str(seen)]


def test_functions_of_numpy_add_no_frame_to_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cbtop.profiler._vectorcalls")
    before = files_of_error()
    with cbtop.instrument(np, profiler=BrickProfiler(clock_ns=Clock())):
        assert files_of_error() == before


def test_without_the_compiled_part_functions_in_python_are_timed(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cbtop.profiler

    monkeypatch.setitem(sys.modules, "cbtop.profiler._vectorcalls", None)
    monkeypatch.delattr(cbtop.profiler, "_vectorcalls", raising=False)
    before = [described(one) for one in FUNCTIONS]
    with cbtop.instrument(np, profiler=BrickProfiler(clock_ns=Clock())) as run:
        assert [described(one) for one in FUNCTIONS] == before
        np.fft.fft(np.ones(8))
        np.ones((80, 80)) @ np.ones((80, 80))
    assert counted(run) == {"numpy.fft.fft": 1}


def test_stopped_functions_leave_no_record(run: TimedLibraries) -> None:
    run.stop()
    np.fft.fft(np.ones(8))
    np.ones((80, 80)) @ np.ones((80, 80))
    assert counted(run) == {}
