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
