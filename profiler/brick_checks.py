"""Runs the checks of bricks (checks.py), counts their outcomes, and announces them.

Rules
- A check runs after a recorded call of a function that `BrickProfiler.timed` wraps, or when `BrickProfiler.check` is
  called. Its time is not part of the brick.
- The first FIRST calls of a definition are checked. Later calls are checked while all checks together took less than
  SHARE of the time since the first one. Time on a GPU counts, too.
- Finite, Bounded and Equivalent do not wait for a GPU if the output is a tensor of torch (late_checks.py). A later
  check reads their outcomes. Until then, only first calls are checked. All other checks wait.
- No check runs while a CUDA graph is captured, because waiting for the device would break the capture.
- A check that failed once stays failed. A check that raises an exception, or that finds no value to compare, counts
  as skipped, with the reason. The number of checked calls does not include skipped ones.
- Results are announced at the first, second, fourth, eighth … call, and exactly when recording ends. So a running
  process, and one that was killed, has "at least" this number of calls checked.
- A forked child begins without results.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cbtop.profiler.checks import Check, CheckOutcome, HasChecks
from cbtop.profiler.late_checks import LateOutcome, begin, is_captured
from cbtop.protocol import clock
from cbtop.protocol.messages import CheckResult
from cbtop.protocol.signals import reraise_host_error

FIRST = 3
SHARE = 0.01
MAX_RESULTS = 10_000  # most results and definitions that are stored, in case the host makes ever new ones
MAX_LATE = 1_000  # at most this many outcomes are awaited from a device
POLL_NS = 1_000_000  # how long to wait before looking again for an outcome from a device
LAST_WAIT_NS = 1_000_000_000  # how long to wait for outcomes when recording ends; a device may hang
CAPTURED = "a CUDA graph was captured; its replays run no Python, so nothing is checked in them"
_now_ns = clock.perf_counter_ns
# Outcomes that a forked child has from its parent. Freeing their events would call CUDA, which a child cannot do.
_of_parents: list[object] = []
_numpy_kinds: set[type] = set()  # types of outputs that are on no device; reading `__module__` takes 100 ns


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
        """Begin without results. No thread runs checks afterwards."""
        # Empty while a thread runs checks. `pop` and `append` of a list are atomic, and take a fifth of the time of a
        # lock (200 ns).
        self._turn: list[None] = [None]
        self._checked: dict[HasChecks, int] = {}  # number of checked calls of each definition
        self.past_first.clear()
        self._tallies: dict[tuple[str, str], _CheckTally] = {}  # by the names of brick and check
        self._of: dict[HasChecks, list[tuple[Check, _CheckTally]]] = {}
        self._late: deque[tuple[_CheckTally, LateOutcome]] = deque()  # outcomes that a device has not sent yet
        self._begun_ns = self._spent_ns = 0
        self.due_ns = 0.0

    def after_fork(self) -> None:
        """Begin without results in a forked child."""
        _of_parents.append(self._late)
        self.forget()

    def announce_last(self) -> None:
        """Announce all results with the exact numbers of calls, because no check follows.

        Waits up to LAST_WAIT_NS for outcomes from a device. Outcomes that do not arrive are not counted.
        """
        given_up_ns = _now_ns() + LAST_WAIT_NS
        while not is_captured(None) and not self._read_late() and _now_ns() < given_up_ns:
            time.sleep(POLL_NS / 1e9)
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
            kind = type(output)
            is_numpy = kind in _numpy_kinds
            if not is_numpy and kind.__module__ == "numpy":
                _numpy_kinds.add(kind)
            if (self._late or not is_numpy) and self._is_postponed(definition, output, begun_ns):
                return
            if definition not in self.past_first and not self._count_first(definition) and begun_ns <= self.due_ns:
                return
            self._begun_ns = self._begun_ns or begun_ns
            for check, tally in self._of.get(definition) or self._tallies_of(definition):
                try:
                    outcome = check.evaluate(output, args, kwargs) if is_numpy else begin(check, output, args, kwargs)
                    if outcome is tally.usual and tally.evaluated + 1 < tally.announced_at:
                        tally.evaluated += 1
                    elif isinstance(outcome, LateOutcome):
                        self._late.append((tally, outcome))
                    else:
                        self._count(tally, outcome)
                except Exception as error:  # noqa: BLE001 - a check of the host failed: its result says why
                    reraise_host_error(error)
                    self._skip(tally, f"{type(error).__name__}: {error}")
            ended_ns = _now_ns()
            self._spent_ns += ended_ns - begun_ns
            self.due_ns = ended_ns + POLL_NS if self._late else self._begun_ns + self._spent_ns / SHARE
        finally:
            turn.append(None)

    def _is_postponed(self, definition: HasChecks, output: Any, now_ns: int) -> bool:
        """Return whether to check a later call instead: a device has outcomes, or a CUDA graph is captured."""
        if is_captured(output):
            for _, tally in self._of.get(definition) or self._tallies_of(definition):
                self._skip(tally, CAPTURED)
            return True
        is_first = definition not in self.past_first
        if self._read_late():
            self.due_ns = self._begun_ns + self._spent_ns / SHARE
            return not is_first and now_ns <= self.due_ns
        if is_first and len(self._late) < MAX_LATE:
            return False
        self.due_ns = max(self.due_ns, now_ns + POLL_NS)
        return True

    def _read_late(self) -> bool:
        """Count the outcomes that have arrived from devices. Returns whether none is missing."""
        late = self._late
        while late:
            try:
                tally, outcome = late.popleft()
            except IndexError:  # another thread took it
                return True
            try:
                if not outcome.has_arrived():
                    late.appendleft((tally, outcome))
                    return False
                found, device_ns = outcome.read()
                self._spent_ns += device_ns
                self._count(tally, found)
            except Exception as error:  # noqa: BLE001 - a fault of the host's device: its result says so
                reraise_host_error(error)
                self._skip(tally, f"{type(error).__name__}: {error}")
        return True

    def _count(self, tally: _CheckTally, outcome: CheckOutcome) -> None:
        is_news = not tally.count_passed(outcome) and tally.count(_result(tally, outcome))
        if tally.is_announced() or is_news:
            self._announce(tally.message())

    def _skip(self, tally: _CheckTally, why: str) -> None:
        is_news = tally.count(CheckResult(tally.brick, tally.name, True, None, None, skipped=why))
        if tally.is_announced() or is_news:
            self._announce(tally.message())

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
        names = Counter[str]()
        for check in definition.checks:
            names[check.name] += 1
            # Two checks of a definition may have one name, but each has its own number of calls.
            name = check.name if names[check.name] == 1 else f"{check.name} ({names[check.name]})"
            about = definition.name, name
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
    """Merge the result of a check `before` with the result of the latest call. A failure stays."""
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
