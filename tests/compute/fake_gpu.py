"""A fake GPU that computes nothing.

Its launches write time stamps, its copies copy, and a graph repeats its launches and copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from cbtop.compute.cuda.launches import CudaLaunch
from cbtop.compute.decoder.plan import ShapedArrays
from cbtop.profiler.definitions import KernelDefinition


class CudaError(RuntimeError):
    """A stand-in for CuPy's CUDARuntimeError."""


class DeviceArray(np.ndarray[Any, Any]):
    """A NumPy array that has its address in `data.ptr`, as an array of CuPy has."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


class FakeStream:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.capturing: list[Callable[[], None]] | None = None

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def begin_capture(self) -> None:
        assert self.capturing is None, "a stream that captures begins no other graph"
        self.capturing = []

    def end_capture(self) -> Any:
        found, self.capturing = self.capturing, None
        if found is None:
            raise CudaError("no capture")
        launch = lambda stream: [work() for work in found]  # noqa: E731
        return SimpleNamespace(launch=launch, upload=lambda stream: None)

    def synchronize(self) -> None:
        self._gpu.in_flight = 0


class FakeGpu(ShapedArrays):
    """A fake GPU. Its clock is `now_ns`, and it calls `before_launch` before each launch.

    The kernel with the entry `skipped` does not run. `in_flight` has the launches since the host last waited.
    """

    label, name = "cuda:0", "fake"
    is_of_parent = False

    def __init__(self) -> None:
        self.now_ns, self.in_flight, self.skipped = 1_000_000, 0, ""
        self.before_launch: Callable[[Any], None] = lambda one: None
        self.offset: int | None = 0
        self.turns = 0
        self.stream = FakeStream(self)
        runtime = SimpleNamespace(memcpyHostToDevice=1, memcpyDeviceToHost=2, CUDARuntimeError=CudaError)
        self.cupy = SimpleNamespace(
            cuda=SimpleNamespace(runtime=runtime, Stream=lambda non_blocking: self.stream), ndarray=np.ndarray
        )

    def zeros(self, shape: Any, dtype: Any) -> Any:
        return np.zeros(shape, dtype).view(DeviceArray)

    def array(self, values: Any) -> Any:
        return np.array(values).view(DeviceArray)

    def synchronize(self) -> None:
        self.in_flight = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        self.turns += 1
        yield
        self.turns -= 1

    def offset_ns(self, device_ns: int) -> int | None:
        return self.offset

    def definition(self, one: CudaLaunch) -> KernelDefinition:
        return KernelDefinition(one.entry, "cuda")

    def launch(self, one: Any) -> None:
        self.prepared(one)()

    def prepared(self, one: Any, stamp: int | None = None, *, is_early: bool = False) -> Callable[[], None]:
        def launch() -> None:
            self.before_launch(one)
            self.do(lambda: None if one.entry == self.skipped else self._stamp(stamp))

        return launch

    def mark(self, module: Any, address: int) -> Callable[[], None]:
        return lambda: self.do(lambda: self._write(address))

    def copy(self, target: Any, source: Any, kind: int) -> None:
        self.do(lambda: np.copyto(target, source))

    def do(self, work: Callable[[], None]) -> None:
        self.in_flight += 1
        if self.stream.capturing is None:
            work()
        else:
            self.stream.capturing.append(work)

    def _stamp(self, address: int | None) -> None:
        if address is not None:
            self._write(address)
            end = ctypes.c_uint64.from_address(address + 8)
            self.now_ns += 500
            end.value = max(end.value, self.now_ns)  # as atomicMax does

    def _write(self, address: int) -> None:
        self.now_ns += 500
        ctypes.c_uint64.from_address(address).value = self.now_ns

    def host(self, array: Any) -> Any:
        return np.array(array)
