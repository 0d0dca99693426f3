"""Keeps each step of a device until the device has reached all of its stamps, then records it. A stamp is a small
kernel that stores the device's time.

Times
- A brick lasts from its first stamp on the device to its last. If the device waited for the host in between, the wait
  counts.
- The host's time is stored when a stamp is enqueued. If the device reaches the stamp within GOT_THERE_NS, it was
  idle. If an idle device is measured to take longer, the limit is this measured time plus IDLE_MARGIN_NS. (An idle
  H100 takes 7 to 10 us.) The possible error between the clocks is added.
- A step is launch-bound if more than LAUNCH_BOUND_SHARE of its stamps found the device idle. The names of its bricks
  say so, and they have no rates. (On an H100, the share is 0.8 in a decode of one sequence and 0.03 in a prefill of
  16,384 tokens.)
- In any other step, the cost of all earlier stamps is subtracted from the time of each stamp. So bricks and gaps
  still add up to the step.

Rules
- No thread waits. Later steps check whether stamps were reached (`settle`). At the end, or when statistics are
  needed, there is a wait of at most WAIT_NS. If there are more than MAX_STEPS, the oldest counts as lost.
- A step that began during a capture of its stream did not run, and leaves no record.
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


# A timed call inside a step: the keys from the step down to the call, start in ns, end in ns, elements.
Part = tuple[tuple[Hashable, ...], int, int, int]


class _Step(Protocol):
    """A step that takes a lane for its records, and leaves it. Steps that run at the same time have different
    lanes.
    """

    def take_lane(self) -> int: ...

    def leave_lane(self) -> None: ...


@dataclass(slots=True)
class HeldStep:
    """A step that has ended. Its calls are in the scope of unnamed steps. `begun` is the mark at its beginning.

    It may wait for calls that are measured elsewhere (`ActiveStep.wait`). `parts` are those that have arrived, in the
    host's time.
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
    lost: int = 0  # number of awaited parts that will never arrive

    def told(self, parts: Iterable[Part] | None) -> None:
        """Add parts that the step has waited for. None means that they will never arrive."""
        if parts is None:
            self.lost += 1
        else:
            self.parts += parts
        self.waits -= 1


@dataclass(frozen=True, slots=True)
class _Times:
    """When the device reached the marks of a step, on the host's clock.

    `times` are without the cost of the stamps, `reached_ns` are with it.
    """

    times: dict[Mark, int]
    is_launch_bound: bool
    reached_ns: list[int]
    cost_ns: int

    def stamps_ns(self, at_ns: int) -> int:
        """Return how long this step's stamps before `at_ns` took on the device."""
        return bisect_right(self.reached_ns, at_ns) * self.cost_ns


class HeldSteps:
    """The ended steps of a device path that wait for their stamps, oldest first."""

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
        """In a forked child, drop the parent's steps, and make a new lock, because the parent may hold the old
        one.
        """
        self._steps: deque[HeldStep] = deque()
        self._settling = threading.RLock()
        self._is_settling = False

    def __len__(self) -> int:
        return len(self._steps)

    def discard(self) -> None:
        """Drop all steps that wait for their stamps, without recording them."""
        self._steps.clear()

    def look(self) -> None:
        """Compare the clocks of device and host, unless this was done a short while ago."""
        self._clock.look()

    def host_ns(self, mark: Mark) -> int:
        """Return the host's time when `mark` was enqueued, or 0 if it was not."""
        if isinstance(mark, int):
            return mark
        stamp = self._clock.stamp(mark)
        return 0 if stamp is None else stamp.host_ns

    def add(self, step: HeldStep) -> None:
        """Keep a step that has ended, even if the device is late.

        With more than MAX_STEPS, the oldest one is lost.
        """
        self._steps.append(step)
        if len(self._steps) > MAX_STEPS:
            with self._settling:
                if len(self._steps) > MAX_STEPS and not self._is_settling:
                    self._lose(self._steps.popleft())

    def settle(self, may_wait: bool = False) -> None:
        """Record each step if the device has reached all of its stamps. An error is logged, and ends the timing by
        stamps.
        """
        if not self._steps or not self._settling.acquire(blocking=may_wait):
            return
        try:
            if not self._is_settling:  # `_is_settling` is True in a signal handler that interrupts `_settle`
                self._is_settling = True
                try:
                    self._settle(may_wait)
                finally:
                    self._is_settling = False
        except Exception as error:  # noqa: BLE001 - a lost device or a failed recorder must not stop the host
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
        """Return the last mark of `step` on each stream."""
        lasts: dict[int, Mark] = {}
        for mark in (step.end, *(end for _, _, end, _, _ in reversed(step.held))):
            stamp = None if isinstance(mark, int) else self._clock.stamp(mark)
            if stamp is not None:
                lasts.setdefault(stamp.stream, mark)
        return list(lasts.values())

    def _lose(self, step: HeldStep) -> None:
        """Count every record of a lost step."""
        for _ in range(len(step.held) + len(step.parts) + 1):
            self._callbacks.record(NO_NODE, 0, 0, 0)

    def _record(self, step: HeldStep) -> None:
        # The step gave up its lane when it ended, so its records need a new lane.
        lane = step.step.take_lane()
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
            # Subtract the time of the stamps before this part. The part contains no stamps.
            stamps_ns = found.stamps_ns(began_ns)
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
        # Within a step, both clocks are assumed to run at the same rate. They differ by about 20 ppm. Even with
        # MAX_DRIFT_PPM, the error in a step of 20 ms would be only 2 us.
        reached = [base_ns + stamp.device_ns - first_ns for stamp, _ in found]
        within_ns = max(GOT_THERE_NS, (clock.idle_lag_ns or 0) + IDLE_MARGIN_NS) + error_ns
        idle = sum([at <= stamp.host_ns + within_ns for at, (stamp, _) in zip(reached, found, strict=True)])
        is_launch_bound = idle > LAUNCH_BOUND_SHARE * len(found)
        cost_ns = 0 if is_launch_bound else clock.stamp_cost_ns or 0
        before: dict[int, int] = {}  # stream -> number of earlier stamps on it
        latest: dict[int, int] = {}
        times: dict[Mark, int] = {}
        for at, (stamp, mark) in zip(reached, found, strict=True):
            count = before.get(stamp.stream, 0)
            before[stamp.stream] = count + 1
            times[mark] = latest[stamp.stream] = max(at - count * cost_ns, latest.get(stamp.stream, 0))
        return _Times(times, is_launch_bound, sorted(reached), cost_ns)


@functools.lru_cache(maxsize=4096)  # cached, so that equal keys are the same object
def launch_bound(key: object) -> object:
    """Return `key` with LAUNCH_BOUND in the brick's name. Keys of layers and steps do not change."""
    known: Any = BrickDefinition.of(key) if isinstance(key, BrickId) else key
    if not isinstance(known, BrickDefinition):
        return key
    backend = f"{known.backend}: {UNTIL_THERE}" if known.backend else UNTIL_THERE
    return replace(known, name=f"{known.name}, {LAUNCH_BOUND}", backend=backend, work=None)
