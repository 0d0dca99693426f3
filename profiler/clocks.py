"""Clocks that report when a device reached a point in its work. HostClock does the same for the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from cbtop.protocol import clock

Mark = object  # A mark is a clock's own handle of a point in time. `time_ns` converts a mark to a time in ns.


class NoTimeError(Exception):
    """Raised for a mark that the device never reaches.

    This happens if the mark was captured into a graph instead of run, or if the mark was made in a different process.
    """


class DeviceClock(Protocol):
    """The clock of a device that works asynchronously.

    Its marks are enqueued on the device like other work. The time of a mark is known once the device has reached that
    mark.
    """

    def mark(self) -> Mark:
        """Put a mark at the end of the work that is enqueued on the device, and return it. Does not wait."""

    def synchronize(self) -> None:
        """Wait until the device has reached every mark made before this call."""

    def time_ns(self, mark: Mark, /) -> int:
        """Return the time in ns at which the device reached `mark`, on the host's monotonic clock.

        `synchronize` must be called first. Raises NoTimeError for a mark without a time: the profiler then counts the
        timing as lost.
        """


class Stamp(NamedTuple):
    """The data of one mark on a device: when the host enqueued it, when the device reached it, its stream and its
    number.

    `device_ns` is 0 if it is not known. Marks are numbered in the order of creation.
    """

    host_ns: int
    device_ns: int
    stream: int
    number: int


class StampingClock(DeviceClock, Protocol):
    """A device clock with marks that can be read without waiting for the device. The data of such a mark is a
    `Stamp`.
    """

    @property
    def stamp_cost_ns(self) -> int | None:
        """The time that one mark takes on the device, in ns. None if it is not known."""

    @property
    def idle_lag_ns(self) -> int | None:
        """The time from enqueueing a mark until an idle device reaches it, or None if it is not known."""

    def is_reached(self, mark: Mark, /) -> bool:
        """Return whether the device has reached `mark` or will never reach it."""

    def wait(self, mark: Mark, limit_ns: int, /) -> None:
        """Wait at most `limit_ns` for the device to reach `mark`."""

    def stamp(self, mark: Mark, /) -> Stamp | None:
        """Return the stamp of `mark`, or None if it has no time."""

    def host_ns(self, device_ns: int, /) -> tuple[int, int]:
        """Convert `device_ns` to the host's clock.

        Returns the time and its possible error in either direction, both in ns.
        """

    def look(self) -> None:
        """Compare the clocks of the device and the host, unless they were compared a short while ago."""

    def close(self) -> None:
        """Release everything that this clock holds on the device."""


class HostClock:
    """The host's clock, with the methods of a device clock. A mark is a reading of the host's clock."""

    def __init__(self, clock_ns: Callable[[], int] = clock.perf_counter_ns) -> None:
        self.mark = clock_ns

    def synchronize(self) -> None:
        """Do nothing, because the host has already reached every mark."""

    def time_ns(self, mark: Mark, /) -> int:
        assert isinstance(mark, int)
        return mark
