"""A device clock for torch. With `BrickProfiler(device_clock=torch_clock())`, bricks are timed on torch's CUDA
streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from cbtop.profiler.clocks import Mark
from cbtop.profiler.device.driver import CudaDriver
from cbtop.profiler.device.stamp_clock import StampClock
from cbtop.profiler.instrument.torch_internals import device_exchange, stream_functions


def torch_clock() -> StampClock:
    """Return a clock of the current CUDA device. Raises DriverError or torch's error without a device.

    The clock puts its marks on the caller's stream of this device, even while a different device is current.
    """
    driver = CudaDriver()
    if not driver.context():
        torch.cuda.synchronize()  # makes the context
    device = torch.cuda.current_device()
    is_capturing, stream_of = stream_functions()

    def stream() -> int | None:
        return None if is_capturing() else stream_of(device)

    clock = StampClock(stream, driver, measures_cost=True, index=device)
    if torch.cuda.device_count() > 1:
        clock.mark = _while_current(device, clock.mark)
    return clock


def while_current(device: int) -> contextlib.AbstractContextManager[object]:
    """Return a context that makes `device` the current CUDA device inside it."""
    return contextlib.nullcontext() if torch.cuda.current_device() == device else torch.cuda.device(device)


def _while_current(device: int, mark: Callable[[], Mark]) -> Callable[[], Mark]:
    exchange, put_back = device_exchange()

    def marked() -> Mark:
        before = exchange(device)
        try:
            return mark()
        finally:
            put_back(before)

    return marked
