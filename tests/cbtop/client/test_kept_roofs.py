"""A process gets the newer roofs (measured peak rates) of its device after `cbtop calibrate` has stored them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.client.kept_roofs import StoredRoofs
from cbtop.client.source_record import SourceRecord
from cbtop.client.window import Window
from cbtop.errors import CbtopError
from cbtop.feeds import calibration
from cbtop.feeds.calibration import Calibration, arguments
from cbtop.protocol.messages import Ceiling, Manifest
from cbtop.protocol.roofs import DeviceRoofs, cpu_name, keep_roofs, roofs_file, way_out_on_cpu
from cbtop.protocol.vocabulary import Provenance
from cbtop.viewmodels.roofline import ceiling_rows
from cbtop.viewmodels.source import source_view
from tests.cbtop import samples
from tests.cbtop.recorded import Clock, profiler_in, record_of, source_of

MORNING, NOON = "2026-11-22T10:00:00+01:00", "2026-11-22T11:00:00+00:00"
READ = Ceiling("dram_read", "bandwidth", 20.0, "GB/s", Provenance.MEASURED, 19.0, 12.5, MORNING)
WEIGHTS = replace(READ, name="weights_read", value=80.0)
FMA = replace(READ, name="fma_float32", kind="compute", unit="GFLOP/s")
THREADS, WEIGHTS_BYTES = 2, 78_000_000
DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def record(runtime: Path) -> Callable[..., SourceRecord]:
    def record(*ceilings: Ceiling, roofs: str = "") -> SourceRecord:
        profiler = profiler_in(runtime, Clock())
        profiler.announce(
            Manifest("toy", "qwen2", "numba", "Q4_K", THREADS, 2, 64, 512, 1000, WEIGHTS_BYTES, roofs=roofs)
        )
        for ceiling in ceilings:
            profiler.announce(ceiling)
        return record_of(source_of(runtime))

    return record


def again(*ceilings: Ceiling, **other: object) -> None:
    measured = tuple(replace(one, value=one.value * 2, measured_on=NOON) for one in ceilings)
    keep_roofs([replace(DeviceRoofs(cpu_name(), measured, THREADS), **other)])  # type: ignore[arg-type]


def values(record: SourceRecord) -> dict[str, float]:
    return {one.name: one.value for one in StoredRoofs().over(record)}


def test_what_was_measured_again_takes_the_place_of_what_was_announced(record: Callable[..., SourceRecord]) -> None:
    over, roofs = record(READ, FMA), StoredRoofs()
    assert list(roofs.over(over)) == [READ, FMA]
    again(READ)
    assert [one.value for one in roofs.over(over)] == [40.0, FMA.value]  # the file was read again
    roofs_file().unlink()
    assert list(roofs.over(over)) == [READ, FMA]


@pytest.mark.parametrize(
    "other",
    [
        {"threads": 3},
        {"device": "another processor"},
        {"weights_bytes": WEIGHTS_BYTES},
        {"uuid": "a", "threads": None},
    ],
    ids=str,
)
def test_what_was_measured_of_another_device_or_with_other_threads_does_not(
    record: Callable[..., SourceRecord], other: dict[str, object]
) -> None:
    again(READ, FMA, **other)
    assert values(record(READ, FMA)) == {"dram_read": 20.0, "fma_float32": 20.0}


def test_roofs_with_weights_are_those_of_weights_as_large(record: Callable[..., SourceRecord]) -> None:
    again(READ, WEIGHTS, weights_bytes=1000)
    over = record(READ, WEIGHTS)
    assert values(over) == {"dram_read": 20.0, "weights_read": 80.0}
    again(READ, WEIGHTS, weights_bytes=WEIGHTS_BYTES)
    assert values(over) == {"dram_read": 40.0, "weights_read": 160.0}


def test_of_a_gpu_they_are_found_by_its_uuid(record: Callable[..., SourceRecord]) -> None:
    of_gpu = replace(READ, name="memory_read", gpu="18a9-c4")
    again(of_gpu, uuid="18a9-c5", threads=None)
    over = record(of_gpu)
    assert values(over) == {"memory_read": 20.0}
    again(of_gpu, uuid="18a9-c4", threads=None)
    assert values(over) == {"memory_read": 40.0}


def test_neither_an_older_roof_nor_one_that_is_no_measurement_is_replaced(
    record: Callable[..., SourceRecord],
) -> None:
    # READ was measured at noon UTC, so this roof is one second newer in spite of its time zone.
    newer = replace(READ, measured_on="2026-11-22T12:00:01+01:00")
    static = replace(FMA, provenance=Provenance.STATIC)
    again(READ, FMA)
    assert values(record(newer, static)) == {"dram_read": 20.0, "fma_float32": 20.0}


INT8 = replace(FMA, name="dot_int8", dtype="int8", unit="GOP/s")


def test_a_process_that_began_without_roofs_gets_those_measured_since(record: Callable[..., SourceRecord]) -> None:
    over, roofs = record(roofs=way_out_on_cpu(THREADS)), StoredRoofs()
    assert list(roofs.over(over)) == []
    again(READ, FMA, INT8)
    assert [(one.name, one.dtype) for one in roofs.over(over)] == [("dram_read", ""), ("fma_float32", "float32")]
    shown = source_view(over, ceilings=roofs.over(over)).roofline
    assert (len(shown.ceilings), shown.note) == (2, "")
    assert source_view(over).roofline.note == way_out_on_cpu(THREADS)


@pytest.mark.parametrize("why", ["those of ROCm are not measured", way_out_on_cpu(THREADS + 1), ""])
def test_a_process_whose_roofs_are_missing_for_another_reason_gets_none(
    why: str, record: Callable[..., SourceRecord]
) -> None:
    again(READ, FMA)
    assert values(record(roofs=why)) == {}


def test_short_roofs_are_replaced_as_a_whole(record: Callable[..., SourceRecord]) -> None:
    short = replace(FMA, name="matmul_float32", is_short=True)
    over = record(replace(READ, is_short=True), short)
    assert values(over) == {"dram_read": 20.0, "matmul_float32": 20.0}
    again(READ, FMA)
    assert values(over) == {"dram_read": 40.0, "fma_float32": 40.0}


def test_a_process_of_another_machine_keeps_its_roofs(record: Callable[..., SourceRecord]) -> None:
    again(READ)
    over = record(READ)
    assert over.hello is not None
    over.hello = replace(over.hello, boot_id="of another one")
    assert values(over) == {"dram_read": 20.0}
    assert values(SourceRecord("nothing known", Window(10.0))) == {}


def test_a_damaged_file_takes_nothing_away(record: Callable[..., SourceRecord]) -> None:
    roofs_file().parent.mkdir(exist_ok=True)
    roofs_file().write_text("{")
    assert values(record(READ)) == {"dram_read": 20.0}


def test_the_same_threads_and_weights_are_measured_and_of_a_gpu_all_there_is() -> None:
    def over(*ceilings: Ceiling, threads: int | None = 2) -> list[str]:
        roofs = replace(samples.LIVE.roofline, ceilings=ceiling_rows(ceilings))
        return arguments(replace(samples.LIVE, roofline=roofs, threads=threads))

    assert over(READ, FMA) == ["--threads", "2"]
    assert over(READ, WEIGHTS, FMA) == ["--threads", "2", "--weights", "78200000"]
    assert over() == ["--threads", "2"]
    assert over(READ, threads=None) == []
    assert over(replace(READ, gpu="18a9-c4")) == []


def test_without_the_engine_the_short_measurement_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "find_spec", lambda name: None)
    assert arguments(replace(samples.LIVE, threads=2)) == ["--short", "--threads", "2"]
    assert arguments(replace(samples.LIVE, threads=None)) == []


def python_that(says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{says}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


def ended(calibration: Calibration) -> list[str]:
    deadline_s = time.monotonic() + DEADLINE_S
    while (found := calibration.poll()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return found


def test_a_calibration_says_what_it_does_and_then_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python_that(
        "echo \"$@\"; echo 'My CPU, 2 threads …' >&2\n"
        f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; echo 'read 20'",
        tmp_path,
        monkeypatch,
    )
    with Calibration(samples.LIVE) as running:
        deadline_s = time.monotonic() + DEADLINE_S
        while running.status != "measuring roofs: My CPU, 2 threads":
            assert running.poll() is None
            assert time.monotonic() < deadline_s
        (tmp_path / "go").touch()
        assert ended(running) == ["-m cbtop calibrate --threads 2", "read 20"]


def test_a_calibration_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python_that("echo 'cbtop: /cache: No space left' >&2; exit 1", tmp_path, monkeypatch)
    with Calibration(samples.LIVE) as running, pytest.raises(CbtopError, match=r"^/cache: No space left$"):
        ended(running)


@pytest.mark.parametrize("obeys", [True, False])
def test_a_calibration_that_nobody_waits_for_is_ended(
    obeys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "END_WITHIN_S", DEADLINE_S if obeys else 0.01)
    ignore = "" if obeys else "trap '' TERM; "
    python_that(f"{ignore}echo 'up …'; exec sleep 600", tmp_path, monkeypatch)
    with Calibration(samples.LIVE) as running:
        while "up" not in running.status:
            assert running.poll() is None
    assert running._process.returncode is not None
    assert running._process.returncode < 0
