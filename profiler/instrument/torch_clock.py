"""torch's CUDA streams as a device clock: `BrickProfiler(device_clock=torch_clock())` times what runs on them."""

from __future__ import annotations

import torch

from cbtop.profiler.device.driver import CudaDriver, DriverError
from cbtop.profiler.device.stamp_clock import StampClock


def torch_clock() -> StampClock:
    """A clock of the current CUDA device. Raises DriverError, or what torch does, where there is none."""
    driver = CudaDriver()
    if not driver.context():
        torch.cuda.synchronize()  # from here on there is one
    device = torch.cuda.current_device()
    is_capturing, stream_of = torch._C._cuda_isCurrentStreamCapturing, torch._C._cuda_getCurrentRawStream
    current = torch._C._cuda_getDevice

    def stream() -> int | None:
        if current() != device:
            raise DriverError(f"a clock of cuda:{device} was asked while cuda:{current()} was the current device")
        return None if is_capturing() else stream_of(device)

    return StampClock(stream, driver, measures_cost=True, index=device)
