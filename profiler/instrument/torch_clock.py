"""torch's CUDA streams as a device clock: `BrickProfiler(device_clock=torch_clock())` times what runs on them."""

from __future__ import annotations

import torch

from cbtop.profiler.device.stamp_clock import StampClock


def current_stream() -> int:
    """The stream that torch enqueues on now, as the driver knows it."""
    return int(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))


def torch_clock() -> StampClock:
    """A clock of the current CUDA device. Raises DriverError, or what torch does, where there is none."""
    torch.cuda.synchronize()  # from here on there is a context
    return StampClock(current_stream)
