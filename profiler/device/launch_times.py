"""When launches that stamp themselves ran, on the host's clock."""

from __future__ import annotations

from cbtop.profiler.device.device import Device
from cbtop.profiler.device.driver import CudaDriver


class LaunchTimes:
    """Of the device whose context is current. Raises DriverError where there is none."""

    def __init__(self) -> None:
        self._device = Device(CudaDriver())

    def offset_ns(self, device_ns: int) -> int | None:
        """How far the host's clock is ahead of the device's when that shows `device_ns`; None where both were never
        read. In a step both go alike: by 24 in a million, which were measured, a millisecond is 24 ns longer.
        """
        self._device.look_at_clocks()
        time = self._device.time
        return None if time.last is None else time.host_ns(device_ns) - device_ns
