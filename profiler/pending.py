"""Timings that wait for the device, each with a start and an end of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from cbtop.profiler.clocks import DeviceClock, Mark
from cbtop.protocol.ring import Record

MAX_PENDING = 8192  # without steps nobody says when to wait: then it is after this many


class HostTime(int):
    """A time on the host's monotonic clock (ns), where a mark of the device's clock could stand too."""


# Node and flags, start, end (marks of the clock, or a HostTime), elements.
Timing = tuple[int, Mark, Mark, int]


class Pending:
    """Timings put off until the device has reached their marks on `clock`; then they go to `record`.

    `put_off(timing)` keeps one in `timings` until `finalize`.
    """

    put_off: Callable[[Timing], None]

    def __init__(self, clock: DeviceClock, record: Record) -> None:
        self._clock = clock
        self._record = record
        self.timings: deque[Timing] = deque()
        self.put_off = self.timings.append  # as it is: this runs at every brick
        self.start_over()

    def start_over(self) -> None:
        """Record none of what is waiting. Also for a forked child, where nobody holds the lock."""
        self.timings.clear()
        self._finalizing = threading.Lock()

    def __len__(self) -> int:
        return len(self.timings)

    def finalize(self) -> None:
        """Wait for the device once, and record everything that was waiting, each with its own start and end."""
        # One thread at a time takes timings out, so the first `waiting` are those whose marks were waited for.
        with self._finalizing:
            waiting = len(self.timings)
            if waiting:
                self._clock.synchronize()
            take, record, time_ns = self.timings.popleft, self._record, self._clock.time_ns
            for _ in range(waiting):
                tag, start, end, elements = take()
                record(
                    tag,
                    start if isinstance(start, HostTime) else time_ns(start),
                    end if isinstance(end, HostTime) else time_ns(end),
                    elements,
                )
