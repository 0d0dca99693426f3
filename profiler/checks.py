"""Checks of a brick's output: finite, within bounds, or equal to a reference. The checks take arrays of NumPy, torch
and CuPy.

    RMS_NORM = BrickDefinition.of(BrickId.RMS_NORM, checks=(Finite(), Bounded(-100, 100), Equivalent(slow_rms_norm)))

    @profiler.timed(RMS_NORM)
    def rms_norm(x, weight): ...

Rules
- `evaluate` waits for the device of the output. A check can have two more methods, so that nothing waits for a GPU:
  `device_figures` computes numbers on the device, and `outcome_of` makes the outcome of these numbers.
- brick_checks.py decides which calls are checked, and counts the outcomes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

LIBRARIES = ("numpy", "torch", "cupy")
NO_VALUES = "the output has no values"
FIGURES = 7  # the number of figures of a tensor that `Equivalent` compares on a device
EXACT_BELOW = 1 << 53  # float64 holds every integer up to this one


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of a check of one output. `max_error` is unknown if a value is not finite."""

    passed: bool
    max_error: float | None = None
    tolerance: float | None = None
    not_finite: str = ""  # "NaN" or "infinity"
    note: str = ""


#: The outcome of a check that passed and reports nothing else. A check that returns this object is counted faster.
PASSED = CheckOutcome(True)


class Check(Protocol):
    """A condition on a brick's output. Any class with these two members is a check."""

    @property
    def name(self) -> str:
        """The name of the check on screens and in reports."""

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        """Return whether `output`, the result of a call with these arguments, is right."""


class HasChecks(Protocol):
    """The part of a BrickDefinition that checks need."""

    @property
    def name(self) -> str:
        """The name of the brick."""

    @property
    def checks(self) -> tuple[Check, ...]:
        """The conditions on the output of the brick."""


