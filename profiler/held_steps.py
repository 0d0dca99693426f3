"""Stamped steps: each is kept until the device has reached its stamps, judged as a whole, and recorded.

Meaning of the times
- A brick's time is from when the device reached its begin until it reached its end. If the device waited for the host
  meanwhile, this is not the time of its kernels.
- The host's time of each stamp is kept. A stamp that the device reached within GOT_THERE_NS after it was enqueued
  found the device idle. The error of the relation between both clocks is added. If stamps on an idle stream take
  longer on this machine, that time plus IDLE_MARGIN_NS replaces GOT_THERE_NS. (On an H100: 7 to 10 us when idle.)
- A step is launch-bound if more than LAUNCH_BOUND_SHARE of its stamps found the device idle. Its bricks bear that
  name, their times are "until the device got there", and no rate is computed from them. (On an H100: 0.8 of them in a
  decode of one sequence, 0.03 in a prefill of 16,384 tokens, because its first bricks find the device idle.) In any
  other step, the cost of a stamp on the device is subtracted for each earlier stamp: bricks and gaps still add up to
  the step.

Rules
- No thread waits: later steps check whether the stamps are there (`settle`). At the end, or when statistics are
  needed, the wait is at most WAIT_NS. Past MAX_STEPS the oldest is lost, and counted as lost.
- A step that began while its stream was captured did not run, and leaves nothing.
"""

from __future__ import annotations

import functools
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from cbtop.profiler.clocks import Mark, Stamp, StampingClock
from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.scopes import NamedScopes, Scopes
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_CANCELLED, NO_NODE, UNKNOWN_AMOUNT
from cbtop.protocol.signals import reraise_host_error
from cbtop.protocol.vocabulary import LAUNCH_BOUND, UNTIL_THERE, BrickId

if TYPE_CHECKING:
    from cbtop.profiler.hot_path import Callbacks, HeldRecord, Scope

GOT_THERE_NS = 12_000
IDLE_MARGIN_NS = 5_000
LAUNCH_BOUND_SHARE = 0.1
MAX_STEPS = 16
WAIT_NS = 1_000_000_000


# A part of a step that was timed elsewhere: keys from the step down; start and end in ns; elements.
Part = tuple[tuple[Hashable, ...], int, int, int]


class _Step(Protocol):
    """Gives the lane of its records."""

    def take_lane(self) -> int: ...

    def leave_lane(self) -> None: ...


@dataclass(slots=True)
class HeldStep:
    """A step that has ended, in the scope of steps without a name; `begun` is the mark of its beginning.

    If it waits (`Step.wait`), `parts` are those that arrived meanwhile, in the host's time.
    """

    step: _Step
    key: object
    unnamed: Scope
    held: list[HeldRecord]
    begun: Mark
    start: Mark
    end: Mark
    tokens: int
    flags: int
    amounts: tuple[int, int]  # sequences, cached positions
    waits: int
    parts: list[Part] = field(default_factory=list)
    lost: int = 0  # parts that will not arrive

    def told(self, parts: Iterable[Part] | None) -> None:
        """Add the parts that it waited for, or None if they are lost."""
        if parts is None:
            self.lost += 1
        else:
            self.parts += parts
        self.waits -= 1


@dataclass(frozen=True, slots=True)
class _Times:
    """When each mark was reached, on the host's clock: `times` without the cost of stamps, `reached_ns` with it."""

    times: dict[Mark, int]
    is_launch_bound: bool
    reached_ns: list[int]
    cost_ns: int

    def stamps_ns(self, at_ns: int) -> int:
        """The cost of this step's stamps before `at_ns`."""
        return bisect_right(self.reached_ns, at_ns) * self.cost_ns


