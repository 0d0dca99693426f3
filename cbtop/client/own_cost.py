"""Measure the CPU time and memory of the viewer's own process."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

from cbtop.client import DEFAULT_WINDOW_S

# Seconds between two readings of the CPU time. A number that changes with every redraw is hard to read.
SPACING_S = 1.0


def resident_bytes() -> int | None:
    """Resident memory of this process in bytes. None without /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


class OwnCost:
    """Reads the CPU time of all threads, once a second while `tick` is called, and keeps the last readings."""

    def __init__(
        self,
        length_s: float = DEFAULT_WINDOW_S,
        clock_s: Callable[[], float] = time.monotonic,
        worked_s: Callable[[], float] = time.process_time,
        resident: Callable[[], int | None] = resident_bytes,
    ) -> None:
        self._length_s = length_s
        self._clock_s, self._worked_s, self._resident = clock_s, worked_s, resident
        self._read = deque([(clock_s(), worked_s())])
        self.resident_bytes = resident()

    def tick(self) -> None:
        """Read the CPU time if a second has passed."""
        now_s = self._clock_s()
        if now_s - self._read[-1][0] < SPACING_S:
            return
        self._read.append((now_s, self._worked_s()))
        self.resident_bytes = self._resident()
        while len(self._read) > 2 and now_s - self._read[1][0] >= self._length_s:
            self._read.popleft()

    @property
    def over_s(self) -> float:
        """Seconds between the oldest and the newest stored reading of the CPU time.

        The result is 0 during the first second.
        """
        return self._read[-1][0] - self._read[0][0]

    @property
    def cpu_percent(self) -> float | None:
        """CPU time of this process over the last `over_s` seconds, in percent of one processor. None in the first
        second.
        """
        worked_s = self._read[-1][1] - self._read[0][1]
        return 100 * worked_s / self.over_s if self.over_s else None
