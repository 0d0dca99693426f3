"""Clocks that tell when a device reached a point in its work. HostClock does the same for the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from cbtop.protocol import clock

Mark = object  # A clock's own handle of a point in time. `time_ns` converts it to ns.


class NoTimeError(Exception):
    """Raised for a mark that the device never reaches.

    It was captured into a graph instead of run, or made in a different process.
    """


class DeviceClock(Protocol):
    """The clock of a device that works asynchronously.

    Its marks are enqueued on the device like other work. A mark's time is known once the device has reached it.
    """

    def mark(self) -> Mark:
        """Enqueue a mark after the device's other work, and return it. Does not wait."""

    def synchronize(self) -> None:
        """Wait until the device has reached all marks made so far."""

    def time_ns(self, mark: Mark, /) -> int:
        """Return the time in ns when the device reached `mark`, on the host's monotonic clock.

        Call `synchronize` first. Raises NoTimeError for a mark without a time. The profiler then counts the timing as
        lost.
        """


class Stamp(NamedTuple):
    """A mark on a device: when the host enqueued it, when the device reached it (0 if unknown), its stream, and its
    number in order of creation.
    """

    host_ns: int
    device_ns: int
    stream: int
    number: int


class StampingClock(DeviceClock, Protocol):
    """A device clock with marks that are read without waiting for the device. What is known of a mark is a
    `Stamp`.
    """

    @property
    def stamp_cost_ns(self) -> int | None:
        """How many ns a mark takes on the device. None if unknown."""

    @property
    def idle_lag_ns(self) -> int | None:
        """The time in ns from enqueueing a mark until an idle device reaches it. None if unknown."""

    def is_reached(self, mark: Mark, /) -> bool:
        """Return whether the device has reached `mark` or will never reach it."""

    def wait(self, mark: Mark, limit_ns: int, /) -> None:
        """Wait at most `limit_ns` for the device to reach `mark`."""

    def stamp(self, mark: Mark, /) -> Stamp | None:
        """Return the stamp of `mark`, or None if it has no time."""

    def host_ns(self, device_ns: int, /) -> tuple[int, int]:
        """Convert `device_ns` to the host's clock. Returns the time and its possible error in both directions, in
        ns.
        """

    def look(self) -> None:
        """Compare the clocks of device and host, unless this was done a short while ago."""

    def close(self) -> None:
        """Release everything that this clock holds on the device."""


class HostClock:
    """The host's clock with the methods of a device clock. A mark is a reading of the clock."""

    def __init__(self, clock_ns: Callable[[], int] = clock.perf_counter_ns) -> None:
        self.mark = clock_ns

    def synchronize(self) -> None:
        """Do nothing, because the host has already reached every mark."""

    def time_ns(self, mark: Mark, /) -> int:
        assert isinstance(mark, int)
        return mark
