"""Checks of the results of library calls: residuals of decompositions, Parseval's theorem, moments of random numbers.

Each compares a relative error with a tolerance in units of n eps, with the larger side n of the matrices and the
precision eps of the result. For transforms of n points it is log2 n eps. In a batch, the largest
error counts. Checks run after recorded calls, only on request (profiler/brick_checks.py).
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

_NOT_COMPARED = ("overwrite_a", "overwrite_b", "overwrite_x", "transposed")  # options of SciPy

ErrorOf = Callable[[Any, Sequence[Any], Mapping[str, Any]], float]


@dataclass(frozen=True, slots=True)
class Residual:
    """Checks that a relative error of the result is small. `error_of` computes it.

    `error_of` raises ValueError if the call cannot be checked, which then counts as skipped.
    """

    name: str
    error_of: ErrorOf
    side_of: Callable[[Sequence[Any], Mapping[str, Any]], float] = lambda args, kwargs: max(args[0].shape[-2:])

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        """Return whether the error is within the tolerance."""
        outputs = tuple([np.asarray(one) for one in (output if isinstance(output, tuple) else (output,))])
        if any([kwargs.get(name) for name in _NOT_COMPARED]):
            raise ValueError("this call changes its arguments, or solves a different problem")
        arrays = [np.asarray(one) if np.ndim(one) else one for one in args]  # a matrix has operators of its own
        if not all([np.isfinite(one).all() for one in arrays if isinstance(one, np.ndarray)]):
            raise ValueError("an argument has a NaN or Inf")
        error = self.error_of(outputs if isinstance(output, tuple) else outputs[0], arrays, kwargs)
        tolerance = _FACTOR * self.side_of(arrays, kwargs) * float(np.finfo(outputs[0].dtype).eps)
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
    if len(args) > 2 or kwargs.get("assume_a") not in (None, "gen", "general"):
        raise ValueError("of a matrix with a structure, a part is read")
    matrix, right = args
    column = right if right.ndim > 1 else right[..., None]
    found = output if right.ndim > 1 else output[..., None]
    return _relative(matrix @ found - column, matrix, found)


def _factored(output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    has_options = len(args) > 1 and not isinstance(args[1], str)
    if not isinstance(output, tuple) or len(output) > 2 or has_options or kwargs.get("mode") in ("r", "raw"):
        raise ValueError("this mode returns no Q and R of the argument")
    if min(output[0].ndim, output[1].ndim) < 2 or output[0].shape[-1] != output[1].shape[-2]:
        raise ValueError("this mode returns no Q and R")
    return _relative(args[0] - output[0] @ output[1], args[0])


def _cholesky(output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    if len(args) > 2:
        raise ValueError("this call may change its argument")
    lower = output if not np.any(np.triu(output, 1)) else np.swapaxes(output.conj(), -1, -2)
    # Only one triangle of the argument is read.
    product = lower @ np.swapaxes(lower.conj(), -1, -2)
    half = np.tril if lower is output else np.triu
    return _relative(half(args[0] - product), half(args[0]))


def _singular(output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    if not isinstance(output, tuple):
        raise ValueError("without vectors there is no product")
    if len(args) > 3 or kwargs.get("hermitian"):
        raise ValueError("of a Hermitian matrix one triangle is read, and the argument may be changed")
    left, values, right = output
    count = values.shape[-1]
    return _relative(args[0] - (left[..., :count] * values[..., None, :]) @ right[..., :count, :], args[0])


def _eigen(output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    if not isinstance(output, tuple):
        raise ValueError("without vectors there is no product")
    second = args[1] if len(args) > 1 else kwargs.get("b", kwargs.get("UPLO", "L"))
    if not isinstance(second, str) and second is not None:
        raise ValueError("a generalized problem is not compared")
    values, vectors = output
    is_upper = second in ("U", "u") or kwargs.get("lower") is False
    read = np.swapaxes(args[0].conj(), -1, -2) if is_upper else args[0]
    whole = np.tril(read) + np.swapaxes(np.tril(read, -1).conj(), -1, -2)
    return _relative(whole @ vectors - vectors * values[..., None, :], whole)


def _parseval(output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the largest relative difference of the energies of a signal and its unnormalised spectrum."""
    signal = args[0]
    norm = args[3] if len(args) > 3 else kwargs.get("norm")
    if output.shape != signal.shape or norm not in (None, "backward") or len(args) > 4:
        raise ValueError("only unnormalised transforms of the whole signal are compared")
    axis = _axis(args, kwargs)
    lines, spectra = np.moveaxis(signal, axis, -1)[..., None, :], np.moveaxis(output, axis, -1)[..., None, :]
    before, after = _norms(lines) * math.sqrt(signal.shape[axis]), _norms(spectra)
    ratios = after / np.where(before > 0, before, 1)
    return float(np.abs(np.where(before > 0, ratios**2 - 1, after)).max(initial=0))


def _axis(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return int(args[2] if len(args) > 2 else kwargs.get("axis", -1))


def _doublings(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return log2 n of a transform, by which its error grows at most."""
    return max(1.0, math.log2(args[0].shape[_axis(args, kwargs)]))


def _norms(arrays: Any) -> Any:
    """Return the Frobenius norm of each matrix in float64. Squares neither overflow nor vanish."""
    sizes = np.abs(arrays).astype(float)
    largest = sizes.max(axis=(-2, -1), keepdims=True, initial=0)
    unit = np.where(np.isfinite(largest) & (largest > 0), largest, 1)
    return np.sqrt(((sizes / unit) ** 2).sum(axis=(-2, -1))) * unit[..., 0, 0]


def _relative(difference: Any, *factors: Any) -> float:
    """Return the largest norm of the differences of a batch, each relative to the product of its factors' norms."""
    errors = _norms(difference)
    for factor in factors:
        size = _norms(factor)
        errors = errors / np.where(size > 0, size, 1)
    return float(np.max(errors, initial=0))


SOLVED: tuple[Check, ...] = (Residual("residual of A x = b", _solved),)
FACTORED: tuple[Check, ...] = (Residual("residual of A = Q R", _factored),)
CHOLESKY: tuple[Check, ...] = (Residual("residual of A = L L*", _cholesky),)
SINGULAR: tuple[Check, ...] = (Residual("residual of A = U S V*", _singular),)
EIGEN: tuple[Check, ...] = (Residual("residual of A V = V w", _eigen),)
PARSEVAL: tuple[Check, ...] = (Residual("Parseval", _parseval, _doublings),)
MOMENTS: tuple[Check, ...] = (NormalMoments(),)
