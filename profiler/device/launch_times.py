"""When launches that stamp themselves ran, on the host's clock."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop.profiler.device.device import Device
from cbtop.profiler.device.driver import CudaDriver


class LaunchTimes:
    """Of the device whose context is current. Raises DriverError where there is none."""

    def __init__(self) -> None:
        self._device = Device(CudaDriver())

    def host_ns(self, stamps: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
        """Begin and end of each launch of a step, by its device's stamps; None while both clocks were never read, and
        where a launch ended before it began: it did not run.

        A step is so short that both clocks go alike in it: an hour apart in a day would be 30 ns in a millisecond.
        """
        self._device.look_at_clocks()
        time = self._device.time
        if time.last is None or not stamps:
            return None
        first = stamps[0][0]
        offset = time.host_ns(first) - first
        found = [(begun + offset, ended + offset) for begun, ended in stamps]
        return None if any([ended < begun for begun, ended in found]) else found

    def close(self) -> None:
        """Leave nothing on the device."""
        self._device.close()
