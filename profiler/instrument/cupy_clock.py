"""A device clock for CuPy. With `BrickProfiler(device_clock=cupy_clock())`, bricks are timed on CuPy's CUDA
streams.
"""

from __future__ import annotations

import cupy

from cbtop.profiler.device.cuda_calls import DriverError
from cbtop.profiler.device.driver import CudaDriver
from cbtop.profiler.device.stamp_clock import StampClock


def cupy_clock() -> StampClock:  # pragma: no cover - gpu
    """Return a clock of the current CUDA device. Raises DriverError or CuPy's error if there is no device."""
    runtime, current_stream = cupy.cuda.runtime, cupy.cuda.get_current_stream
    runtime.deviceSynchronize()  # makes the context
    device = runtime.getDevice()

    def stream() -> int | None:
        if runtime.getDevice() != device:
            raise DriverError(f"a clock of device {device} was asked while {runtime.getDevice()} was the current one")
        here = current_stream()
        return None if here.ptr and here.is_capturing() else int(here.ptr)

    return StampClock(stream, CudaDriver(), measures_cost=True, index=device)
