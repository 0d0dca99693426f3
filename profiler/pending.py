"""Timings that wait for the device, each with a start and an end of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from cbtop.profiler.clocks import DeviceClock, Mark, NoTimeError
from cbtop.protocol.ring import NO_NODE, Record
from cbtop.protocol.signals import reraise_host_error

MAX_PENDING = 8192  # without steps, the device is waited for after this many


class HostTime(int):
    """A time on the host's monotonic clock (ns), in place of a mark of the device's clock."""


# Node and flags, start, end (marks of the clock, or a HostTime), elements.
Timing = tuple[int, Mark, Mark, int]


class Pending:
    """Timings deferred until the device has reached their marks on `clock`; then they go to `record`.

    `defer(timing)` keeps one in `timings` until `finalize`. If the clock fails, the waiting timings are recorded
    without a node, and so counted as lost. The same happens to a single timing if one of its marks has no time.
    """

    defer: Callable[[Timing], None]

    def __init__(self, clock: DeviceClock, record: Record) -> None:
        self._clock = clock
        self._record = record
        self.timings: deque[Timing] = deque()
        self.defer = self.timings.append  # unwrapped, because this runs at every brick
        self.after_fork()

    def discard(self) -> None:
        """Drop all waiting timings."""
        self.timings.clear()

    def after_fork(self) -> None:
        """In a child: leave waiting timings to the parent, and make a new lock, which the parent may have held."""
        self.discard()
        self._finalizing = threading.RLock()
        self._is_finalizing = False

    def __len__(self) -> int:
        return len(self.timings)

    def finalize(self) -> None:
        """Wait for the device once, and record all waiting timings, each with its own start and end.

        Raises the clock's exception, after the waiting timings have been counted as lost.
        """
        # One thread at a time takes timings out. So the marks of the first `waiting` have been waited for, or fewer
        # if some were discarded meanwhile.
        with self._finalizing:
            if self._is_finalizing:  # a signal handler came in between
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
                reraise_host_error(error)  # timings that a signal cut short are finalized later
                for _ in range(len(self.timings)):  # the device no longer has times for the rest
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
