"""The times of launches that stamp themselves, on the host's clock."""

from __future__ import annotations

from cbtop.profiler.device.device import CudaDevice
from cbtop.profiler.device.driver import CudaDriver


class LaunchTimes:
    """For the device of the current context. Raises DriverError if there is none."""

    def __init__(self) -> None:
        self._device = CudaDevice(CudaDriver())

    def offset_ns(self, device_ns: int) -> int | None:
        """Return how far the host's clock is ahead of the device's at `device_ns`; None if they were never read.

        In a step the offset is constant: at the measured drift of 24 in a million, a millisecond is 24 ns longer.
        """
        self._device.look_at_clocks()
        time = self._device.time
        return None if time.last is None else time.host_ns(device_ns) - device_ns
