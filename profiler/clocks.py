"""Clocks that tell when a device reached a point in its work; the host's own is one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from cbtop.protocol import clock

Mark = object  # what a clock gives for a point in time, and takes back to tell it


class NoTimeError(Exception):
    """A mark that the device was never to reach: its work was captured, not run, or is another process's."""


class DeviceClock(Protocol):
    """A device that works behind the host: marks are enqueued like work, and known once the device reached them."""

    def mark(self) -> Mark:
        """A point behind all work enqueued so far. Must not wait."""

    def synchronize(self) -> None:
        """Wait until every mark made before this call was reached."""

    def time_ns(self, mark: Mark, /) -> int:
        """When `mark` was reached, on the host's monotonic clock. Only after a `synchronize`.

        Raises NoTimeError of a mark that has none: what it would have timed is counted as lost.
        """


class Stamp(NamedTuple):
    """Of a mark: when it was enqueued, the device's time (0: not known), on which stream, and which of all it is."""

    host_ns: int
    device_ns: int
    stream: int
    number: int


class StampingClock(DeviceClock, Protocol):
    """A device clock that tells of a mark without waiting."""

    @property
    def stamp_cost_ns(self) -> int | None:
        """What a mark costs the device; None where that is not known."""

    @property
    def idle_lag_ns(self) -> int | None:
        """How long after it was enqueued an idle device reaches a mark; None where that is not known."""

    def is_reached(self, mark: Mark, /) -> bool:
        """Whether the device has reached `mark`, or never will."""

    def wait(self, mark: Mark, limit_ns: int, /) -> None:
        """Wait for the device to reach `mark`, so long at most."""

    def stamp(self, mark: Mark, /) -> Stamp | None:
        """What is known of `mark`; None of one that has no time."""

    def host_ns(self, device_ns: int, /) -> tuple[int, int]:
        """When the device showed `device_ns`, and how far that may be wrong."""

    def look(self) -> None:
        """Read both clocks, if the last time is a while ago."""

    def close(self) -> None:
        """Leave nothing on the device."""


class HostClock:
    """The host as a device: it is never behind itself."""

    def __init__(self, clock_ns: Callable[[], int] = clock.perf_counter_ns) -> None:
        self.mark = clock_ns

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def time_ns(self, mark: Mark, /) -> int:
        assert isinstance(mark, int)
        return mark
