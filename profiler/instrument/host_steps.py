"""Measures how long the host takes to launch each brick of a model on a GPU. Some steps are measured, if CUPTI
records the model's kernels.

Rules
- Such a step is recorded as a plain step. Two readings of the host's clock time each call in it.
- The time of a brick excludes inner bricks, and cbtop's own work for each call, which is measured.
- In such a step, cbtop makes no objects that Python's garbage collector counts. An additional collection would
  distort the times.
"""

from __future__ import annotations

import functools
import statistics
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cbtop.profiler.device.kernel_burst import Keys
from cbtop.profiler.instrument.capturing import MAX_CALLS, Capture, captures, keys_inside
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.profiler.instrument.wrapping import NotedCall
from cbtop.protocol import clock

if TYPE_CHECKING:
    from torch import nn

KEPT = 12  # announce the host's times of this many newest steps together
_EMPTY_CALLS = 64
_OUTERMOST = -1

# Times of all calls in ns. The keys are (layer, brick, …), outermost first.
Times = dict[Keys, list[float]]


class NotingCost(NamedTuple):
    """The time in ns that cbtop's own work takes per call.

    `inside_ns` is counted in the call itself, and `outside_ns` in the call around it.
    """

    inside_ns: float
    outside_ns: float


class HostCalls(Capture):
    """The calls in a step, by number, with the host's time at the begin and end of each."""

    def __init__(self, labelled: Callable[[Any], Any], ended: Callable[[HostCalls], None]) -> None:
        super().__init__(lambda: None)
        self._labelled = labelled
        self._ended = ended
        self.keys: list[Hashable] = []
        self.around: list[int] = []  # at index n: the number of the call that contains call n
        self.begins_ns: list[int] = []
        self.ends_ns: list[int] = []
        self._running: list[int] = []

    @property
    def recording(self) -> HostCalls:
        """This object, because its `end_step` must be called after the model's call."""
        return self

    def is_in_call_of(self, steps: object) -> bool:
        return self.steps is steps and bool(self._running)

    @property
    def innermost(self) -> Hashable:
        return self.keys[self._running[-1]] if self._running else None

    def begin(self, key: Hashable, module: nn.Module | None) -> int | None:
        running = self._running
        number = len(self.keys)
        if number >= MAX_CALLS or (key is not None and not running):
            return None
        self.keys.append(key)
        self.around.append(running[-1] if running else _OUTERMOST)
        self.ends_ns.append(0)
        running.append(number)
        self.begins_ns.append(clock.perf_counter_ns())
        return number

    def end(self, span: int | None, elements: int = 0) -> None:
        now_ns = clock.perf_counter_ns()
        if span is not None and span in self._running:
            self.ends_ns[span] = now_ns
            while self._running.pop() != span:
                pass

    def start_brick(self, brick: Hashable, /) -> int | None:
        return self.begin(self._labelled(brick), None)

    def failed(self, error: Exception) -> None:
        log_own_error(error, "the host's times of a step are not known")
        for kept in (self.keys, self.around, self.begins_ns, self.ends_ns):
            kept.clear()

    def end_step(self) -> None:
        """End the step: the model's call has returned, so pass the calls to `ended`."""
        self._ended(self)

    def times(self, cost: NotingCost) -> Times:
        """Return the time in ns that the host spent in each brick itself, by the brick's keys."""
        places: list[Keys] = []
        own_ns: list[float] = []
        for key, around, begin_ns, end_ns in zip(self.keys, self.around, self.begins_ns, self.ends_ns, strict=True):
            took_ns = max(0, end_ns - begin_ns)
            outer = () if around == _OUTERMOST else places[around]
            places.append(keys_inside(outer, key))
            own_ns.append(took_ns - cost.inside_ns)
            if around != _OUTERMOST:
                own_ns[around] -= took_ns + cost.outside_ns
        found: Times = {}
        for key, keys, ns in zip(self.keys, places, own_ns, strict=True):
            # Only the key of a layer is a tuple. All other keys are bricks.
            if key is not None and not isinstance(key, tuple):
                found.setdefault(keys, []).append(max(0.0, ns))
        return found


class HostSteps:
    """The time that the host took to launch bricks, in the newest KEPT steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[Hashable, Times]] = deque(maxlen=KEPT)

    def add(self, step: Hashable, calls: HostCalls) -> None:
        """Add the host's times of the bricks in a step. `step` is the step's key."""
        times = calls.times(noting_cost())
        if times:
            self._steps.append((step, times))

    def __len__(self) -> int:
        return len(self._steps)

    def times(self) -> Times:
        """Return the host's times in the newest KEPT steps. Keys are (step, layer, brick, …), outermost first."""
        found: Times = {}
        for step, times in self._steps:
            for keys, all_ns in times.items():
                found.setdefault((step, *keys), []).extend(all_ns)
        return found


class _Nothing:
    """A stand-in for a module. Calling it does nothing."""

    def _call_impl(self, value: Any) -> Any:
        return value


@functools.cache
def noting_cost() -> NotingCost:
    """Return the cost of cbtop's own work per call of a module. Measured on calls that do nothing."""
    calls = HostCalls(lambda brick: brick, lambda ended: None)
    nothing: Any = _Nothing()
    noted = NotedCall(nothing, "nothing", calls)
    value = torch.empty(1)
    outer = calls.begin(None, None)
    me = get_ident()
    before = captures.get(me)
    try:
        captures[me] = calls
        for _ in range(_EMPTY_CALLS):
            noted(value)
    finally:
        captures.pop(me, None)
        if before is not None:
            captures[me] = before
    calls.end(outer)
    inside = [end_ns - begin_ns for begin_ns, end_ns in zip(calls.begins_ns, calls.ends_ns, strict=True)][1:]
    apart = [after - before for before, after in zip(calls.ends_ns[1:-1], calls.begins_ns[2:], strict=True)]
    return NotingCost(_median(inside), _median(apart))


def _median(values: list[int]) -> float:
    return float(statistics.median(values))