@dataclass(frozen=True, slots=True)
class Finite:
    """Checks that the output (an array, or a tuple or list of arrays) has no NaN and no infinity."""

    @property
    def name(self) -> str:
        """The name of the check on screens and in reports."""
        return "finite"

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        """Return whether all values of `output` are finite. Raises ValueError if it has no values."""
        arrays = list(arrays_of(output))
        _require_values(arrays)
        found = next((bad for bad in map(_not_finite, arrays) if bad), "")
        return CheckOutcome(False, not_finite=found) if found else PASSED

    def device_figures(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return whether each tensor is finite, and whether it has a NaN, as tensors on its device."""
        arrays = list(arrays_of(output))
        _require_values(arrays)
        return [figure for array in arrays for figure in _finiteness(array)]

    def outcome_of(self, figures: Sequence[float]) -> CheckOutcome:
        """Return the outcome of these `device_figures`."""
        found = _first_not_finite(figures)
        return CheckOutcome(False, not_finite=found) if found else PASSED


@dataclass(frozen=True, slots=True)
class Bounded:
    """Checks that every value of the output is from `low` to `high`."""

    low: float
    high: float

    @property
    def name(self) -> str:
        """The name of the check on screens and in reports."""
        return f"from {self.low:g} to {self.high:g}"

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        """Return whether all values of `output` are within the bounds. Raises ValueError if it has no values."""
        least, most = math.inf, -math.inf
        for array in arrays_of(output):
            if _not_finite(array) == "NaN":
                return CheckOutcome(False, not_finite="NaN")
            if _size(array):
                least, most = min(least, float(array.min())), max(most, float(array.max()))
        return self._outcome(least, most)

    def device_figures(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the smallest and the largest value of each tensor, as tensors on its device."""
        arrays = list(arrays_of(output))
        _require_values(arrays)
        return [figure for array in arrays if _size(array) for figure in (array.min(), array.max())]

    def outcome_of(self, figures: Sequence[float]) -> CheckOutcome:
        """Return the outcome of these `device_figures`."""
        if any(math.isnan(figure) for figure in figures):
            return CheckOutcome(False, not_finite="NaN")
        return self._outcome(min(figures), max(figures))

    def _outcome(self, least: float, most: float) -> CheckOutcome:
        if least > most:
            raise ValueError(NO_VALUES)
        is_inside = least >= self.low and most <= self.high
        return PASSED if is_inside else CheckOutcome(False, note=f"values from {least:g} to {most:g}")


@dataclass(frozen=True, slots=True)
class Equivalent:
    """Checks that max|output - expected| <= tolerance * max|expected|, where expected = reference(*args, **kwargs).

    The reference runs after the checked function, with the same arguments. The function must not change them.
    """

    reference: Callable[..., Any]
    tolerance: float = 1e-5

    @property
    def name(self) -> str:
        """The name of the check on screens and in reports."""
        name = getattr(self.reference, "__name__", "")
        return f"equals {name if name.isidentifier() else 'reference'}"

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        """Return whether `output` equals the result of the reference for these arguments."""
        found, expected = self._both(output, args, kwargs)
        if different := self._different_shapes(found, expected):
            return different
        _require_values(found)
        error = 0.0
        for one, other in zip(found, expected, strict=True):
            if bad := _not_finite(one) or _not_finite(other):
                return CheckOutcome(False, None, self.tolerance, bad)
            if _size(one):
                difference, largest = _difference(one, other)
                if not math.isfinite(difference):
                    return self._too_large()
                error = max(error, _relative(difference, largest))
        return CheckOutcome(error <= self.tolerance, error, self.tolerance)

    def device_figures(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | CheckOutcome:
        """Return FIGURES numbers for each tensor, as tensors on its device, or the outcome if shapes differ."""
        found, expected = self._both(output, args, kwargs)
        if different := self._different_shapes(found, expected):
            return different
        _require_values(found)
        return [
            figure
            for one, other in zip(found, expected, strict=True)
            if _size(one)
            for figure in (*_finiteness(one), *_finiteness(other), *_device_difference(one, other))
        ]

    def outcome_of(self, figures: Sequence[float]) -> CheckOutcome:
        """Return the outcome of these `device_figures`."""
        error = 0.0
        for at in range(0, len(figures), FIGURES):
            *finiteness, difference, largest, exact = figures[at : at + FIGURES]
            if bad := _first_not_finite(finiteness):
                return CheckOutcome(False, None, self.tolerance, bad)
            if not math.isfinite(difference):
                return self._too_large()
            error = max(error, _relative(difference or exact, largest))
        return CheckOutcome(error <= self.tolerance, error, self.tolerance)

    def _both(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        with _without_gradients():
            expected = list(arrays_of(self.reference(*args, **kwargs)))
        return list(arrays_of(output)), expected

    def _different_shapes(self, found: list[Any], expected: list[Any]) -> CheckOutcome | None:
        if [_shape(one) for one in found] == [_shape(one) for one in expected]:
            return None
        shapes = (", ".join(str(_shape(one)) for one in arrays) for arrays in (found, expected))
        return CheckOutcome(False, None, self.tolerance, note="shape {} instead of {}".format(*shapes))

    def _too_large(self) -> CheckOutcome:
        return CheckOutcome(False, None, self.tolerance, note="the difference exceeds float64")


def arrays_of(output: Any) -> Iterator[Any]:
    """Yield the arrays of an output: itself, or those in its tuples and lists.

    Raises TypeError if it contains no array, or if an array hides values.
    """
    if isinstance(output, tuple | list):
        for one in output:
            yield from arrays_of(one)
    elif hasattr(output, "mask"):  # numpy.ma leaves the values under a mask out of every comparison
        raise TypeError(f"a {type(output).__name__} hides values; return its data, or check `filled()` of it")
    elif library_of(output) is None:
        raise TypeError(f"a {type(output).__name__} is no array of {', '.join(LIBRARIES)}")
    else:
        yield output.detach() if hasattr(output, "detach") else output


def library_of(array: Any) -> Any:
    """Return numpy, torch or cupy if `array` is an array of this module, else None."""
    name = type(array).__module__
    if name in LIBRARIES:  # an array itself; what follows is for subclasses
        return sys.modules.get(name)
    for kind in type(array).__mro__:
        name = kind.__module__.partition(".")[0]
        if name in LIBRARIES:
            return sys.modules.get(name)
    return None


def _not_finite(array: Any) -> str:
    """Return "NaN" or "infinity" if a value is not finite, else ""."""
    library = library_of(array)
    if bool(library.isfinite(array).all()):
        return ""
    return "NaN" if bool(library.isnan(array).any()) else "infinity"


def _difference(array: Any, expected: Any) -> tuple[float, float]:
    """Return max|array - expected| and max|expected|, computed in float64 or complex128.

    If float64 rounds the difference of integers to 0, the difference is computed in their own type.
    """
    library, own = library_of(array), (array, expected)
    is_complex = _is_complex(array) or _is_complex(expected)
    numpy = sys.modules.get("numpy")
    with nullcontext() if numpy is None else numpy.errstate(over="ignore", invalid="ignore"):  # the caller tests this
        array, expected = _widened(array, is_complex=is_complex), _widened(expected, is_complex=is_complex)
        difference, largest = float(abs(array - expected).max()), float(abs(expected).max())
    if not difference and largest >= EXACT_BELOW and not is_complex:
        difference = float((library.maximum(*own) - library.minimum(*own)).max())
    return difference, largest


def _finiteness(tensor: Any) -> tuple[Any, Any]:
    """Return whether all values are finite, and whether one is NaN, as tensors on the device."""
    torch = library_of(tensor)
    return torch.isfinite(tensor).all(), torch.isnan(tensor).any()


def _first_not_finite(figures: Sequence[float]) -> str:
    """Return "NaN" or "infinity" for the first pair of `_finiteness` that is not finite, else ""."""
    for is_finite, has_nan in zip(figures[::2], figures[1::2], strict=True):
        if not is_finite:
            return "NaN" if has_nan else "infinity"
    return ""


def _device_difference(tensor: Any, expected: Any) -> tuple[Any, Any, Any]:
    """Return the numbers of `_difference`, and the difference in the tensors' own type, as tensors on the device."""
    is_complex = _is_complex(tensor) or _is_complex(expected)
    widened, expected_widened = (_widened(one, is_complex=is_complex) for one in (tensor, expected))
    difference, largest = abs(widened - expected_widened).max(), abs(expected_widened).max()
    if any(one.is_complex() or one.is_floating_point() or one.element_size() < 8 for one in (tensor, expected)):
        return difference, largest, difference
    torch = library_of(tensor)
    return difference, largest, (torch.maximum(tensor, expected) - torch.minimum(tensor, expected)).max()


def _relative(difference: float, largest: float) -> float:
    return difference / largest if largest > 0 else difference


def _is_complex(array: Any) -> bool:
    return bool(array.is_complex()) if hasattr(array, "is_complex") else array.dtype.kind == "c"


def _widened(array: Any, *, is_complex: bool) -> Any:
    if hasattr(array, "double"):
        return array.cdouble() if is_complex else array.double()
    return array.astype("complex128" if is_complex else "float64")


def _require_values(arrays: list[Any]) -> None:
    """Raise ValueError if all `arrays` are empty, because a check of nothing must not pass."""
    if not any(map(_size, arrays)):
        raise ValueError(NO_VALUES)


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(array.shape)


def _size(array: Any) -> int:
    return math.prod(array.shape)


def _without_gradients() -> AbstractContextManager[Any]:
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.no_grad()
