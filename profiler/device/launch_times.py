"""Converts times that kernels have stored on a device to the host's clock."""

from __future__ import annotations

from cbtop.profiler.device.device import CudaDevice
from cbtop.profiler.device.driver import CudaDriver


class LaunchTimes:
    """The difference between the host's clock and the clock of the current context's device. Raises DriverError
    without a device.
    """

    def __init__(self) -> None:
        self._device = CudaDevice(CudaDriver())

    def offset_ns(self, device_ns: int) -> int | None:
        """Return the host's clock minus the device's clock at `device_ns`, in ns. Returns None if the clocks were
        never compared.

        Within a step, the offset may be treated as constant. The measured drift is 24 ppm, so the error after a
        millisecond is 24 ns.
        """
        self._device.look_at_clocks()
        time = self._device.time
        return None if time.last is None else time.host_ns(device_ns) - device_ns
