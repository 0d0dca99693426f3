"""Tests of files of ended processes: their number and size are limited.

The age of their records decides which files are removed first. Files of other users are not touched.
"""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cbtop.profiler import recorder as recorder_module
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol import ended as ended_module
from cbtop.protocol.catalog import CatalogWriter
from cbtop.protocol.ended import beyond_bounds, left_by, rings_of_latest, runs, sweep
from cbtop.protocol.process import process_start
from cbtop.protocol.ring import HEADER_BYTES, RECORD_BYTES, RingWriter
from cbtop.protocol.ring_reader import RingReader
from tests.representatives import first_by_default

DEAD = 1 << 30  # A pid that no process can have.
RECORDS_FOR_EVER = """
import sys
from cbtop import BrickProfiler
profiler = BrickProfiler()
with profiler.brick("a"): pass
print("up", flush=True)
sys.stdin.readline()
"""


@contextmanager
def host() -> Iterator[subprocess.Popen[str]]:
    """Run a process that has recorded something and waits."""
    command = [sys.executable, "-c", RECORDS_FOR_EVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        try:
            yield process
        finally:
            process.kill()


def leave(directory: Path, number: int, age_s: float = 0.0, records: int = 64) -> Path:
    """Write the files of an ended process `DEAD + number`.

    Its newest record is `age_s` old, and its files an hour.
    """
    ring = directory / f"{DEAD + number}-1-0.ring"
    CatalogWriter(ring.with_suffix(".catalog")).close()
    end_ns = time.perf_counter_ns() - round(age_s * 1e9)
    RingWriter(ring, records * RECORD_BYTES).record(1, end_ns - 1, end_ns, 1)
    age_files(ring)
    return ring


def age_files(ring: Path, seconds: float = 3600) -> None:
    """Set the times of the files.

    The writer does not change these times reliably, because it writes through a mapping.
    """
    at_s = time.time() - seconds
    for path in (ring, ring.with_suffix(".catalog")):
        os.utime(path, (at_s, at_s))


def age_of(ring: Path) -> float:
    left = left_by(ring)
    assert left
    return time.time() - left.last_sign_s


def test_how_old_it_is_its_newest_record_says_and_not_the_file(runtime: Path) -> None:
    assert age_of(leave(runtime, 0, age_s=0)) < 600
    # A record cannot be older than the clock of the machine, which may have just started.
    aged_s = min(1000, time.perf_counter() / 2)
    assert aged_s <= age_of(leave(runtime, 1, age_s=aged_s)) < aged_s + 600
    silent = leave(runtime, 2, age_s=100_000)
    assert 3600 <= age_of(silent) < 4200  # Without a record, the times of the files count. The files are an hour old.


@pytest.mark.parametrize("end_ns", [-(1 << 63), -1, 0, "in eleven days", (1 << 63) - 1])
def test_a_time_that_makes_no_sense_makes_a_ring_neither_new_nor_old(runtime: Path, end_ns: int | str) -> None:
    if isinstance(end_ns, str):
        end_ns = time.perf_counter_ns() + 10**15
    ring = leave(runtime, 0, age_s=5000)
    RingWriter(ring.with_suffix(".other"), 64 * RECORD_BYTES).record(1, 0, end_ns, 1)
    ring.with_suffix(".other").rename(ring)
    age_files(ring)
    assert 3600 <= age_of(ring) < 4200
    age_files(ring, -3600)  # A file time in the future is ignored.
    assert age_of(ring) > 3600


def test_what_a_killed_process_left_is_as_old_as_its_last_record(runtime: Path) -> None:
    with host() as process:
        (ring,) = runtime.glob("*.ring")
        age_files(ring)
        assert runs(ring)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not runs(ring)
    assert age_of(ring) < 600


def test_a_process_runs_while_it_holds_the_lock_whatever_its_pid_is_here(runtime: Path) -> None:
    ring = leave(runtime, 0)
    assert not runs(ring)
    with ring.with_suffix(".catalog").open() as catalog:
        fcntl.flock(catalog, fcntl.LOCK_EX)
        assert runs(ring)
    assert not runs(ring)


def test_a_process_without_its_lock_runs_until_it_closes_its_ring(runtime: Path) -> None:
    ring = runtime / f"{os.getpid()}-{process_start(os.getpid())}-0.ring"
    CatalogWriter(ring.with_suffix(".catalog")).close()
    writer = RingWriter(ring)
    assert runs(ring)
    writer.close()
    assert not runs(ring)


def test_a_catalog_that_is_new_is_not_asked_for_its_lock(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = runtime / f"{DEAD}-1-0.ring"
    CatalogWriter(ring.with_suffix(".catalog")).close()
    with monkeypatch.context() as patched:
        patched.delattr(ended_module, "is_locked")
        assert runs(ring)
    old_s = time.time() - 3600
    os.utime(ring.with_suffix(".catalog"), (old_s, old_s))
    assert not runs(ring)


def test_a_closed_or_dropped_profiler_leaves_only_the_used_part_of_its_ring(runtime: Path) -> None:
    for drop in (False, True):
        before = set(runtime.glob("*.ring"))
        profiler = BrickProfiler(recorder=RingRecorder(runtime))
        with profiler.brick("a"):
            pass
        (ring,) = {*runtime.glob("*.ring")} - before
        assert runs(ring)
        if drop:
            del profiler
            gc.collect()
        else:
            profiler.close()
        assert not runs(ring)
        left = left_by(ring)
        assert left
        assert left.size_bytes < 1 << 18
        assert len(RingReader(ring).read(final=True).node) == 1


@pytest.mark.slow
def test_profilers_made_and_dropped_without_end_leave_bounded_files(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_module, "MAX_ENDED", 8)
    with BrickProfiler().brick("lives on"):
        for _ in range(40):
            with BrickProfiler().brick("a"):
                pass
            gc.collect()
            assert len(list(runtime.glob("*.ring"))) <= 10 + ended_module.SWEPT_AT_ONCE


@pytest.mark.slow
def test_profilers_opened_in_turns_do_not_look_at_the_directory_each_time(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []
    monkeypatch.setattr(recorder_module, "sweep", lambda directory: looked.append(directory) or 0)
    for _ in range(64):
        profiler = BrickProfiler()
        with profiler.brick("a"):
            pass
        profiler.close()
    assert len(looked) == 64 // ended_module.SWEPT_AT_ONCE
    recorder_module._after_fork()  # Call this function as the child of a process that forks many children would.
    with BrickProfiler().brick("a"):
        pass
    assert len(looked) == 64 // ended_module.SWEPT_AT_ONCE + 1


def test_what_has_no_ring_is_no_process_that_ended_and_goes_first(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_module, "MAX_ENDED", 4)
    rings = [leave(runtime, number) for number in range(4)]
    strays = [runtime / f"{DEAD + 10}-1-0.new", runtime / f"{DEAD + 11}-1-0.catalog"]
    for stray in strays:
        stray.touch()
        os.utime(stray, (0, 0))
    left = [each for path in (*rings, *strays) if (each := left_by(path.with_suffix(".ring")))]
    assert (len(left), beyond_bounds(left, runtime)) == (6, [])
    assert sweep(runtime) == 2
    assert [path.exists() for path in (*rings, *strays)] == [True] * 4 + [False] * 2


def test_within_the_bounds_nothing_goes_and_nobody_is_asked(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rings = [leave(runtime, number) for number in range(8)]
    monkeypatch.setattr(ended_module, "MAX_ENDED", 8)
    monkeypatch.delattr(ended_module, "runs")
    assert sweep(runtime) == 0
    assert all(ring.exists() for ring in rings)


@first_by_default("bound", ["processes", "bytes", "disk"])
def test_beyond_a_bound_the_oldest_go_and_what_runs_stays(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    rings = [leave(runtime, number, age_s=10 * number, records=512) for number in (3, 9, 1, 8, 2, 7, 5, 0, 4, 6)]
    each_bytes = HEADER_BYTES + 512 * RECORD_BYTES
    if bound == "processes":
        monkeypatch.setattr(ended_module, "MAX_ENDED", 8)
    elif bound == "bytes":
        monkeypatch.setattr(ended_module, "MAX_ENDED_BYTES", 8 * each_bytes)
    else:
        disk = os.statvfs(runtime)
        monkeypatch.setattr(ended_module, "LARGEST_SHARE", disk.f_blocks * disk.f_frsize // (8 * each_bytes))
    bystanders = [runtime / "daemon.sock", runtime / "notes.ring", runtime / "1-1-1.ring.bak"]
    for path in bystanders:
        path.touch()
    with host() as process:
        (running,) = runtime.glob(f"{process.pid}-*.ring")
        age_files(running, 1e9)
        sweep(runtime)
        ages = sorted(int(ring.stem.split("-")[0]) - DEAD for ring in rings if ring.exists())
        assert ages == list(range(len(ages)))
        assert 5 <= len(ages) <= 6
        assert running.exists()
        assert all(path.exists() for path in bystanders)
        assert {path.stem for path in runtime.glob("*.catalog")} == {path.stem for path in runtime.glob("*-*-0.ring")}


def test_what_is_no_file_of_this_user_stays(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_module, "MAX_ENDED", 2)
    rings = [leave(runtime, number) for number in range(4)]
    (runtime / f"{DEAD + 9}-1-0.ring").mkdir()
    (runtime / f"{DEAD + 8}-1-0.ring").symlink_to(rings[0])
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert sweep(runtime) == 0
    assert sweep(runtime) == 2
    assert (runtime / f"{DEAD + 9}-1-0.ring").is_dir()
    assert (runtime / f"{DEAD + 8}-1-0.ring").is_symlink()


def test_the_newest_stays_however_large_it_is(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_module, "MAX_ENDED_BYTES", 1)
    rings = [leave(runtime, number, age_s=number) for number in range(3)]
    assert sweep(runtime) == 2
    assert [ring.exists() for ring in rings] == [True, False, False]


def test_a_starting_host_looks_at_few_of_many_files_and_removes_fewer(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_module, "SWEPT_NAMES", 64)
    monkeypatch.setattr(ended_module, "MAX_ENDED", 40)
    for number in range(200):
        (runtime / f"{DEAD + number}-1-0.ring").touch()
    asked: list[Path] = []
    monkeypatch.setattr(ended_module, "runs", lambda ring: asked.append(ring) or runs(ring))
    assert sweep(runtime) == ended_module.SWEPT_AT_ONCE
    assert len(asked) == ended_module.SWEPT_NAMES
    for _ in range(200):
        if not sweep(runtime):
            break
    assert len(list(runtime.glob("*.ring"))) <= ended_module.MAX_ENDED


def test_a_host_that_starts_where_many_ended_leaves_the_bound(runtime: Path) -> None:
    for number in range(ended_module.MAX_ENDED + 5):
        # All records are younger than a few seconds, so that their times are positive even on a machine that has just
        # started.
        leave(runtime, number, age_s=number / 100)
    with host():
        pass
    left = [path for path in runtime.glob("*.ring") if int(path.stem.split("-")[0]) >= DEAD]
    assert len(left) == ended_module.MAX_ENDED + 5 - ended_module.SWEPT_AT_ONCE
    assert not (runtime / f"{DEAD + ended_module.MAX_ENDED + 4}-1-0.ring").exists()


@pytest.mark.parametrize("word", [0, 1, 3, 10, 16])
def test_a_ring_that_lies_is_somebodys_and_of_some_age(runtime: Path, word: int) -> None:
    ring = leave(runtime, 0)
    with ring.open("r+b") as file:
        file.seek(8 * word)
        file.write(b"\xff" * 8)
    age_files(ring)
    assert not runs(ring)
    assert 0 <= age_of(ring) < 4200
    ring.write_bytes(b"")
    assert age_of(ring) < 600


def test_the_rings_of_a_pid_are_those_of_its_latest_process() -> None:
    names = ["501-70-0.ring", "501-900-0.ring", "501-900-1.catalog", "5010-950-0.ring", "notes.txt", "501-80-3.new"]
    assert sorted(rings_of_latest(names, 501)) == ["501-900-0.ring", "501-900-1.ring"]
    assert rings_of_latest(names, 7) == []
