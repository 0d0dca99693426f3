"""Tests of `cbtop calibrate`: it measures, stores and shows roofs (peak rates).

It says how to fix what could not be measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.compute import backends, ceilings, gpu_ceilings, gpu_crossovers
from cbtop.compute import crossovers as compute_crossovers
from cbtop.compute.errors import ComputeError
from cbtop.compute.jit.cpu import BF16_PAYS, HAS_TILES, TIER
from cbtop.compute.settings import Crossovers, crossovers
from cbtop.protocol.crossovers import NEVER, Crossover, known_crossovers
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.roofs import DeviceRoofs, cpu_name, keep_roofs, known_roofs, roofs_of_cpu, try_to_keep
from cbtop.protocol.vocabulary import Provenance
from cbtop.version import __version__

READ = Ceiling("memory_read", "bandwidth", 3188.0, "GB/s", Provenance.MEASURED, 3186.0, 3177.0, "2026-11-22")
BUSY = replace(READ, median=2500.0, load_percent=40.0)
FOUND = (
    Crossover("product_bytes", 1 << 16, Provenance.MEASURED, "", 12.0, 9.0, 3.0),
    Crossover("attention_products", 1 << 17, Provenance.STATIC, "unsure at 3,670,016", 309.0, 304.0, 40.0),
    Crossover("bf16_tokens", 12, Provenance.STATIC, "no AMX"),
)
OF_GPU = (
    Crossover("gpu_layer_bytes", 1 << 21, Provenance.MEASURED, "Made 100", 312.0, 95.0, 3.0),
    Crossover("gpu_prompt_bytes", NEVER, Provenance.STATIC, "unsure at 545,259,520", 312.0, 395.0, 3.0),
)
GPU = DeviceRoofs("Made 100", (BUSY,), None, "18a9-c4", 132, "580.159.04", 700)


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Move the files of measured values to a temporary folder. The cache of compiled kernels stays where it is.
    monkeypatch.setattr("cbtop.protocol.roofs.cache_dir", lambda: tmp_path)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with two cores of two threads each. One figure of its GPU cannot be measured."""

    def product(threads: int) -> Ceiling:
        raise ComputeError("torch is not installed")

    def gpus(progress: object) -> Iterator[tuple[DeviceRoofs, list[str]]]:
        yield GPU, ["matmul_float32 n/a: CUDA error"]

    monkeypatch.setattr(backends, "available_threads", lambda: 4)
    monkeypatch.setattr(backends, "physical_cores", lambda: 2)
    monkeypatch.setattr(backends, "cpu_backend", lambda threads: None)
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda threads, weights_bytes: [READ])
    monkeypatch.setattr(ceilings, "measure_product", product)
    monkeypatch.setattr(gpu_ceilings, "measure_gpus", gpus)
    monkeypatch.setattr(compute_crossovers, "measure_crossovers", lambda threads, progress: FOUND)
    monkeypatch.setattr(gpu_crossovers, "measure_gpu_crossovers", lambda threads, progress: OF_GPU)


@pytest.mark.usefixtures("made")
def test_a_gpu_is_compared_with_a_processor_at_its_newly_found_crossovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[Crossovers] = []

    def measure(threads: int, progress: object) -> tuple[Crossover, ...]:
        met.append(crossovers())
        return OF_GPU

    monkeypatch.setattr(gpu_crossovers, "measure_gpu_crossovers", measure)
    before = crossovers()
    assert main(["calibrate"]) == 0
    assert met == [Crossovers(product_bytes=1 << 16, measured=frozenset({"product_bytes"}))]
    assert crossovers() == before


@pytest.mark.usefixtures("made")
def test_better_roofs_stay_and_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--threads", "2"]) == 0
    assert "stays" not in capsys.readouterr().out
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda threads, weights_bytes: [BUSY])
    assert main(["calibrate", "--threads", "2"]) == 0
    assert f"{cpu_name()}, 2 threads: the older memory_read stays: it was disturbed less\n" in capsys.readouterr().out
    assert [one.ceilings for one in known_roofs()] == [(READ,)]


