"""Clocks that tell when a device reached a point in its work; the host's own is one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from cbtop.protocol import clock

Mark = object  # a clock's handle of a point in time, which it converts into a time


class NoTimeError(Exception):
    """A mark that the device never reaches: its work was captured, not run, or belongs to a different process."""


class DeviceClock(Protocol):
    """A device that works asynchronously: marks are enqueued like work, and known once the device reached them."""

    def mark(self) -> Mark:
        """Return a mark after all enqueued work. Must not wait."""

    def synchronize(self) -> None:
        """Wait until every mark made before this call was reached."""

    def time_ns(self, mark: Mark, /) -> int:
        """Return when `mark` was reached, on the host's monotonic clock. Only after a `synchronize`.

        Raises NoTimeError for a mark without a time: its timing is counted as lost.
        """


class Stamp(NamedTuple):
    """A mark's time of enqueueing, device time (0: not known), stream, and number among all marks."""

    host_ns: int
    device_ns: int
    stream: int
    number: int


class StampingClock(DeviceClock, Protocol):
    """A device clock that reports a mark without waiting."""

    @property
    def stamp_cost_ns(self) -> int | None:
        """The cost of a mark on the device, or None if it is not known."""

    @property
    def idle_lag_ns(self) -> int | None:
        """How long an idle device takes to reach an enqueued mark, or None if that is not known."""

    def is_reached(self, mark: Mark, /) -> bool:
        """Whether the device has reached `mark`, or never will."""

    def wait(self, mark: Mark, limit_ns: int, /) -> None:
        """Wait for the device to reach `mark`, at most `limit_ns`."""

    def stamp(self, mark: Mark, /) -> Stamp | None:
        """Return the stamp of `mark`, or None if it has no time."""

    def host_ns(self, device_ns: int, /) -> tuple[int, int]:
        """Return the host's time when the device showed `device_ns`, and its possible error."""

    def look(self) -> None:
        """Read both clocks, if the last time is a while ago."""

    def close(self) -> None:
        """Release everything on the device."""


class HostClock:
    """The host as a device: it is always up to date."""

    def __init__(self, clock_ns: Callable[[], int] = clock.perf_counter_ns) -> None:
        self.mark = clock_ns

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def time_ns(self, mark: Mark, /) -> int:
        assert isinstance(mark, int)
        return mark
