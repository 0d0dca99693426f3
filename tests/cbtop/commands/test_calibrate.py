"""`cbtop calibrate` measures, keeps and shows roofs; what could not be measured is said with the way out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.cli import main
from cbtop.compute import backends, ceilings, gpu_ceilings
from cbtop.compute.errors import ComputeError
from cbtop.protocol.messages import Ceiling
from cbtop.protocol.roofs import DeviceRoofs, cpu_name, known_roofs, roofs_of_cpu, try_to_keep
from cbtop.protocol.vocabulary import Provenance

READ = Ceiling("memory_read", "bandwidth", 3188.0, "GB/s", Provenance.MEASURED, 3186.0, 3177.0, "2026-11-22")
BUSY = replace(READ, median=2500.0, load_percent=40.0)
GPU = DeviceRoofs("Made 100", (BUSY,), None, "18a9-c4", 132, "580.159.04", 700)


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbtop.protocol.roofs.cache_dir", lambda: tmp_path)  # compiled kernels stay where they are


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two cores with two threads each, and a GPU of which something cannot be measured."""

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


@pytest.mark.usefixtures("made")
def test_every_device_is_measured_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[:4] == [
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
        f"kept in {tmp_path / 'roofs.json'}",
    ]
    assert "looking for GPUs …" in said.err
    known = known_roofs()
    assert [roofs.threads for roofs in known] == [1, 2, 4, None]
    assert known[-1] == GPU


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
    assert "GPU" not in capsys.readouterr().out


@pytest.mark.usefixtures("made")
def test_show_prints_what_is_known_and_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["calibrate", "--show"]) == 3
    assert "run `cbtop calibrate`" in capsys.readouterr().err
    assert main(["calibrate"]) == 0
    printed = capsys.readouterr().out.splitlines()
    for module in (ceilings, gpu_ceilings):
        monkeypatch.setitem(sys.modules, module.__name__, None)
    assert main(["calibrate", "--show"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [line for line in printed if "n/a:" not in line and not line.startswith("kept in")]


def test_a_damaged_file_is_one_line_and_calibrating_replaces_it(
    tmp_path: Path, made: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "roofs.json").write_text("{")
    assert main(["calibrate", "--show"]) == 1
    assert capsys.readouterr().err.startswith(f"cbtop: {tmp_path / 'roofs.json'} holds no roofs: ")
    assert main(["calibrate"]) == 0
    assert known_roofs()


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
    assert [path.name for path in tmp_path.iterdir()] == ["roofs.json"]


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


def test_the_processor_of_this_machine_is_really_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "LARGEST_BUFFER_BYTES", 16 << 20)
    monkeypatch.setitem(sys.modules, "torch", None)  # seconds to load
    assert main(["calibrate", "--threads", "1"]) == 0
    (roofs,) = known_roofs()
    assert [one.name for one in roofs.ceilings if one.kind != "cache"] == ["dram_read", "fma_float32"]
    assert {one.provenance for one in roofs.ceilings} == {Provenance.MEASURED}
    assert all(0 < (one.lowest or 0) <= (one.median or 0) <= one.value for one in roofs.ceilings)
    assert "matmul_bfloat16 n/a: torch is not installed" in capsys.readouterr().out