@pytest.mark.usefixtures("made")
def test_every_device_is_measured_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[:10] == [
        f"{cpu_name()}, 4 threads: crossovers ({known_crossovers()[0].day})",
        "  products go to threads from        65,536 bytes of weights x tokens  "
        "measured, one thread 12.00 us, threads 9.00 us, spread 3.0 %",
        "  attention goes to threads from    131,072 products                   "
        "static (unsure at 3,670,016), one thread 309.0 us, threads 304.0 us, spread 40.0 %",
        "  products are of bfloat16 from          12 tokens                     static (no AMX)",
        "  tokens go to the GPU from       2,097,152 bytes of a layer           "
        "measured (Made 100), CPU 312.0 us, GPU 95.00 us, spread 3.0 %",
        "  prompts go to the GPU from          never bytes of a layer x tokens  "
        "static (unsure at 545,259,520), CPU 312.0 us, GPU 395.0 us, spread 3.0 %",
        f"{cpu_name()}, 1 thread (2026-11-22, age n/a)",
        "  memory_read            3,188 GB/s      median 3,186, lowest 3,177, spread 0.1 %, load n/a",
        "  matmul_bfloat16 n/a: torch is not installed",
        f"{cpu_name()}, 2 threads (2026-11-22, age n/a)",
    ]
    assert said.out.splitlines()[-6:] == [
        "Made 100, 18a9-c4, driver 580.159.04, power limit 700 W (2026-11-22, age n/a)",
        "  memory_read            3,188 GB/s      median 2,500, lowest 3,177, spread 21.6 %: unsure, load 40 %",
        "  ⚠ unsure: memory_read (spread 21.6 %)",
        "  ⚠ may be low: others used up to 40 % of the machine meanwhile",
        "  matmul_float32 n/a: CUDA error",
        f"kept in {tmp_path / 'roofs.json'} and crossovers.json",
    ]
    assert "looking for GPUs …" in said.err
    known = known_roofs()
    assert [roofs.threads for roofs in known] == [1, 2, 4, None]
    assert known[-1] == GPU
    (kept,) = known_crossovers()
    assert (kept.device, kept.threads, kept.version, kept.crossovers) == (cpu_name(), 4, __version__, FOUND + OF_GPU)


@pytest.mark.usefixtures("made")
def test_with_weights_they_are_kept_apart_from_the_roofs_of_other_models() -> None:
    for more in ([], ["--weights", "1000"], ["--weights", "2000"]):
        assert main(["calibrate", "--threads", "2", *more]) == 0
    assert [roofs.weights_bytes for roofs in known_roofs()] == [None, 1000, 2000]
    assert roofs_of_cpu(known_roofs(), 2) == known_roofs()[0]
    assert known_roofs()[1].title == f"{cpu_name()}, 2 threads, 1,000 bytes of weights"


@pytest.mark.usefixtures("made")
def test_with_threads_the_processor_alone_is_measured_with_so_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--threads", "3"]) == 0
    assert [roofs.threads for roofs in known_roofs()] == [3]
    assert known_crossovers() == ()
    assert "GPU" not in capsys.readouterr().out


