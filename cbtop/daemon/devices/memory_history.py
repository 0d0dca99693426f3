"""Remember the memory of processes for minutes, as the lowest value in each range of 20 seconds. Short peaks do not
count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from cbtop.protocol.device_messages import MAX_MEMORY_POINTS, MEMORY_POINT_NS

MAX_PROCESSES = 512


class MemoryHistory:
    """The memory of several processes on one device. A process is identified by any key."""

    def __init__(self) -> None:
        # process -> (number of the current range, its least memory in bytes, the least of the ranges before)
        self._known: dict[Hashable, tuple[int, int, deque[int]]] = {}

    def take(self, process: Hashable, now_ns: int, memory_bytes: float) -> tuple[int, ...]:
        """Add the memory of `process` now. Returns the least memory of each range that has ended, oldest first.

        The last one ended at the last multiple of MEMORY_POINT_NS. After a range without a reading, the history
        begins again.
        """
        at, now_bytes = now_ns // MEMORY_POINT_NS, round(memory_bytes)
        number, least, before = self._known.pop(process, (at, now_bytes, deque[int](maxlen=MAX_MEMORY_POINTS)))
        if at == number + 1:
            before.append(least)
        elif at != number:
            before.clear()
        least = min(least, now_bytes) if at == number else now_bytes
        while len(self._known) >= MAX_PROCESSES:
            del self._known[next(iter(self._known))]
        self._known[process] = at, least, before
        return tuple(before)
