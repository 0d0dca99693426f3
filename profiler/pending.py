"""Keeps timings of calls on a device until the device has reached their begins and ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from cbtop.profiler.clocks import DeviceClock, Mark, NoTimeError
from cbtop.protocol.ring import NO_NODE, Record
from cbtop.protocol.signals import reraise_host_error

MAX_PENDING = 8192  # with this many timings, a path waits for the device, even inside a step


class HostTime(int):
    """A time of the host's monotonic clock (ns), used instead of a mark."""


# A timing: node and flags, start, end, elements. Start and end are marks of the clock, or HostTimes.
Timing = tuple[int, Mark, Mark, int]


class Pending:
    """Keeps timings until the device has reached their marks, and then passes them to `record`.

    `defer(timing)` adds to `timings`, which `finalize` empties. If a mark has no time, its timing is recorded without
    a node, and so counts as lost. If the clock fails, all waiting timings are lost.
    """

    defer: Callable[[Timing], None]

    def __init__(self, clock: DeviceClock, record: Record) -> None:
        self._clock = clock
        self._record = record
        self.timings: deque[Timing] = deque()
        # The list's own method, because a wrapper would cost time at every brick.
        self.defer = self.timings.append
        self.after_fork()

    def discard(self) -> None:
        """Drop all timings that wait for the device."""
        self.timings.clear()

    def after_fork(self) -> None:
        """In a forked child, drop the parent's timings, and make a new lock, because the parent may hold the old
        one.
        """
        self.discard()
        self._finalizing = threading.RLock()
        self._is_finalizing = False

    def __len__(self) -> int:
        return len(self.timings)

    def finalize(self) -> None:
        """Wait for the device once, and record all waiting timings.

        If the clock raises an exception, the timings count as lost, and the exception is raised again.
        """
        # Only the holder of the lock removes timings. So the first `waiting` timings are the ones that `synchronize`
        # has waited for, unless `discard` has removed some.
        with self._finalizing:
            # A signal handler calls `finalize` again after interrupting it, so do nothing.
            if self._is_finalizing:
                return
            waiting, time_ns = len(self.timings), self._clock.time_ns
            try:
                self._is_finalizing = True
                if waiting:
                    self._clock.synchronize()
                for _ in range(waiting):
                    timing = self._take()
                    if timing is None:
                        break
                    tag, start, end, elements = timing
                    try:
                        start_ns = start if isinstance(start, HostTime) else int(time_ns(start))
                        end_ns = end if isinstance(end, HostTime) else int(time_ns(end))
                    except NoTimeError:
                        self._record(NO_NODE, 0, 0, 0)
                        continue
                    except BaseException:
                        self._record(NO_NODE, 0, 0, 0)
                        raise
                    self._record(tag, start_ns, end_ns, elements)
            except Exception as error:
                # If a signal handler has raised this, a later call records the remaining timings.
                reraise_host_error(error)
                for _ in range(len(self.timings)):  # the device has failed, so the other timings have no times
                    self._take()
                    self._record(NO_NODE, 0, 0, 0)
                raise
            finally:
                self._is_finalizing = False

    def _take(self) -> Timing | None:
        try:
            return self.timings.popleft()
        except IndexError:
            return None
