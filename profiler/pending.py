"""Timings that wait for the device, each with a start and an end of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from cbtop.profiler.clocks import DeviceClock, Mark
from cbtop.protocol.ring import NO_NODE, Record

MAX_PENDING = 8192  # without steps nobody says when to wait: then it is after this many


class HostTime(int):
    """A time on the host's monotonic clock (ns), where a mark of the device's clock could stand too."""


# Node and flags, start, end (marks of the clock, or a HostTime), elements.
Timing = tuple[int, Mark, Mark, int]


class Pending:
    """Timings deferred until the device has reached their marks on `clock`; then they go to `record`.

    `defer(timing)` keeps one in `timings` until `finalize`. Where the clock fails, what waited for it is recorded
    against no node: it is lost, and counted as that.
    """

    defer: Callable[[Timing], None]

    def __init__(self, clock: DeviceClock, record: Record) -> None:
        self._clock = clock
        self._record = record
        self.timings: deque[Timing] = deque()
        self.defer = self.timings.append  # as it is: this runs at every brick
        self.discard()

    def discard(self) -> None:
        """Record none of what is waiting. Also for a forked child, where nobody holds the lock."""
        self.timings.clear()
        self._finalizing = threading.RLock()
        self._is_finalizing = False

    def __len__(self) -> int:
        return len(self.timings)

    def finalize(self) -> None:
        """Wait for the device once, and record everything that was waiting, each with its own start and end.

        Raises what the clock raises, after what waited has been counted as lost.
        """
        # One thread at a time takes timings out, so the first `waiting` are those whose marks were waited for.
        with self._finalizing:
            waiting = 0 if self._is_finalizing else len(self.timings)  # a signal handler may come in between
            if not waiting:
                return
            self._is_finalizing = True
            take, record, time_ns = self.timings.popleft, self._record, self._clock.time_ns
            try:
                self._clock.synchronize()
                while waiting:
                    tag, start, end, elements = self.timings[0]
                    start_ns = start if isinstance(start, HostTime) else int(time_ns(start))
                    end_ns = end if isinstance(end, HostTime) else int(time_ns(end))
                    take()
                    waiting -= 1
                    record(tag, start_ns, end_ns, elements)
            finally:  # of what is left by now, the device tells no time any more
                self._is_finalizing = False
                for _ in range(waiting):
                    take()
                    record(NO_NODE, 0, 0, 0)
