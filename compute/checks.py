"""Assertions about a brick's output, and the results of these assertions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from cbtop.protocol.messages import CheckResult

Output = NDArray[Any]


@dataclass(frozen=True, slots=True)
class AssertionResult:
    """The result of one assertion on one output. `max_error` is None if the output is not finite."""

    passed: bool
    max_error: float | None = None
    tolerance: float | None = None
    not_finite: str = ""
    mended: bool = False  # whether the reference's output replaced an output that was not finite
    skipped: str = ""  # why the assertion was not evaluated; if `skipped` is set, `passed` has no meaning


class Assertion(Protocol):
    """A condition on an output.

    It looks at the output alone, or compares it with the reference's output for the same input.
    """

    needs_reference: ClassVar[bool]

    @property
    def name(self) -> str: ...

    def evaluate(self, output: Output, expected: Output) -> AssertionResult: ...


@dataclass(frozen=True, slots=True)
class IsFinite:
    """The assertion that the output contains no NaN and no infinity."""

    needs_reference: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return "finite"

    def evaluate(self, output: Output, expected: Output) -> AssertionResult:
        met = _not_finite(output)
        return AssertionResult(not met, not_finite=met)


@dataclass(frozen=True, slots=True)
class IsEquivalent:
    """The assertion that max|output - expected| <= tolerance * max|expected|.

    `peer` names the computation that makes `expected`.
    """

    needs_reference: ClassVar[bool] = True
    tolerance: float
    peer: str = "reference"

    @property
    def name(self) -> str:
        return f"equals {self.peer}"

    def evaluate(self, output: Output, expected: Output) -> AssertionResult:
        if met := _not_finite(output) or _not_finite(expected):
            return AssertionResult(False, None, self.tolerance, met)
        difference = float(np.abs(output.astype(np.float64) - expected).max())
        largest = float(np.abs(expected).max())
        error = difference / largest if largest > 0 else difference
        return AssertionResult(error <= self.tolerance, error, self.tolerance)


def _not_finite(values: Output) -> str:
    """Return "NaN" or "infinity" if a value is not finite, or "" if all values are finite."""
    if np.isfinite(values).all():
        return ""
    return "NaN" if np.isnan(values).any() else "infinity"


def summary(findings: Iterable[tuple[str, str, AssertionResult]]) -> list[CheckResult]:
    """Combine all findings with the same brick name and assertion name into one CheckResult.

    - It passes if all findings passed.
    - It is skipped if a finding was skipped and none failed.
    - `max_error` is the largest error of the findings. It is None if any value was not finite, because the other
      errors would then be misleading.
    """
    results: dict[tuple[str, str], CheckResult] = {}
    for brick, assertion, found in findings:
        before = results.get((brick, assertion))
        errors = [e for e in (found.max_error, before.max_error if before else None) if e is not None]
        not_finite = (before.not_finite if before else "") or found.not_finite
        passed = found.passed and (before is None or before.passed)
        skipped = ((before.skipped if before else "") or found.skipped) if passed else ""
        results[brick, assertion] = CheckResult(
            brick=brick,
            assertion=assertion,
            passed=passed,
            max_error=None if not_finite else max(errors, default=None),
            tolerance=found.tolerance,
            not_finite=not_finite,
            skipped=skipped,
        )
    return list(results.values())
