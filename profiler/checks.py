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
- A check that failed once stays failed. A check that raises an exception, or that finds no value to compare, counts
  as skipped, with the reason. The number of checked calls does not include skipped ones.
- Results are announced at the first, second, fourth, eighth … call, and exactly when recording ends. So a running
  process, and one that was killed, has "at least" so many calls checked.
- A forked child begins without results.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cbtop.protocol import clock
from cbtop.protocol.messages import CheckResult
from cbtop.protocol.signals import reraise_host_error

FIRST = 3
SHARE = 0.01
MAX_RESULTS = 10_000  # most results and definitions that are stored, in case the host makes ever new ones
LIBRARIES = ("numpy", "torch", "cupy")
NO_VALUES = "the output has no values"
_now_ns = clock.perf_counter_ns
EXACT_BELOW = 1 << 53  # float64 holds every integer up to this one


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of a check of one output. `max_error` is unknown if a value is not finite."""

    passed: bool
    max_error: float | None = None
    tolerance: float | None = None
    not_finite: str = ""  # "NaN" or "infinity"
    note: str = ""


#: The outcome of a check that passed and has no more to say. A check that returns this object is counted faster.
PASSED = CheckOutcome(True)


class Check(Protocol):
    """A condition on a brick's output. Any class with these two members is a check."""

    @property
    def name(self) -> str:
        """The name of the check on screens and in reports."""

    def evaluate(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckOutcome:
        """Return whether `output`, the result of a call with these arguments, is right."""


class HasChecks(Protocol):
    """What this file needs of a BrickDefinition."""

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
        arrays = list(_arrays(output))
        _require_values(arrays)
        found = next((bad for bad in map(_not_finite, arrays) if bad), "")
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
        for array in _arrays(output):
            if _not_finite(array) == "NaN":
                return CheckOutcome(False, not_finite="NaN")
            if _size(array):
                least, most = min(least, float(array.min())), max(most, float(array.max()))
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
        with _without_gradients():
            expected = list(_arrays(self.reference(*args, **kwargs)))
        found = list(_arrays(output))
        if [_shape(one) for one in found] != [_shape(one) for one in expected]:
            shapes = (", ".join(str(_shape(one)) for one in arrays) for arrays in (found, expected))
            return CheckOutcome(False, None, self.tolerance, note="shape {} instead of {}".format(*shapes))
        _require_values(found)
        error = 0.0
        for one, other in zip(found, expected, strict=True):
            if bad := _not_finite(one) or _not_finite(other):
                return CheckOutcome(False, None, self.tolerance, bad)
            if _size(one):
                difference, largest = _difference(one, other)
                if not math.isfinite(difference):
                    return CheckOutcome(False, None, self.tolerance, note="the difference exceeds float64")
                error = max(error, difference / largest if largest > 0 else difference)
        return CheckOutcome(error <= self.tolerance, error, self.tolerance)


class _CheckTally:
    """The outcomes of all calls of the checks with one name, of the bricks with one name.

    `usual` is an outcome that adds nothing to the result except a call. Most checks return the same object for every
    call that passes, so most calls are counted by comparing two addresses.
    """

    __slots__ = ("announced_at", "brick", "evaluated", "name", "result", "skipped", "usual")

    def __init__(self, brick: str, name: str) -> None:
        self.brick, self.name = brick, name
        self.evaluated = self.skipped = 0
        self.announced_at = 1  # the number of evaluated calls at which the result is announced next
        self.result: CheckResult | None = None
        self.usual: CheckOutcome | None = None

    def count_passed(self, found: CheckOutcome) -> bool:
        """Count an outcome that adds nothing to the result except a call. Returns False for any other outcome."""
        result = self.result
        if result is None or found.passed is not True or not result.passed or result.skipped or found.note:
            return False
        if found.max_error is not None and not found.max_error <= (result.max_error or 0.0):
            return False
        self.evaluated += 1
        if type(found) is CheckOutcome:  # it is frozen, so it means the same at the next call
            self.usual = found
        return True

    def count(self, found: CheckResult) -> bool:
        """Count an outcome. Returns whether it must be announced at once."""
        is_first_skip = bool(found.skipped) and not self.skipped
        if found.skipped:
            self.skipped += 1
        else:
            self.evaluated += 1
        self.result, self.usual = _merged(self.result, found), None
        return is_first_skip or (self.result is found and not found.passed)

    def is_announced(self) -> bool:
        """Return whether this was the first, second, fourth, eighth … call, and set the number of the next one."""
        total = self.evaluated + self.skipped
        self.announced_at = (1 << total.bit_length()) - self.skipped
        return total & (total - 1) == 0

    def message(self, *, is_last: bool = False) -> CheckResult:
        """Return the result with the number of calls. Only the last message is sure of it."""
        assert self.result is not None
        least = "" if is_last else "at least "
        notes = [self.result.note, f"{least}{self.evaluated:,} {'call' if self.evaluated == 1 else 'calls'} checked"]
        if self.skipped:
            notes.append(f"{least}{self.skipped:,} skipped")
        return replace(self.result, note="; ".join(filter(None, notes)))


class BrickChecks:
    """Runs the checks of definitions, counts their outcomes, and announces them.

    `past_first` has the definitions with at least FIRST checked calls; it is always the same set. From the time
    `due_ns` on, the checks have used less than their share.
    """

    due_ns: float

    def __init__(self, announce: Callable[[CheckResult], None]) -> None:
        self._announce = announce
        self.past_first: set[HasChecks] = set()
        self.forget()

    def forget(self) -> None:
        """Begin without results, as a forked child does. No thread runs checks afterwards."""
        # Empty while a thread runs checks. `pop` and `append` of a list are atomic, and take a fifth of the time of a
        # lock (200 ns).
        self._turn: list[None] = [None]
        self._checked: dict[HasChecks, int] = {}  # number of checked calls of each definition
        self.past_first.clear()
        self._tallies: dict[tuple[str, str], _CheckTally] = {}  # by the names of brick and check
        self._of: dict[HasChecks, list[tuple[Check, _CheckTally]]] = {}
        self._begun_ns = self._spent_ns = 0
        self.due_ns = 0.0

    def announce_last(self) -> None:
        """Announce all results with the exact numbers of calls, because no check follows."""
        for tally in list(self._tallies.values()):  # a copy, because another thread may still run its first checks
            if tally.result is not None:
                self._announce(tally.message(is_last=True))

    def is_due(self, definition: HasChecks) -> bool:
        """Return whether to check the call of `definition` that has just ended."""
        return definition not in self.past_first or _now_ns() > self.due_ns

    def evaluate(self, definition: HasChecks, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the checks of `definition` for a call, unless another thread is running checks."""
        turn = self._turn  # `forget` makes a new one
        try:
            turn.pop()
        except IndexError:
            return
        try:
            begun_ns = _now_ns()
            if definition not in self.past_first and not self._count_first(definition) and begun_ns <= self.due_ns:
                return
            self._begun_ns = self._begun_ns or begun_ns
            for check, tally in self._of.get(definition) or self._tallies_of(definition):
                try:
                    outcome = check.evaluate(output, args, kwargs)
                    if outcome is tally.usual and tally.evaluated + 1 < tally.announced_at:
                        tally.evaluated += 1
                        continue
                    found = None if tally.count_passed(outcome) else _result(tally, outcome)
                except Exception as error:  # noqa: BLE001 - a check of the host failed: its result says why
                    reraise_host_error(error)
                    why = f"{type(error).__name__}: {error}"
                    found = CheckResult(tally.brick, tally.name, True, None, None, skipped=why)
                is_news = found is not None and tally.count(found)
                if tally.is_announced() or is_news:
                    self._announce(tally.message())
            self._spent_ns += _now_ns() - begun_ns
            self.due_ns = self._begun_ns + self._spent_ns / SHARE
        finally:
            turn.append(None)

    def _count_first(self, definition: HasChecks) -> bool:
        """Count one of the first calls of `definition`. Returns False if too many definitions are stored already."""
        if definition not in self._checked and len(self._checked) >= MAX_RESULTS:
            return False
        checked = self._checked[definition] = self._checked.get(definition, 0) + 1
        if checked >= FIRST:
            self.past_first.add(definition)
        return True

    def _tallies_of(self, definition: HasChecks) -> list[tuple[Check, _CheckTally]]:
        """Return the checks of `definition` with their tallies. Checks beyond MAX_RESULTS are left out."""
        found = []
        for check in definition.checks:
            about = definition.name, check.name
            if about in self._tallies or len(self._tallies) < MAX_RESULTS:
                found.append((check, self._tallies.setdefault(about, _CheckTally(*about))))
        if len(self._of) < MAX_RESULTS:
            self._of[definition] = found
        return found


def _result(tally: _CheckTally, found: CheckOutcome) -> CheckResult:
    max_error, tolerance = _finite_or_none(found.max_error), _finite_or_none(found.tolerance)
    return CheckResult(
        tally.brick, tally.name, bool(found.passed), max_error, tolerance, found.not_finite, "", found.note
    )


def _merged(before: CheckResult | None, found: CheckResult) -> CheckResult:
    """Return the result of a check from its result `before` and that of the latest call. A failure stays."""
    if before is None or before.skipped:
        return found
    if not before.passed or found.skipped:
        return before
    if found.passed and before.max_error is not None:
        return replace(found, max_error=max(before.max_error, found.max_error or 0.0))
    return found


def _finite_or_none(number: Any) -> float | None:
    """Return `number` as a float, or None if a message cannot contain it."""
    return None if number is None or not math.isfinite(number) else float(number)


def _arrays(output: Any) -> Iterator[Any]:
    """Yield the arrays of an output: itself, or those in its tuples and lists.

    Raises TypeError if there are none, or if one hides values.
    """
    if isinstance(output, tuple | list):
        for one in output:
            yield from _arrays(one)
    elif hasattr(output, "mask"):  # numpy.ma leaves the values under a mask out of every comparison
        raise TypeError(f"a {type(output).__name__} hides values; return its data, or check `filled()` of it")
    elif _library_of(output) is None:
        raise TypeError(f"a {type(output).__name__} is no array of {', '.join(LIBRARIES)}")
    else:
        yield output.detach() if hasattr(output, "detach") else output


def _library_of(array: Any) -> Any:
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
    library = _library_of(array)
    if bool(library.isfinite(array).all()):
        return ""
    return "NaN" if bool(library.isnan(array).any()) else "infinity"


def _difference(array: Any, expected: Any) -> tuple[float, float]:
    """Return max|array - expected| and max|expected|, computed in float64 or complex128.

    If float64 rounds the difference of integers to 0, the difference is computed in their own type.
    """
    library, own = _library_of(array), (array, expected)
    is_complex = _is_complex(array) or _is_complex(expected)
    numpy = sys.modules.get("numpy")
    with nullcontext() if numpy is None else numpy.errstate(over="ignore", invalid="ignore"):  # the caller tests this
        array, expected = _widened(array, is_complex=is_complex), _widened(expected, is_complex=is_complex)
        difference, largest = float(abs(array - expected).max()), float(abs(expected).max())
    if not difference and largest >= EXACT_BELOW and not is_complex:
        difference = float((library.maximum(*own) - library.minimum(*own)).max())
    return difference, largest


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