@pytest.mark.usefixtures("made")
def test_show_prints_what_is_known_and_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["calibrate", "--show"]) == 3
    assert "run `cbtop calibrate`" in capsys.readouterr().err
    assert main(["calibrate"]) == 0
    printed = capsys.readouterr().out.splitlines()
    for module in (ceilings, compute_crossovers, gpu_ceilings, gpu_crossovers):
        monkeypatch.setitem(sys.modules, module.__name__, None)
    assert main(["calibrate", "--show"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert sorted(shown) == sorted(line for line in printed if "n/a:" not in line and not line.startswith("kept in"))


@pytest.mark.usefixtures("made")
def test_json_holds_what_was_measured_what_is_known_and_what_could_not_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["calibrate", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["schema"] == "cbtop.calibrate/1"
    assert measured["missing"] == [
        *["matmul_bfloat16 n/a: torch is not installed"] * 3,
        "matmul_float32 n/a: CUDA error",
    ]
    assert [one["threads"] for one in measured["roofs"]] == [1, 2, 4, None]
    (machine,) = measured["crossovers"]
    assert machine["threads"] == 4
    assert [(one["name"], one["value"], one["provenance"]) for one in machine["crossovers"]] == [
        ("product_bytes", 65536, "measured"),
        ("attention_products", 131072, "static"),
        ("bf16_tokens", 12, "static"),
        ("gpu_layer_bytes", 1 << 21, "measured"),
        ("gpu_prompt_bytes", NEVER, "static"),
    ]
    assert machine["crossovers"][2]["note"] == "no AMX"
    assert main(["calibrate", "--json", "--show"]) == 0
    assert json.loads(capsys.readouterr().out) == measured | {"missing": []}


@pytest.mark.parametrize("name", ["roofs", "crossovers"])
def test_a_damaged_file_is_one_line_and_calibrating_replaces_it(
    name: str, tmp_path: Path, made: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text("{")
    assert main(["calibrate", "--show"]) == 1
    assert capsys.readouterr().err.startswith(f"cbtop: {path} holds no {name}: ")
    assert main(["calibrate"]) == 0
    assert known_roofs()
    assert known_crossovers()


def test_where_nothing_can_be_kept_nothing_is_measured(
    tmp_path: Path, made: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("cbtop.protocol.roofs.cache_dir", lambda: tmp_path / "file" / "cbtop")
    assert main(["calibrate"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert str(tmp_path / "file") in said.err


def test_trying_the_directory_leaves_what_is_kept(tmp_path: Path, made: None) -> None:
    assert main(["calibrate"]) == 0
    before = known_roofs()
    try_to_keep()
    assert known_roofs() == before
    assert {path.name for path in tmp_path.iterdir()} == {"roofs.json", "crossovers.json"}


def test_more_threads_than_there_are_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--threads", "9999"]) == 2
    assert "9999 threads: this process may use" in capsys.readouterr().err


@pytest.mark.parametrize(("driver", "says_what_to_install"), [("", False), ("580.159.04", True)])
@pytest.mark.usefixtures("made")
def test_a_gpu_that_nothing_here_can_use_is_said_with_what_to_install(
    driver: str, says_what_to_install: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(progress: object) -> Iterator[tuple[DeviceRoofs, list[str]]]:
        raise ComputeError("neither torch nor CuPy can use one here")
        yield

    monkeypatch.setattr(gpu_ceilings, "measure_gpus", none)
    monkeypatch.setattr("cbtop.commands.calibrate.driver_version", lambda: driver)
    assert main(["calibrate"]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA GPU n/a: neither torch nor CuPy can use one here" in out
    assert ("install torch for CUDA, or CuPy" in out) == says_what_to_install
    assert [roofs.threads for roofs in known_roofs()] == [1, 2, 4]


OF_PRODUCTS = [
    *["dot_int8"] * (TIER != "generic"),
    *["dot_bfloat16"] * BF16_PAYS,
    *["tiles_bfloat16"] * HAS_TILES,
]


def test_the_processor_of_this_machine_is_really_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "LARGEST_BUFFER_BYTES", 16 << 20)
    monkeypatch.setitem(sys.modules, "torch", None)  # loading torch takes seconds
    assert main(["calibrate", "--threads", "1"]) == 0
    (roofs,) = known_roofs()
    assert [one.name for one in roofs.ceilings if one.kind != "cache"] == ["dram_read", "fma_float32", *OF_PRODUCTS]
    assert {one.provenance for one in roofs.ceilings} == {Provenance.MEASURED}
    assert all(0 < (one.lowest or 0) <= (one.median or 0) <= one.value for one in roofs.ceilings)
    assert "matmul_bfloat16 n/a: torch is not installed" in capsys.readouterr().out


def test_a_processor_measured_by_an_older_cbtop_reports_an_unknown_int8_roof(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = Ceiling("fma_float32", "compute", 80.0, "GFLOP/s", Provenance.MEASURED, dtype="float32")
    for roof, is_said in ((replace(now, dtype=""), True), (now, False)):
        keep_roofs([DeviceRoofs(cpu_name(), (roof,), threads=1)])
        assert main(["calibrate", "--show"]) == 0
        said = "dot_int8 n/a: measured by an older cbtop; run `cbtop calibrate`" in capsys.readouterr().out
        assert said == is_said
