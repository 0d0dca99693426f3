"""Checks of a brick's output: finite, within bounds, or equal to a reference. The checks take arrays of NumPy, torch
and CuPy.

    RMS_NORM = BrickDefinition.of(BrickId.RMS_NORM, checks=(Finite(), Bounded(-100, 100), Equivalent(slow_rms_norm)))

    @profiler.timed(RMS_NORM)
    def rms_norm(x, weight): ...

Rules
- A check runs after a recorded call of a function that `BrickProfiler.timed` wraps, or when `BrickProfiler.check` is
  called. Its time is not part of the brick.
- The first FIRST calls of a definition are checked. Later calls are checked while all checks together took less than
  SHARE of the time since the first one. To read a result from a GPU, the host waits for the GPU.
- A check that failed once stays failed. A check that raises an exception counts as skipped, with the reason.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cbtop.protocol import clock
from cbtop.protocol.messages import CheckResult
from cbtop.protocol.signals import reraise_host_error

FIRST = 3
SHARE = 0.01
# Most results that are stored; the limit keeps a host with ever new names from filling the memory.
MAX_RESULTS = 10_000
LIBRARIES = ("numpy", "torch", "cupy")


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of one check of one output. `max_error` is unknown if a value is not finite."""

    passed: bool
    max_error: float | None = None
    tolerance: float | None = None
    not_finite: str = ""  # "NaN" or "infinity"
    note: str = ""


class Check(Protocol):
    """A condition on the output of a brick. Any class with these two members can be used as a check."""

    @property
    def name(self) -> str:
        """The name of the check on screens and in reports."""

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        """Return whether `output`, the result of a call with these arguments, is right."""


@dataclass(frozen=True, slots=True)
class Finite:
    """The check that the output, an array or a tuple or list of arrays, contains no NaN and no infinity."""

    @property
    def name(self) -> str:
        return "finite"

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        found = next((bad for bad in map(_not_finite, _arrays(output)) if bad), "")
        return CheckOutcome(not found, not_finite=found)


@dataclass(frozen=True, slots=True)
class Bounded:
    """The check that every value of the output is at least `low` and at most `high`."""

    low: float
    high: float

    @property
    def name(self) -> str:
        return f"from {self.low:g} to {self.high:g}"

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        least, most = math.inf, -math.inf
        for array in _arrays(output):
            if _not_finite(array) == "NaN":
                return CheckOutcome(False, not_finite="NaN")
            if _size(array):
                least, most = min(least, float(array.min())), max(most, float(array.max()))
        is_inside = least >= self.low and most <= self.high
        return CheckOutcome(is_inside, note="" if is_inside else f"values from {least:g} to {most:g}")


@dataclass(frozen=True, slots=True)
class Equivalent:
    """The check that max|output - expected| <= tolerance * max|expected|, with expected = reference(*args, **kwargs).

    The checked function must not change its arguments. The reference gets the same arguments after the call.
    """

    reference: Callable[..., Any]
    tolerance: float = 1e-5

    @property
    def name(self) -> str:
        return f"equals {getattr(self.reference, '__name__', 'reference')}"

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        with _without_gradients():
            expected = list(_arrays(self.reference(*args, **kwargs)))
        found = list(_arrays(output))
        if [_shape(one) for one in found] != [_shape(one) for one in expected]:
            shapes = (", ".join(str(_shape(one)) for one in arrays) for arrays in (found, expected))
            return CheckOutcome(False, None, self.tolerance, note="shape {} instead of {}".format(*shapes))
        error = 0.0
        for one, other in zip(found, expected, strict=True):
            if bad := _not_finite(one) or _not_finite(other):
                return CheckOutcome(False, None, self.tolerance, bad)
            if _size(one):
                wanted = _as_double(other)
                difference, largest = float(abs(_as_double(one) - wanted).max()), float(abs(wanted).max())
                error = max(error, difference / largest if largest > 0 else difference)
        return CheckOutcome(error <= self.tolerance, error, self.tolerance)


