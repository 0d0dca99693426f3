"""Times the host in some steps of a model that is recorded by its kernels: what each brick costs it to launch.

Rules
- Such a step is plain in all other respects. Each call in it is timed by two readings of the clock.
- A brick's time is without that of the bricks inside it, and without what the readings cost, which is measured once.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from cbtop.profiler.device.kernel_burst import Keys
from cbtop.profiler.instrument.capturing import Capture, CapturedCall
from cbtop.profiler.instrument.trouble import log_own_error
from cbtop.protocol import clock

KEPT = 12  # steps: their times are announced
_EMPTY_CALLS = 64

Times = dict[Keys, tuple[int, float]]  # by place, from below the step: number of calls, and their time in ns


class ReadingCost(NamedTuple):
    """What timing a call costs, in ns: in the call itself, and in the call around it."""

    inside_ns: float
    outside_ns: float


class HostCalls(Capture):
    """The calls in a step, with the host's time as each began and ended."""

    def __init__(self, labelled: Callable[[Any], Any], ended: Callable[[HostCalls], None]) -> None:
        super().__init__(lambda: [clock.perf_counter_ns()])
        self._labelled = labelled
        self._ended = ended

    @property
    def recording(self) -> HostCalls:
        """What is to be ended with the model's call, as in `PlacedCalls`."""
        return self

    def start_brick(self, brick: Hashable, /) -> CapturedCall | None:
        return self.begin(self._labelled(brick), None)

    def failed(self, error: Exception) -> None:
        log_own_error(error, "the host's times of a step are not known")
        self.spans.clear()

    def end_step(self) -> None:
        """Give its calls away: the model's call has returned."""
        self._ended(self)


def times_of(spans: Sequence[CapturedCall]) -> Times:
    """Return the host's times of the bricks in a step, exclusive."""
    found: Times = {}
    _add(found, spans, (), _reading_cost())
    return found


def together(steps: Iterable[Times]) -> Times:
    """Return the sums over several steps."""
    found: Times = {}
    for step in steps:
        for keys, (calls, sum_ns) in step.items():
            before = found.get(keys, (0, 0.0))
            found[keys] = before[0] + calls, before[1] + sum_ns
    return found


def _add(found: Times, spans: Sequence[CapturedCall], around: Keys, cost: ReadingCost) -> None:
    for span in spans:
        keys = around if span.key is None else (*around, span.key)
        if span.key is not None and not isinstance(span.key, tuple):  # a brick, not a layer
            inside_ns = sum([_duration_ns(one) + cost.outside_ns for one in span.inside])
            own_ns = max(0.0, _duration_ns(span) - inside_ns - cost.inside_ns)
            calls, sum_ns = found.get(keys, (0, 0.0))
            found[keys] = calls + 1, sum_ns + own_ns
        _add(found, span.inside, keys, cost)


def _duration_ns(span: CapturedCall) -> int:
    return span.end[0] - span.begin[0] if span.begin and span.end else 0


@functools.cache
def _reading_cost() -> ReadingCost:
    calls = HostCalls(lambda brick: brick, lambda ended: None)
    around = calls.begin(None, None)
    for _ in range(_EMPTY_CALLS):
        calls.end(calls.begin("empty", None))
    calls.end(around)
    (outer,) = calls.spans
    inside = sorted(_duration_ns(span) for span in outer.inside)
    inside_ns = inside[len(inside) // 2]
    begins = [span.begin[0] for span in outer.inside if span.begin]
    apart = sorted(after - before for before, after in itertools.pairwise(begins))
    return ReadingCost(inside_ns, max(0, apart[len(apart) // 2] - inside_ns))


class HostSteps:
    """The times of the latest steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[Hashable, Times]] = deque(maxlen=KEPT)

    def add(self, step: Hashable, spans: Sequence[CapturedCall]) -> None:
        """Add a step of that key."""
        times = times_of(spans)
        if times:
            self._steps.append((step, times))

    def __len__(self) -> int:
        return len(self._steps)

    def times(self) -> Times:
        """Return the sums over the latest steps, by place from the step down."""
        return together({(step, *keys): one for keys, one in times.items()} for step, times in self._steps)
