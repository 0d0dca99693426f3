"""Tests of residual checks: right results pass, and each planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cbtop
from cbtop.profiler.checks import Check
from cbtop.profiler.instrument.libraries import calls, residuals
from cbtop.profiler.instrument.libraries.numpy_functions import NUMPY
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import CheckResult
from tests.profiler.memory import Memory

RANDOM = np.random.default_rng(3)
MATRIX, TALL = RANDOM.normal(size=(30, 30)), RANDOM.normal(size=(40, 20))
POSITIVE = MATRIX @ MATRIX.T + 30 * np.eye(30)
RIGHT, SIGNAL = RANDOM.normal(size=30), RANDOM.normal(size=(4, 256))
Case = tuple[tuple[Check, ...], Callable[..., Any], tuple[Any, ...]]
CASES: list[Case] = [
    (residuals.SOLVED, np.linalg.solve, (POSITIVE, RIGHT)),
    (residuals.SOLVED, np.linalg.solve, (POSITIVE.astype(complex), MATRIX)),
    (residuals.FACTORED, np.linalg.qr, (TALL,)),
    (residuals.CHOLESKY, np.linalg.cholesky, (POSITIVE,)),
    (residuals.CHOLESKY, lambda a: np.linalg.cholesky(a, upper=True), (POSITIVE,)),
    (residuals.SINGULAR, np.linalg.svd, (TALL,)),
    (residuals.EIGEN, np.linalg.eigh, (POSITIVE,)),
    (residuals.PARSEVAL, np.fft.fft, (SIGNAL,)),
    (residuals.PARSEVAL, lambda a, n, axis: np.fft.fft(a, n, axis), (SIGNAL, None, 0)),
    (residuals.MOMENTS, lambda _, loc, scale: RANDOM.normal(loc, scale, 10_000), (RANDOM, 3.0, 2.0)),
]


def spoiled(output: Any) -> Any:
    """Return the result with a fault of one part in a thousand."""
    if isinstance(output, tuple):
        return (spoiled(output[0]), *output[1:])
    return output * 1.001 if output.size < 10_000 else output + 0.5


@pytest.mark.parametrize(("checks", "call", "args"), CASES)
def test_a_right_result_passes_and_a_spoiled_one_fails(
    checks: tuple[Check, ...], call: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    (check,) = checks
    output = call(*args)
    right, wrong = check.evaluate(output, args, {}), check.evaluate(spoiled(output), args, {})
    assert right.passed, right
    assert not wrong.passed, wrong


def test_a_call_that_cannot_be_compared_is_skipped() -> None:
    for checks, output, args in (
        (residuals.FACTORED, np.linalg.qr(TALL, mode="r"), (TALL,)),
        (residuals.PARSEVAL, np.fft.fft(SIGNAL, norm="ortho"), (SIGNAL, None, -1, "ortho")),
        (residuals.MOMENTS, RANDOM.normal(size=5), (RANDOM, 0.0, 1.0, 5)),
    ):
        with pytest.raises(ValueError, match=r"no Q and R|unnormalised|fewer than 1000"):
            checks[0].evaluate(output, args, {})


def test_results_are_checked_on_request_alone(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SMALL_NS", 0)
    for is_wanted in (False, True):
        memory = Memory()
        with cbtop.instrument(np, profiler=BrickProfiler(recorder=memory), residuals=is_wanted):
            np.linalg.solve(POSITIVE, RIGHT)
            np.fft.fft(SIGNAL)
            np.random.default_rng(1).normal(size=5000)
        results = {one.assertion: one for one in memory.said if isinstance(one, CheckResult)}
        assert set(results) == ({"residual of A x = b", "Parseval", "moments"} if is_wanted else set())
        assert all([one.passed and not one.skipped for one in results.values()])


def test_each_check_of_the_table_has_a_case_here() -> None:
    assert {row.checks for row in NUMPY if row.checks} == {checks for checks, _, _ in CASES}


SINGLE = SIGNAL.astype(np.complex64).repeat(2048, 1)  # 524,288 points
BATCH = np.stack([POSITIVE * 1e9, POSITIVE])


@pytest.mark.parametrize("factor", [1e200, 1e-200])
def test_residuals_of_large_and_small_numbers_are_compared(factor: float) -> None:
    matrix, (check,) = POSITIVE * factor, residuals.SOLVED
    output = np.linalg.solve(matrix, RIGHT * factor)
    assert check.evaluate(output, (matrix, RIGHT * factor), {}).passed
    assert not check.evaluate(output * 1.001, (matrix, RIGHT * factor), {}).passed


def test_a_small_matrix_of_a_batch_is_checked_next_to_large_ones() -> None:
    (check,) = residuals.SOLVED
    output = np.linalg.solve(BATCH, MATRIX)
    assert check.evaluate(output, (BATCH, MATRIX), {}).passed
    output[1] *= 1 + 1e-9
    assert not check.evaluate(output, (BATCH, MATRIX), {}).passed


def test_a_large_batch_does_not_raise_the_tolerance() -> None:
    few, many = np.broadcast_to(POSITIVE, (2, 30, 30)), np.broadcast_to(POSITIVE, (5000, 30, 30))
    found = [residuals.EIGEN[0].evaluate(np.linalg.eigh(one), (one,), {}) for one in (few, many)]
    assert found[0].tolerance == found[1].tolerance


def test_long_transforms_in_single_precision_are_checked() -> None:
    (check,) = residuals.PARSEVAL
    output = np.fft.fft(SINGLE)
    assert output.dtype == np.complex64
    assert check.evaluate(output, (SINGLE,), {}).passed
    assert not check.evaluate(output * np.float32(1.001), (SINGLE,), {}).passed


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_matrix_of_numpy_is_checked_as_an_array() -> None:
    matrix = np.asmatrix(TALL)
    assert residuals.SINGULAR[0].evaluate(np.linalg.svd(matrix), (matrix,), {}).passed


def test_eigenvalues_of_the_upper_triangle_are_compared_with_it() -> None:
    upper = np.triu(POSITIVE)
    for args, options in (((upper, "U"), {}), ((upper,), {"UPLO": "U"})):
        output = np.linalg.eigh(*args, **options)
        assert residuals.EIGEN[0].evaluate(output, args, options).passed


def test_calls_that_change_or_read_parts_of_arguments_are_skipped() -> None:
    linalg = pytest.importorskip("scipy.linalg")
    for checks, call, args, options in (
        (residuals.SOLVED, linalg.solve, (MATRIX, RIGHT), {"transposed": True}),
        (residuals.SOLVED, linalg.solve, (np.triu(POSITIVE), RIGHT), {"assume_a": "pos"}),
        (residuals.SOLVED, linalg.solve, (MATRIX.copy(order="F"), RIGHT), {"overwrite_a": True}),
        (residuals.SOLVED, linalg.solve, (MATRIX.copy(order="F"), RIGHT, False, True), {}),
        (residuals.FACTORED, linalg.qr, (MATRIX,), {"pivoting": True}),
        (residuals.FACTORED, linalg.qr, (MATRIX,), {"mode": "r", "pivoting": True}),
        (residuals.FACTORED, np.linalg.qr, (MATRIX,), {"mode": "raw"}),
        (residuals.FACTORED, linalg.qr, (MATRIX.copy(order="F"), True), {}),
        (residuals.CHOLESKY, linalg.cholesky, (POSITIVE.copy(order="F"), True, True), {}),
        (residuals.SINGULAR, linalg.svd, (MATRIX.copy(order="F"), True, True, True), {}),
        (residuals.EIGEN, linalg.eigh, (POSITIVE, POSITIVE), {}),
    ):
        with pytest.raises(ValueError, match=r"changes its arg|may |a part is read|generalized|no Q and R"):
            checks[0].evaluate(call(*args, **options), args, options)


def test_arguments_with_nan_are_skipped_and_results_with_nan_fail() -> None:
    (check,) = residuals.PARSEVAL
    broken = SIGNAL.copy()
    broken[0, 0] = np.nan
    with pytest.raises(ValueError, match="NaN or Inf"):
        check.evaluate(np.fft.fft(broken), (broken,), {})
    assert not check.evaluate(np.fft.fft(SIGNAL) * np.nan, (SIGNAL,), {}).passed
