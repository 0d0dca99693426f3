"""Tests of the roofs (peak rates) of an attached model, which were measured on its device.

If there are no roofs, the reason is reported.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import attach, roofs
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Ceiling, Manifest
from cbtop.protocol.roofs import DeviceRoofs, cpu_name, driver_version, keep_roofs, roofs_file
from cbtop.protocol.vocabulary import Provenance
from tests.cbtop.recorded import Clock, profiler_in, record_of, source_of
from tests.profiler.memory import Memory
from tests.profiler.signals import nothing_is_lost

import torch  # isort: skip
from torch import nn  # isort: skip


def roof(name: str, kind: str = "compute") -> Ceiling:
    unit, dtype = ("GFLOP/s", name.partition("_")[2]) if kind == "compute" else ("GB/s", "")
    return Ceiling(name, kind, 100.0, unit, Provenance.MEASURED, 90.0, 80.0, "2026-11-22", dtype=dtype)


READ, FMA, PRODUCT = roof("dram_read", "bandwidth"), roof("fma_float32"), roof("matmul_bfloat16")
DOT = roof("dot_int8")


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def keep(*ceilings: Ceiling, threads: int | None = None, **more: Any) -> None:
    threads = torch.get_num_threads() if threads is None else threads
    keep_roofs([replace(DeviceRoofs(cpu_name(), ceilings, threads), **more)])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))


def model(dtype: Any = torch.float32) -> Any:
    return Stack().to(dtype)


def announced(model: Any) -> tuple[list[Ceiling], str]:
    memory = Memory()
    attach(model, BrickProfiler(recorder=memory))
    (manifest,) = (said for said in memory.said if isinstance(said, Manifest))
    return [said for said in memory.said if isinstance(said, Ceiling)], manifest.roofs


def test_roofs_for_the_weights_of_a_certain_model_are_not_those_of_another() -> None:
    keep(READ, FMA)
    keep(roof("weights_read", "bandwidth"), weights_bytes=1000)
    assert announced(model())[0] == [READ, FMA]


def test_roofs_measured_with_as_many_threads_are_announced() -> None:
    keep(READ, FMA, PRODUCT, DOT)
    assert announced(model()) == ([READ, FMA, PRODUCT], "")


@pytest.mark.parametrize("other", ["nothing", "threads", "processor"])
def test_roofs_of_another_processor_or_thread_count_are_not_used(other: str) -> None:
    threads = torch.get_num_threads()
    if other == "threads":
        keep(READ, FMA, threads=threads + 1)
    elif other == "processor":
        keep(READ, FMA, device="Another Processor")
    assert announced(model()) == ([], f"run `cbtop calibrate --threads {threads}`")


def test_a_roof_has_the_type_that_is_multiplied_under_it() -> None:
    # Files of an older cbtop have no data types, so the type of each roof (peak rate) follows from its name.
    keep(READ, replace(FMA, dtype=""), replace(PRODUCT, dtype=""))
    assert announced(model(torch.bfloat16)) == ([READ, FMA, PRODUCT], "")


def test_integers_have_a_roof_if_eager_quantisation_multiplies_them() -> None:
    keep(READ, FMA, DOT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated
        quantised = torch.ao.quantization.quantize_dynamic(model(), {nn.Linear})
    # Add a parameter. A model that only has packed weights has no parameters.
    quantised.scale = nn.Parameter(torch.ones(1))
    assert roofs.roofs_over(quantised) == ([READ, FMA, DOT], "")


def test_a_new_thread_count_of_torch_is_announced_with_its_roofs(runtime: Path) -> None:
    before = torch.get_num_threads()
    keep(READ, FMA, threads=before)
    keep(READ, threads=before + 1)
    profiler = profiler_in(runtime, Clock())
    root = model()  # Keep a reference to the model until the end of the test.
    attachment = attach(root, profiler)
    try:
        for threads, roofs in ((before + 1, {"dram_read"}), (before, {"dram_read", "fma_float32"})):
            torch.set_num_threads(threads)
            attachment.look_again()
            record = record_of(source_of(runtime))
            assert (record.manifest and record.manifest.threads, set(record.ceilings)) == (threads, roofs)
    finally:
        torch.set_num_threads(before)


def test_a_type_that_no_roof_was_measured_for_is_named() -> None:
    keep(READ, FMA)
    assert announced(model(torch.bfloat16)) == ([READ, FMA], "none was measured for weights in bfloat16")
    assert announced(model(torch.float64)) == ([READ, FMA], "none was measured for weights in float64")


def test_what_a_short_measurement_lacks_comes_with_the_way_out() -> None:
    short = [replace(READ, is_short=True), replace(FMA, is_short=True)]
    keep(*short)
    way_out = f"run `cbtop calibrate --threads {torch.get_num_threads()}`"
    said = f"none was measured for weights in bfloat16; {way_out}"
    assert announced(model(torch.bfloat16)) == (short, said)


def test_a_file_that_is_damaged_keeps_no_model_from_being_shown() -> None:
    roofs_file().parent.mkdir()
    roofs_file().write_text("{")
    ceilings, said = announced(model())
    assert ceilings == []
    assert f"{roofs_file()} holds no roofs" in said
    assert "run `cbtop calibrate`" in said


def test_weights_on_several_devices_or_on_one_that_is_not_measured_have_none() -> None:
    keep(READ, FMA)
    split = model()
    split.layers[0].to("meta")
    assert announced(split) == ([], "its weights lie on 2 devices")
    assert announced(model().to("meta")) == ([], "those of meta are not measured")
    assert roofs.roofs_over(nn.Module()) == ((), "the model has no weights")


class _OnGpu:
    """A model with weights that pretend to be on a GPU."""

    def __init__(self, dtype: Any) -> None:
        self._weights = torch.empty(4, dtype=dtype)
        self._modules: dict[str, Any] = {}
        self._parameters = {"weight": self}

    device = torch.device("cuda", 1)

    def numel(self) -> int:
        return 4

    @property
    def dtype(self) -> Any:
        return self._weights.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_of_a_gpu_the_roofs_are_found_by_its_uuid(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid, multi_processor_count = "18a9-c4", 132

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    ceilings = (roof("memory_read", "bandwidth"), *map(roof, ("matmul_bfloat16", "matmul_tf32", "matmul_float32")))
    gpu = DeviceRoofs("Made 100", ceilings, None, "18a9-c4", 132, driver_version(), 700)
    over: Any = _OnGpu(dtype)
    assert roofs.roofs_over(over) == ((), "run `cbtop calibrate`, then start this again")
    keep_roofs([gpu])
    found, missing = roofs.roofs_over(over)
    assert [one.dtype for one in found] == ["", "bfloat16", "tf32", "float32"]
    assert missing == ("none was measured for weights in int8" if dtype is torch.int8 else "")
    monkeypatch.setattr(Properties, "uuid", "18a9-c5")
    assert roofs.roofs_over(over) == ((), "run `cbtop calibrate`, then start this again")


def test_what_the_hosts_signal_handler_raises_meanwhile_reaches_the_host() -> None:
    keep(READ, FMA)
    bare = model()
    assert nothing_is_lost(lambda: roofs.roofs_over(bare), TimeoutError, 0)
    for at in itertools.count(1):
        if not nothing_is_lost(lambda: roofs.roofs_over(bare), TimeoutError, at):
            break
