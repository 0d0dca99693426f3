"""Assertions that a brick's output must hold, and what came of evaluating them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cbtop.protocol.messages import CheckResult

Output = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One assertion evaluated on one output."""

    passed: bool
    max_error: float | None = None
    tolerance: float | None = None


class Assertion(Protocol):
    """Something that holds between an output and what the reference makes of the same input."""

    @property
    def name(self) -> str: ...

    def evaluate(self, output: Output, expected: Output) -> Finding: ...


@dataclass(frozen=True, slots=True)
class Finite:
    """No NaN and no infinity."""

    @property
    def name(self) -> str:
        return "finite"

    def evaluate(self, output: Output, expected: Output) -> Finding:
        return Finding(bool(np.isfinite(output).all()))


@dataclass(frozen=True, slots=True)
class Equivalent:
    """max|output - expected| <= tolerance * max|expected|."""

    tolerance: float

    @property
    def name(self) -> str:
        return "equals reference"

    def evaluate(self, output: Output, expected: Output) -> Finding:
        difference = float(np.abs(output.astype(np.float64) - expected).max())
        largest = float(np.abs(expected).max())
        error = difference / largest if largest > 0 else difference
        # A NaN compares false, so it fails; it has no size that could be shown.
        return Finding(error <= self.tolerance, error if math.isfinite(error) else None, self.tolerance)


def summary(findings: Iterable[tuple[str, str, Finding]]) -> list[CheckResult]:
    """One CheckResult a (brick name, assertion name): passed where all passed, with the largest error."""
    results: dict[tuple[str, str], CheckResult] = {}
    for brick, assertion, found in findings:
        before = results.get((brick, assertion))
        errors = [e for e in (found.max_error, before.max_error if before else None) if e is not None]
        results[brick, assertion] = CheckResult(
            brick=brick,
            assertion=assertion,
            passed=found.passed and (before is None or before.passed),
            max_error=max(errors, default=None),
            tolerance=found.tolerance,
        )
    return list(results.values())
