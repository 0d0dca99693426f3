"""Tests of a GPU with a fake CuPy: the current device, errors of the driver, and lack of memory."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cbtop.compute.cuda.launches import CudaLaunch, CudaModule
from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu import device
from cbtop.compute.gpu.arguments import planes_of
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.gpu.prepared import CONFIG_WORDS
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.profiler.device.cuda_calls import DriverError


class FakeDevice:
    """A fake device that counts how often it is made the current device. `mem_info` is (free, total) in bytes."""

    id, mem_info = 0, (1_000_000_000, 2_000_000_000)

    def __init__(self, index: int) -> None:
        self.entered = 0

    def use(self) -> None:
        pass

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *error: object) -> None:
        self.entered -= 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    properties = {
        "name": b"fake", "multiProcessorCount": 4, "major": 8, "minor": 0, "maxThreadsPerMultiProcessor": 2048,
    }  # fmt: skip
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 1, getDeviceProperties=lambda index: properties, CUDARuntimeError=RuntimeError
    )
    memory = SimpleNamespace(OutOfMemoryError=MemoryError)
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    cuda = SimpleNamespace(runtime=runtime, Device=FakeDevice, memory=memory)
    cupy: Any = SimpleNamespace(
        cuda=cuda, zeros=np.zeros, asarray=np.asarray, get_default_memory_pool=lambda: pool, ndarray=np.ndarray
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return Gpu()


def test_one_thread_at_a_time_has_its_turn_and_the_device_is_current_there(gpu: Gpu) -> None:
    seen: list[str] = []

    def other() -> None:
        with gpu.turn():
            seen.append("other")

    thread = threading.Thread(target=other)
    with gpu.turn(), gpu.turn():
        assert gpu.device.entered == 2
        thread.start()
        thread.join(0.05)
        seen.append("this one")
    thread.join()
    assert seen == ["this one", "other"]
    assert gpu.device.entered == 0


def test_a_driver_that_refuses_its_clock_ends_no_pass(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> None:
        raise DriverError("no CUDA context is current")

    monkeypatch.setattr(device, "LaunchTimes", refuses)
    assert gpu.offset_ns(5) is None


class FakeDriver:
    """A fake driver.

    For each launch, it records whether the launch may begin early, and the words of its arguments.
    """

    count = 0  # number of arguments of a launch

    def __init__(self, *, refuses: bool = False) -> None:
        self.status = 1 if refuses else 0
        self.launched: list[tuple[bool, list[bytes]]] = []

    def cuLaunchKernelEx(self, config: int, function: int, pointers: int, extra: None) -> int:  # noqa: N802 - its name
        *_, attributes, count = (ctypes.c_uint64 * CONFIG_WORDS).from_address(config)
        given = (ctypes.c_void_p * self.count).from_address(pointers)
        self.launched.append((bool(attributes and count), [ctypes.string_at(one, 8) for one in given]))
        return self.status

    def cuGetErrorName(self, status: int, name: Any) -> None:  # noqa: N802
        ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_INVALID_VALUE"


def driver_of(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> FakeDriver:
    monkeypatch.setitem(vars(gpu), "_driver", driver)
    monkeypatch.setattr(gpu, "function", lambda *arguments, **more: SimpleNamespace(ptr=1))
    stream = SimpleNamespace(ptr=2)
    monkeypatch.setattr(gpu.cupy.cuda, "get_current_stream", lambda: stream, raising=False)
    return driver


def launch_of(*arguments: Any) -> CudaLaunch:
    return CudaLaunch(CudaModule("f", ""), "f", (1, 1, 1), (32, 1, 1), arguments)


@pytest.mark.parametrize("waits", [True, False])
def test_only_kernels_that_wait_for_the_launch_before_are_launched_early(
    waits: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_of(gpu, monkeypatch, FakeDriver())
    monkeypatch.setattr(gpu, "_can_launch_early", waits)
    gpu.launch(launch_of(), is_early=True)
    gpu.launch(launch_of())
    assert [is_early for is_early, _ in driver.launched] == [waits, False]


def test_a_prepared_launch_gives_the_driver_the_same_arguments_each_time(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_of(gpu, monkeypatch, FakeDriver())
    driver.count = 5
    array = SimpleNamespace(data=SimpleNamespace(ptr=0x7FFF_0000_1234))
    launch = gpu.prepared(launch_of(array, np.int32(-5), np.float32(1.5), np.int64(-7)), 0x5678)
    launch()
    launch()
    (_, first), (_, again) = driver.launched
    assert first == again
    assert first[0] == (0x7FFF_0000_1234).to_bytes(8, "little")
    assert first[1][:4] == np.int32(-5).tobytes()
    assert first[2][:4] == np.float32(1.5).tobytes()
    assert first[3] == np.int64(-7).tobytes()
    assert first[4] == (0x5678).to_bytes(8, "little")  # The last argument is the address of the time stamp.


def test_a_launch_that_the_driver_refuses_is_named(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    driver_of(gpu, monkeypatch, FakeDriver(refuses=True))
    with pytest.raises(ComputeError, match="f cannot be launched: CUDA_ERROR_INVALID_VALUE"):
        gpu.launch(launch_of())


def matrix() -> QuantizedMatrix:
    blocks = np.random.default_rng(3).integers(0, 256, (5, 3 * Q4_K.block_bytes), np.uint8)
    return QuantizedMatrix(Q4_K, blocks, 3 * Q4_K.block_elements)


def test_a_matrix_is_put_into_planes_part_by_part(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "WEIGHTS_TOGETHER", 4 * Q4_K.block_elements)
    copied: list[int] = []
    monkeypatch.setattr(gpu.cupy, "asarray", lambda part: copied.append(len(part)) or part)
    one, layout = matrix(), Q4_K.planes
    assert layout is not None
    assert np.array_equal(gpu.planes(layout, one), planes_of(Q4_K, one.data))
    assert copied == [4, 4, 4, 3]


def test_a_matrix_whose_planes_do_not_fit_in_memory_is_refused_in_one_line(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(part: object) -> None:
        raise MemoryError

    monkeypatch.setattr(gpu.cupy, "asarray", full)
    assert Q4_K.planes is not None
    with pytest.raises(ComputeError, match=r"more are wanted; of 2\.00 GB 1\.00 GB are free on fake"):
        gpu.planes(Q4_K.planes, matrix())
