"""Tests of the measured peak rates of a GPU.

A fake library reports which programs ran on the GPU, and for how long.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from cbtop.compute import gpu_ceilings, gpu_libraries, nvml
from cbtop.compute.errors import ComputeError
from cbtop.compute.gpu_libraries import GpuProperties, Run

GIB = 1 << 30
BYTES_PER_SEC, FLOP_PER_SEC = 2e12, 5e14


class Made:
    """A fake GPU that reads BYTES_PER_SEC and computes FLOP_PER_SEC. Its products in float32 fail."""

    name = "made"

    def __init__(self, free_bytes: int = 64 * GIB) -> None:
        self.free_bytes = free_bytes
        self._last_s = 0.0
        self.sizes: list[int] = []

    def count(self) -> int:
        return 1

    def use(self, index: int) -> GpuProperties:
        return GpuProperties("Made 100", "18a9-c4", 132, 50 << 20, self.free_bytes)

    def buffer(self, size_bytes: int) -> Any:
        return bytearray(0) if size_bytes > GIB else bytearray(size_bytes)

    def kernel(self, source: str, name: str) -> Callable[[int, int, list[Any]], object]:
        assert f"void {name}(" in source

        def launch(grid: int, block: int, arguments: list[Any]) -> None:
            ways = 1 if name == "memory_read" else 2
            self._last_s = ways * grid * block * gpu_ceilings.LOADS * gpu_ceilings.LOAD_BYTES / BYTES_PER_SEC

        return launch

    def product(self, precision: str, size: int) -> Run:
        if precision == "float32":
            raise RuntimeError("CUDA error: out of memory\nand much more")
        self.sizes.append(size)

        def run() -> None:
            self._last_s = 2 * size**3 / FLOP_PER_SEC

        return run

    def seconds(self, run: Run, repeats: int) -> float:
        run()
        return repeats * self._last_s


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ceilings, "WARM_S", 0.0)
    monkeypatch.setattr(nvml, "SETTLE_S", 0.0)
    monkeypatch.setitem(sys.modules, "pynvml", None)


def measured(library: Made, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(gpu_ceilings, "gpu_library", lambda: library)
    return next(gpu_ceilings.measure_gpus(lambda text, done: None))


def test_each_roof_is_what_was_moved_or_computed_in_the_time_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Made()
    roofs, missing = measured(library, monkeypatch)
    assert {one.name: (one.kind, round(one.value)) for one in roofs.ceilings} == {
        "memory_read": ("bandwidth", 2000),
        "memory_copy": ("bandwidth", 2000),
        "matmul_bfloat16": ("compute", 500_000),
        "matmul_float16": ("compute", 500_000),
        "matmul_tf32": ("compute", 500_000),
    }
    assert all(one.lowest is not None and one.median is not None and one.measured_on for one in roofs.ceilings)
    assert (roofs.device, roofs.uuid, roofs.multiprocessors, roofs.power_limit_w) == (
        "Made 100",
        "18a9-c4",
        132,
        None,
    )
    assert missing == [
        "power limit and other processes n/a: nvidia-ml-py is not installed",
        "matmul_float32 n/a: CUDA error: out of memory",
    ]
    assert 8192 in library.sizes


def test_matrices_are_as_large_as_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Made()
    monkeypatch.setattr(gpu_ceilings, "PRODUCT_S", 2 * 4096**3 / FLOP_PER_SEC)
    measured(library, monkeypatch)
    assert set(library.sizes) == {2048, 4096}


def test_where_little_memory_is_free_the_cache_is_not_measured_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    roofs, missing = measured(Made(free_bytes=400 << 20), monkeypatch)
    assert not [one for one in roofs.ceilings if one.kind == "bandwidth"]
    assert any("too little of its memory is free" in one for one in missing)


class FakeNvml(types.ModuleType):
    """A fake nvidia-ml-py with one GPU. At first, this GPU is `used_percent` busy.

    Later, `processes` lists which processes use it, as (pid, percent).
    """

    class NVMLError(Exception):
        pass

    def __init__(self, used_percent: int, processes: list[tuple[int, int]]) -> None:
        super().__init__("pynvml")
        self.used_percent, self.processes = used_percent, processes

    def nvmlInit(self) -> None:  # noqa: N802 - its names
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-18a9-c4":
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        return types.SimpleNamespace(gpu=self.used_percent)

    def nvmlDeviceGetProcessUtilization(self, handle: str, since_us: int) -> list[Any]:  # noqa: N802
        if not self.processes:
            raise self.NVMLError("Not Found")
        return [types.SimpleNamespace(pid=pid, smUtil=percent) for pid, percent in self.processes]


OURS, OTHER = 10, 11


@pytest.mark.parametrize(
    ("before_percent", "processes", "said"),
    [
        (0, [(OURS, 99)], 0),
        (0, [(OURS, 60), (OTHER, 40)], 40),
        (30, [(OURS, 99)], 30),
        # In a container, the driver may know this process by another pid. So the unknown pid may belong to this
        # process.
        (0, [(OTHER, 99)], 0),
        (0, [], 0),
    ],
)
def test_how_much_others_use_the_gpu_is_said(
    before_percent: int, processes: list[tuple[int, int]], said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(before_percent, processes))
    monkeypatch.setattr("os.getpid", lambda: OURS)
    roofs, missing = measured(Made(), monkeypatch)
    assert {one.load_percent for one in roofs.ceilings} == {said}
    assert {one.gpu for one in roofs.ceilings} == {"18a9-c4"}
    assert roofs.power_limit_w == 700
    assert len(missing) == 1  # the failing product


def test_a_gpu_that_nvml_does_not_know_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(0, []))
    library = Made()
    monkeypatch.setattr(library, "use", lambda index: GpuProperties("Made 100", "of another kind", 16, 1 << 20, GIB))
    roofs, missing = measured(library, monkeypatch)
    assert len(roofs.ceilings) == 5
    assert {one.load_percent for one in roofs.ceilings} == {None}
    assert "power limit and other processes n/a: NVML: Not Found" in missing


def test_without_a_library_that_can_use_one_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ComputeError, match="neither torch nor CuPy"):
        gpu_libraries.gpu_library()
