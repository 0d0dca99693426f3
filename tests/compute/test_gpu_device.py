"""A GPU by a CuPy that computes on the host: whose turn it is, what its driver refuses, and what has no room."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu import device
from cbtop.compute.gpu.arguments import planes_of
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.quantization.base import QuantizedMatrix
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.profiler.device.driver import DriverError


class FakeDevice:
    """Notes how often it is current; it has `mem_info` free and in all."""

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


def test_kernels_that_do_not_wait_for_the_launch_before_are_not_launched_early(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    function = lambda *arguments, **more: launched.append("in turn")  # noqa: E731
    monkeypatch.setattr(gpu, "function", lambda *arguments, **more: function)
    monkeypatch.setattr(gpu, "_launch_early", lambda *arguments: launched.append("early"))
    one: Any = SimpleNamespace(arguments=(), module=None, entry="f", grid=None, block=None, shared_bytes=0)
    gpu.launch(one, is_early=True)
    assert launched == ["in turn"]


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


def test_a_matrix_whose_planes_are_made_without_room_for_them_is_refused_in_one_line(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(part: object) -> None:
        raise MemoryError

    monkeypatch.setattr(gpu.cupy, "asarray", full)
    assert Q4_K.planes is not None
    with pytest.raises(ComputeError, match=r"more are wanted; of 2\.00 GB 1\.00 GB are free on fake"):
        gpu.planes(Q4_K.planes, matrix())
