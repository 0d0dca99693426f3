"""Clocks that tell when a device reached a point in its work; the host's own is one of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

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


class HostClock:
    """The host as a device: it is never behind itself."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.mark = clock_ns

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def time_ns(self, mark: Mark, /) -> int:
        assert isinstance(mark, int)
        return mark
