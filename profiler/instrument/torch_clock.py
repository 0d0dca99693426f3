"""torch's CUDA streams as a device clock: `BrickProfiler(device_clock=torch_clock())` times what runs on them."""

from __future__ import annotations

import torch

from cbtop.profiler.device.stamp_clock import StampClock


def torch_clock() -> StampClock:
    """A clock of the current CUDA device. Raises DriverError, or what torch does, where there is none."""
    torch.cuda.synchronize()  # from here on there is a context
    device = torch.cuda.current_device()
    is_capturing, stream_of = torch._C._cuda_isCurrentStreamCapturing, torch._C._cuda_getCurrentRawStream

    def stream() -> int | None:
        return None if is_capturing() else stream_of(device)

    return StampClock(stream)
