"""Checks of the results of library calls: residuals of decompositions, Parseval's theorem, moments of random numbers.

Each check compares a relative error with a tolerance. Its unit is n eps: n is the largest side of the arrays, eps the
precision of the result. Checks run after recorded calls, only on request (profiler/brick_checks.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cbtop.profiler.checks import Check, CheckOutcome

_FACTOR = 100  # errors of LAPACK are a few n eps; a wrong result is far above 100 n eps
_SIGMAS = 6  # 2 in 10^9 means of correct random numbers are further away
LEAST_SAMPLES = 1000

ErrorOf = Callable[[Any, Sequence[Any], Mapping[str, Any]], float]


@dataclass(frozen=True, slots=True)
class Residual:
    """Checks that a relative error of the result is small. `error_of` computes it.

    `error_of` raises ValueError if the call cannot be checked, which then counts as skipped.
    """

    name: str
    error_of: ErrorOf

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        """Return whether the error is within the tolerance."""
        first = output[0] if isinstance(output, tuple) else output
        largest = max((side for array in (first, *args) for side in np.shape(array)), default=1)
        tolerance = _FACTOR * largest * float(np.finfo(first.dtype).eps)
        error = self.error_of(output, args, kwargs)
        return CheckOutcome(error <= tolerance, error, tolerance, "" if math.isfinite(error) else "NaN")


@dataclass(frozen=True, slots=True)
class NormalMoments:
    """Checks that the mean and the variance of normal random numbers are as far from the expected ones as chance
    allows.
    """

    name: str = "moments"

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        """Return whether both moments are within six standard errors."""
        given = (*args[1:3], *(0.0, 1.0)[len(args[1:3]) :])
        loc, scale = kwargs.get("loc", given[0]), kwargs.get("scale", given[1])
        if np.size(output) < LEAST_SAMPLES or np.ndim(loc) or np.ndim(scale) or not scale:
            raise ValueError(f"fewer than {LEAST_SAMPLES} numbers of one distribution")
        standard = (output - loc) / scale
        root = math.sqrt(output.size)
        mean, variance = abs(float(standard.mean())) * root, abs(float(standard.var()) - 1) * root / math.sqrt(2)
        error = max(mean, variance)
        return CheckOutcome(error <= _SIGMAS, error, _SIGMAS, note="in standard errors")


def _solved(output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    matrix, right = args[:2]
    column = right if right.ndim > 1 else right[..., None]
    found = output if right.ndim > 1 else output[..., None]
    return _relative(matrix @ found - column, _norm(matrix) * _norm(found))


def _factored(output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    if not isinstance(output, tuple) or output[0].shape[-1] != output[1].shape[-2]:
        raise ValueError("this mode returns no Q and R")
    return _relative(args[0] - output[0] @ output[1], _norm(args[0]))


def _cholesky(output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    lower = output if not np.any(np.triu(output, 1)) else np.swapaxes(output.conj(), -1, -2)
    # Only one triangle of the argument is read.
    product = lower @ np.swapaxes(lower.conj(), -1, -2)
    half = np.tril if lower is output else np.triu
    return _relative(half(args[0] - product), _norm(args[0]))


def _singular(output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    if not isinstance(output, tuple):
        raise ValueError("without vectors there is no product")
    left, values, right = output
    count = values.shape[-1]
    return _relative(args[0] - (left[..., :count] * values[..., None, :]) @ right[..., :count, :], _norm(args[0]))


def _eigen(output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    if not isinstance(output, tuple):
        raise ValueError("without vectors there is no product")
    values, vectors = output
    whole = np.tril(args[0]) + np.swapaxes(np.tril(args[0], -1).conj(), -1, -2)
    return _relative(whole @ vectors - vectors * values[..., None, :], _norm(args[0]))


def _parseval(output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the relative difference of the energies of a signal and its unnormalised spectrum."""
    signal = args[0]
    norm = args[3] if len(args) > 3 else kwargs.get("norm")
    if output.shape != signal.shape or norm not in (None, "backward"):
        raise ValueError("only unnormalised transforms of the whole signal are compared")
    axis = args[2] if len(args) > 2 else kwargs.get("axis", -1)
    before = float((abs(signal.astype(output.dtype)) ** 2).sum()) * signal.shape[axis]
    after = float((abs(output) ** 2).sum())
    return abs(after - before) / before if before else after


def _norm(array: Any) -> float:
    return float(np.sqrt((abs(array) ** 2).sum()))


def _relative(difference: Any, size: float) -> float:
    error = _norm(difference)
    return error / size if size else error


SOLVED: tuple[Check, ...] = (Residual("residual of A x = b", _solved),)
FACTORED: tuple[Check, ...] = (Residual("residual of A = Q R", _factored),)
CHOLESKY: tuple[Check, ...] = (Residual("residual of A = L L*", _cholesky),)
SINGULAR: tuple[Check, ...] = (Residual("residual of A = U S V*", _singular),)
EIGEN: tuple[Check, ...] = (Residual("residual of A V = V w", _eigen),)
PARSEVAL: tuple[Check, ...] = (Residual("Parseval", _parseval),)
MOMENTS: tuple[Check, ...] = (NormalMoments(),)