class BrickChecks:
    """Evaluates the checks of definitions, counts their outcomes, and announces them."""

    def __init__(self, announce: Callable[[CheckResult], None]) -> None:
        self._announce = announce
        self._lock = threading.Lock()
        self._calls: dict[tuple[str, str], int] = {}  # number of evaluations, by the names of brick and check
        self._results: dict[tuple[str, str], CheckResult] = {}
        self._begun_ns = self._spent_ns = 0

    def is_due(self, brick: str, checks: tuple[Check, ...]) -> bool:
        """Return whether to check the call of `brick` that has just ended."""
        if any(self._calls.get((brick, check.name), 0) < FIRST for check in checks):
            return True
        return self._spent_ns < SHARE * (clock.perf_counter_ns() - self._begun_ns)

    def evaluate(
        self, brick: str, checks: tuple[Check, ...], output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Evaluate the checks of `brick` for a call, unless another thread evaluates checks at this moment."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            begun_ns = clock.perf_counter_ns()
            self._begun_ns = self._begun_ns or begun_ns
            for check in checks:
                self._count(brick, check.name, _outcome(brick, check, output, args, kwargs))
            self._spent_ns += clock.perf_counter_ns() - begun_ns
        finally:
            self._lock.release()

    def _count(self, brick: str, name: str, found: CheckResult) -> None:
        about = brick, name
        if about not in self._calls and len(self._calls) >= MAX_RESULTS:
            return
        calls = self._calls[about] = self._calls.get(about, 0) + 1
        before = self._results.get(about)
        has_failed = before is not None and not before.passed and not before.skipped
        if has_failed and before is not None:
            found = before
        elif before is not None and found.passed and not found.skipped and before.max_error is not None:
            found = replace(found, max_error=max(before.max_error, found.max_error or 0.0))
        self._results[about] = found
        fails_now = not has_failed and not found.passed
        if fails_now or calls & (calls - 1) == 0:  # announce the first failure, and evaluations number 1, 2, 4, 8 …
            detail = f"{found.note}; " if found.note else ""
            self._announce(replace(found, note=f"{detail}{calls:,} {'call' if calls == 1 else 'calls'} checked"))


def _outcome(brick: str, check: Check, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckResult:
    try:
        found = check.evaluate(output, args, kwargs)
        return CheckResult(
            brick, check.name, bool(found.passed), found.max_error, found.tolerance, found.not_finite, "", found.note
        )
    except Exception as error:  # noqa: BLE001 - a check of the host failed: its result says why
        reraise_host_error(error)
        return CheckResult(brick, check.name, True, None, None, skipped=f"{type(error).__name__}: {error}")


def _arrays(output: Any) -> Iterator[Any]:
    """Yield the arrays of an output: the output itself, or the arrays in its tuples and lists.

    Raises TypeError for an output without arrays.
    """
    if isinstance(output, tuple | list):
        for one in output:
            yield from _arrays(one)
    elif _library_of(output) is None:
        raise TypeError(f"a {type(output).__name__} is no array of {', '.join(LIBRARIES)}")
    else:
        yield output.detach() if hasattr(output, "detach") else output


def _library_of(array: Any) -> Any:
    """Return the module numpy, torch or cupy if `array` is one of its arrays, or None."""
    for kind in type(array).__mro__:
        name = kind.__module__.partition(".")[0]
        if name in LIBRARIES:
            return sys.modules.get(name)
    return None


def _not_finite(array: Any) -> str:
    """Return "NaN" or "infinity" if a value is not finite, or "" if all values are finite."""
    library = _library_of(array)
    if bool(library.isfinite(array).all()):
        return ""
    return "NaN" if bool(library.isnan(array).any()) else "infinity"


def _as_double(array: Any) -> Any:
    return array.double() if hasattr(array, "double") else array.astype("float64")


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(array.shape)


def _size(array: Any) -> int:
    return math.prod(array.shape)


def _without_gradients() -> AbstractContextManager[Any]:
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.no_grad()