class HeldSteps:
    """The kept steps of one device path, the oldest first."""

    def __init__(
        self,
        clock: StampingClock,
        callbacks: Callbacks,
        scopes: Scopes,
        flush: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._callbacks = callbacks
        self._scopes = scopes
        self._flush = flush
        self.after_fork()

    def after_fork(self) -> None:
        """In a child: leave the kept steps to the parent, and make a new lock, which the parent may have held."""
        self._steps: deque[HeldStep] = deque()
        self._settling = threading.RLock()
        self._is_settling = False

    def __len__(self) -> int:
        return len(self._steps)

    def discard(self) -> None:
        """Drop all kept steps."""
        self._steps.clear()

    def look(self) -> None:
        """Read both clocks, if the last time is a while ago."""
        self._clock.look()

    def host_ns(self, mark: Mark) -> int:
        """Return when the host enqueued `mark`, or 0 if it did not."""
        if isinstance(mark, int):
            return mark
        stamp = self._clock.stamp(mark)
        return 0 if stamp is None else stamp.host_ns

    def add(self, step: HeldStep) -> None:
        """Keep a step that has ended; the device may be far behind."""
        self._steps.append(step)
        if len(self._steps) > MAX_STEPS:
            with self._settling:
                if len(self._steps) > MAX_STEPS and not self._is_settling:
                    self._lose(self._steps.popleft())

    def settle(self, may_wait: bool = False) -> None:
        """Record the steps with all stamps reached. Never raises: a failure is logged, and stamping ends."""
        if not self._steps or not self._settling.acquire(blocking=may_wait):
            return
        try:
            if not self._is_settling:  # otherwise a signal handler came in between
                self._is_settling = True
                try:
                    self._settle(may_wait)
                finally:
                    self._is_settling = False
        except Exception as error:  # noqa: BLE001 - a device that is lost, or a recorder that fails
            reraise_host_error(error)
            self._steps.clear()
            self._callbacks.give_up(error)
        finally:
            self._settling.release()

    def _settle(self, may_wait: bool) -> None:
        if may_wait:
            for mark in self._lasts(self._steps[-1]):
                self._clock.wait(mark, WAIT_NS)
            self._clock.look()
        recorded = False
        while self._steps and self._is_there(self._steps[0]):
            self._record(self._steps.popleft())
            recorded = True
        if recorded:
            self._flush()

    def _is_there(self, step: HeldStep) -> bool:
        is_reached = self._clock.is_reached
        return step.waits <= 0 and is_reached(step.end) and all([is_reached(mark) for mark in self._lasts(step)])

    def _lasts(self, step: HeldStep) -> list[Mark]:
        """Return the last mark on each stream."""
        lasts: dict[int, Mark] = {}
        for mark in (step.end, *(end for _, _, end, _, _ in reversed(step.held))):
            stamp = None if isinstance(mark, int) else self._clock.stamp(mark)
            if stamp is not None:
                lasts.setdefault(stamp.stream, mark)
        return list(lasts.values())

    def _lose(self, step: HeldStep) -> None:
        """Count the records of a lost step."""
        for _ in range(len(step.held) + len(step.parts) + 1):
            self._callbacks.record(NO_NODE, 0, 0, 0)

    def _record(self, step: HeldStep) -> None:
        lane = step.step.take_lane()  # only now: another step may have been in the lane that it ran in
        try:
            self._record_in(lane, step)
        finally:
            step.step.leave_lane()

    def _record_in(self, lane: int, step: HeldStep) -> None:
        found = self._times(step)
        times, end_ns = found.times, found.times.get(step.end)
        if self._clock.stamp(step.begun) is None:
            return
        if step.begun not in times or end_ns is None:
            self._lose(step)
            return
        record, amounts = self._callbacks.record, self._callbacks.amounts
        if found.is_launch_bound:
            stamped = {id(scope) for scope, start, _, _, _ in step.held if not isinstance(start, int)}
            places = NamedScopes(
                self._scopes,
                step.unnamed,
                step.key,
                lambda scope: launch_bound(scope.key) if id(scope) in stamped else scope.key,
            )
        else:
            places = NamedScopes(self._scopes, step.unnamed, step.key)
        for scope, start, end, elements, flags in step.held:
            start_ns = start if isinstance(start, int) else times.get(start)
            until_ns = end if isinstance(end, int) else times.get(end)
            if start_ns is None or until_ns is None:
                record(NO_NODE, 0, 0, 0)
                continue
            place = places.of(scope)
            record(max(place.node, NO_NODE) | flags | lane, start_ns, max(start_ns, until_ns), elements)
            if place.work is not None:
                amounts(place, elements)
        for keys, began_ns, ended_ns, elements in step.parts:
            scope = places.named
            for key in keys:
                scope = scope.children.get(key) or self._scopes.define(scope, key)
            stamps_ns = found.stamps_ns(began_ns)  # work that others time contains no stamp
            until_ns = ended_ns - stamps_ns
            record(max(scope.node, NO_NODE) | lane, began_ns - stamps_ns, until_ns, elements)
            if scope.work is not None:
                amounts(scope, elements)
            end_ns = max(end_ns, until_ns)
        for _ in range(step.lost):
            record(NO_NODE, 0, 0, 0)
        node = max(places.named.node, NO_NODE)
        start_ns = step.start if isinstance(step.start, int) else times[step.start]
        record(node | step.flags | lane, start_ns, max(start_ns, end_ns), step.tokens)
        if step.amounts != (UNKNOWN_AMOUNT, UNKNOWN_AMOUNT) and not step.flags & FLAG_CANCELLED:
            record(node | FLAG_AMOUNTS, *step.amounts, 0)

    def _times(self, step: HeldStep) -> _Times:
        clock = self._clock
        marks = [step.begun, step.end]
        for _, start, end, _, _ in step.held:
            marks += [mark for mark in (start, end) if not isinstance(mark, int)]
        found: list[tuple[Stamp, Mark]] = []
        for mark in marks:
            stamp = clock.stamp(mark)
            if stamp is not None and stamp.device_ns:
                found.append((stamp, mark))
        found.sort(key=lambda one: one[0].number)
        if not found:
            return _Times({}, False, [], 0)
        first_ns = found[0][0].device_ns
        base_ns, error_ns = clock.host_ns(first_ns)
        # Within one step both clocks run alike: MAX_DRIFT_PPM of 20 ms is 2 us, and some 20 ppm are measured.
        reached = [base_ns + stamp.device_ns - first_ns for stamp, _ in found]
        within_ns = max(GOT_THERE_NS, (clock.idle_lag_ns or 0) + IDLE_MARGIN_NS) + error_ns
        idle = sum([at <= stamp.host_ns + within_ns for at, (stamp, _) in zip(reached, found, strict=True)])
        is_launch_bound = idle > LAUNCH_BOUND_SHARE * len(found)
        cost_ns = 0 if is_launch_bound else clock.stamp_cost_ns or 0
        before: dict[int, int] = {}  # stamps on each stream
        latest: dict[int, int] = {}
        times: dict[Mark, int] = {}
        for at, (stamp, mark) in zip(reached, found, strict=True):
            count = before.get(stamp.stream, 0)
            before[stamp.stream] = count + 1
            times[mark] = latest[stamp.stream] = max(at - count * cost_ns, latest.get(stamp.stream, 0))
        return _Times(times, is_launch_bound, sorted(reached), cost_ns)


@functools.lru_cache(maxsize=4096)  # returns the same object, also for a model that is attached again
def launch_bound(key: object) -> object:
    """Return `key` renamed for a launch-bound step, where its times mean something else. Layers stay as they are."""
    known: Any = BrickDefinition.of(key) if isinstance(key, BrickId) else key
    if not isinstance(known, BrickDefinition):
        return key
    backend = f"{known.backend}: {UNTIL_THERE}" if known.backend else UNTIL_THERE
    return replace(known, name=f"{known.name}, {LAUNCH_BOUND}", backend=backend, work=None)
