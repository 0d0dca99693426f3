"""Timings that wait for the device, each with a start and an end of its own."""

from __future__ import annotations

import threading
from collections import deque

from cbtop.profiler.clocks import DeviceClock, Mark
from cbtop.protocol.ring import Record

MAX_PENDING = 8192  # without steps nobody says when to wait: then it is after this many


class HostTime(int):
    """A time on the host's monotonic clock (ns), where a mark of the device's clock could stand too."""


class Pending:
    """Timings put off until the device has reached their marks on `clock`; then they go to `record`."""

    def __init__(self, clock: DeviceClock, record: Record) -> None:
        self._clock = clock
        self._record = record
        self.start_over()

    def start_over(self) -> None:
        """Record none of what is waiting. Also for a forked child, where nobody holds the lock."""
        self._timings: deque[tuple[int, Mark, Mark, int]] = deque()
        self._finalizing = threading.Lock()

    def __len__(self) -> int:
        return len(self._timings)

    @property
    def is_full(self) -> bool:
        """Whether so many wait that it is time to wait for the device."""
        return len(self._timings) >= MAX_PENDING

    def put_off(self, tag: int, start: Mark, end: Mark, elements: int) -> None:
        """Keep a timing until `finalize`. `start` and `end` are marks of the clock, or a HostTime."""
        self._timings.append((tag, start, end, elements))

    def finalize(self) -> None:
        """Wait for the device once, and record everything that was waiting, each with its own start and end."""
        # One thread at a time takes timings out, so the first `waiting` are those whose marks were waited for.
        with self._finalizing:
            waiting = len(self._timings)
            if waiting:
                self._clock.synchronize()
            for _ in range(waiting):
                tag, start, end, elements = self._timings.popleft()
                self._record(tag, self._time_ns(start), self._time_ns(end), elements)

    def _time_ns(self, mark: Mark) -> int:
        return mark if isinstance(mark, HostTime) else self._clock.time_ns(mark)
