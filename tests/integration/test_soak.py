"""Tests of a daemon under lasting load: the daemon accounts for every record, and its memory does not grow."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from benchmarks.load import Load, final_states
from cbtop.daemon.source import Source
from cbtop.profiler.analysis import step_intervals
from cbtop.protocol import codec
from cbtop.protocol.device_messages import DeviceSample
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.messages import DaemonHello, Heartbeat, Message, SourceCatalog, SourceState
from cbtop.protocol.subscriber import Subscriber
from tests.integration import hosts
from tests.integration.hosts import daemon, eventually

_log = logging.getLogger(__name__)

HOSTS = 8
RING_BYTES = 1 << 20
WARM_UP_ROUNDS, ROUNDS, ROUND_RECORDS = 3, 6, 10_000
SOAK_S, RECORDS_PER_S = 600.0, 20_000
WARM_UP_S = 15.0
BLOCKS = 20
CONFIDENCE_Z = 2.576  # quantile of the normal distribution for an interval of 99 %
# Limit for the growth of memory in bytes per record: one small object for every thousand records.
MAX_LEAK_BYTES = 0.06

# A daemon with small limits, so that its memory fills within seconds. With the real limit of 16,384 intervals per
# step that takes minutes. If its memory still grows afterwards, something has no limit.
SOON_FULL = """
import sys
from cbtop.cli import main
from cbtop.profiler.analysis import step_intervals
step_intervals.MAX_KEPT_INTERVALS = 256
sys.exit(main())
"""


@pytest.mark.slow
def test_every_record_is_reported_under_load_and_no_descriptor_leaks(runtime: Path) -> None:
    loads = [Load(runtime, RING_BYTES, spread_ns=64) for _ in range(HOSTS)]
    with daemon("--history", "0") as process:
        watched = psutil.Process(process.pid)
        descriptors, threads = [], []
        for number in range(WARM_UP_ROUNDS + ROUNDS):
            for load in loads:
                load.write(ROUND_RECORDS)
            eventually(lambda: sum(state.received for state in states_told()) == sum(load.written for load in loads))
            if number >= WARM_UP_ROUNDS:
                descriptors.append(watched.num_fds())
                threads.append(watched.num_threads())
        for load in loads:
            load.close()
        states = final_states(HOSTS)
    # There may be two descriptors more or less: a viewer is just leaving.
    assert max(descriptors) - min(descriptors) <= 2
    # There may be two threads more or less, because two threads sample devices while a viewer is connected.
    assert max(threads) - min(threads) <= 2
    assert sum(state.produced for state in states) == sum(state.received for state in states)
    assert sum(state.produced for state in states) == sum(load.written for load in loads)


def test_what_is_kept_of_a_process_does_not_grow_with_its_records(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_intervals, "MAX_KEPT_INTERVALS", 16)  # The limit is so small that a few rounds reach it.
    load = Load(runtime, RING_BYTES, spread_ns=64)
    source = Source(load.path)

    def blocks_after(rounds: int) -> int:
        for _ in range(rounds):
            load.write(1000)
            source.poll()
            for message in (*source.records(), *source.delta()):
                codec.encode(message)
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks_after(ROUNDS)
    # More rounds add less than one object for every two rounds.
    assert blocks_after(20 * ROUNDS) - before < 10 * ROUNDS
    load.close()


def test_the_slope_of_a_leak_is_told_from_noise_and_from_a_single_jump() -> None:
    chance = np.random.default_rng(0)
    at = np.arange(1200.0)
    noise = chance.normal(0, 50, 1200)
    low, slope, high = leak_of(at, noise)
    assert low < 0 < high
    assert abs(slope) < 0.1
    low, slope, high = leak_of(at, noise + at)
    assert 0.8 < low < slope < high < 1.2
    low, *_ = leak_of(at, noise + 1000 * (at > 600))
    assert low < MAX_LEAK_BYTES


@pytest.mark.slow
def test_for_ten_minutes_memory_descriptors_and_threads_stay_as_they_are(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Use a single arena of malloc. With an arena for each thread, free memory between objects would differ.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setattr(hosts, "CBTOP", [sys.executable, "-c", SOON_FULL])
    loads = [Load(runtime, RING_BYTES, spread_ns=64) for _ in range(HOSTS)]
    with daemon("--history", "0") as process:  # Keep no history, because it would grow up to its limit.
        watched = psutil.Process(process.pid)
        written, anonymous, descriptors, threads = [], [], [], []
        begun_s = next_s = time.monotonic()
        while (elapsed_s := time.monotonic() - begun_s) < WARM_UP_S + SOAK_S:
            for load in loads:
                load.write(max(0, min(int(elapsed_s * RECORDS_PER_S) - load.written, load.ring.capacity // 2)))
            if time.monotonic() > next_s:  # A viewer connects and leaves every half second.
                next_s += 0.5
                join()
                if elapsed_s > WARM_UP_S:
                    written.append(sum(load.written for load in loads))
                    anonymous.append(anonymous_bytes(process.pid))
                    descriptors.append(watched.num_fds())
                    threads.append(watched.num_threads())
            time.sleep(0.02)
        for load in loads:
            load.close()
        states = final_states(HOSTS)
    low, slope, high = leak_of(np.array(written, np.float64), np.array(anonymous, np.float64))
    produced = sum(load.written for load in loads)
    _log.info("%.0f s, %d records, own memory at first %d KiB", SOAK_S, produced, anonymous[0] >> 10)
    _log.info("at most %d KiB, %.3f bytes a record (%.3f to %.3f)", max(anonymous) >> 10, slope, low, high)
    _log.info("descriptors %s, threads %s", sorted(set(descriptors)), sorted(set(threads)))
    assert low < MAX_LEAK_BYTES
    assert max(descriptors) - min(descriptors) <= 2  # A viewer that is just leaving has two more descriptors.
    assert len(set(threads)) == 1
    assert sum(state.produced for state in states) == produced
    assert all(s.produced == s.received + s.overwritten + s.rejected for s in states)
    assert sum(state.rejected for state in states) == 0


def test_a_viewer_is_complete_with_its_first_message_whenever_it_comes(runtime: Path) -> None:
    loads = [Load(runtime, RING_BYTES) for _ in range(HOSTS)]
    with daemon():
        eventually(lambda: len({message.source for message in join() if isinstance(message, SourceCatalog)}) == HOSTS)
        said = [join() for _ in range(10)]
    for load in loads:
        load.close()
    for messages in said:
        of_sources = [message for message in messages if not isinstance(message, DeviceSample)]
        # These are the daemon's hello and heartbeat, and the catalog, the statistics and the state of each process.
        assert len(of_sources) == 2 + 3 * HOSTS
        assert isinstance(messages[0], DaemonHello)
        assert all(message.complete for message in messages if isinstance(message, SourceCatalog))


def join() -> list[Message]:
    """Return the first messages that a new viewer receives."""
    subscriber = Subscriber(default_endpoint())
    said: list[Message] = []
    while not said or not isinstance(said[0], DaemonHello):
        said = subscriber.receive(1000)
    subscriber.close()
    return said


def states_told() -> list[SourceState]:
    """Return the states of all processes that a new viewer receives."""
    return [state for message in join() if isinstance(message, Heartbeat) for state in message.sources]


def leak_of(records: NDArray[np.float64], size_bytes: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return how many bytes each record leaves behind: Sen's slope and its 99 % interval.

    P. K. Sen, Estimates of the regression coefficient based on Kendall's tau, 1968. The slope uses medians of BLOCKS
    blocks, because neighbouring samples are correlated and single samples would give a too narrow interval.
    """
    blocks = zip(np.array_split(records, BLOCKS), np.array_split(size_bytes, BLOCKS), strict=True)
    points = [(np.median(at), np.median(size)) for at, size in blocks]
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2))
    spread = CONFIDENCE_Z * (BLOCKS * (BLOCKS - 1) * (2 * BLOCKS + 5) / 18) ** 0.5
    middle = len(slopes) / 2
    return float(slopes[int(middle - spread / 2)]), float(np.median(slopes)), float(slopes[int(middle + spread / 2)])


def anonymous_bytes(pid: int) -> int:
    """Return the private memory of a process in bytes, without files and rings."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])
