"""Tests of a slow rank (straggler) among four ranks. The slow rank is named.

If all ranks are equally fast, none is named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cbtop.client.busy import SLICES
from cbtop.feeds.feed import Feed
from cbtop.viewmodels.straggler import StragglerView
from tests.integration.hosts import PATIENTLY, cbtop, daemon, eventually, snapshot

RANKS = 4
SLOW_RANK = 2

# A rank that runs some steps for each line on stdin. The reported times of bricks are fixed, so the load of the
# machine does not matter. While the file `slow-N` exists next to the rank's ring, one of its bricks takes 15 % longer
# and the rank waits less.
RANK = """
import os, sys
from pathlib import Path
from typing import Any
from cbtop import BrickId, BrickProfiler
from cbtop.protocol.messages import Manifest
rank = int(os.environ["RANK"])
slow = Path(os.environ["CBTOP_RUNTIME_DIR"]) / f"slow-{rank}"
profiler = BrickProfiler()
profiler.announce(Manifest("toy", "qwen2", "numba", "F32", 1, 2, 64, 512, 1000, 4000))
noise = (0.98, 1.01, 1.0, 0.99, 1.02, 1.0)
for number, _ in enumerate(sys.stdin, rank):
    jitter = noise[number % len(noise)]
    pause_ns = 50_000_000 if (number + 400 * rank) % 1600 == 0 else 0  # rare, and of each rank at another time
    extra_ns = 600_000 if slow.exists() else 0
    with profiler.step("decode", tokens=1):
        for layer in range(2):
            with profiler.layer(layer):
                profiler.record_elapsed(BrickId.RMS_NORM, int(400_000 * jitter) + pause_ns)
                profiler.record_elapsed(BrickId.DOWN_PROJECTION, int(1_600_000 * jitter) + extra_ns // 2)
                profiler.record_elapsed("AllReduce", 900_000 - extra_ns // 2)
"""
# A rank like RANK, but without pauses. A report of one second has so few time slices that one pause would prevent a
# verdict.
WITHOUT_PAUSES = RANK.replace("50_000_000 if", "0 if")
assert WITHOUT_PAUSES != RANK
STEPS = 10  # number of steps that a rank runs for each line


Ranks = list[subprocess.Popen[bytes]]


@contextmanager
def ranks(script: str = RANK, count: int = RANKS) -> Iterator[Ranks]:
    with ExitStack() as running:
        found = []
        for rank in range(count):
            environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            process = running.enter_context(
                subprocess.Popen([sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE)
            )
            running.callback(process.kill)
            found.append(process)
        yield found


def run_on(processes: Ranks) -> None:
    """Let every rank run STEPS steps, and wait until they have ended."""
    for process in processes:
        assert process.stdin
        process.stdin.write(b"\n" * STEPS)
        process.stdin.flush()


@contextmanager
def running(processes: Ranks) -> Iterator[None]:
    """Keep the ranks running while another process makes a report."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.02):
            run_on(processes)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def look(feed: Feed, processes: Ranks) -> StragglerView | None:
    """Let the ranks run some steps. Return the straggler that the view then names, or None."""
    run_on(processes)
    feed.poll(20)
    view = feed.view()
    return view.straggler if view else None


def are_comparable(feed: Feed, processes: Ranks) -> bool:
    """Let the ranks run some steps. Return whether every rank has enough time slices for a verdict."""
    run_on(processes)
    feed.poll(20)
    records = [seen.record for seen in feed.seen().values()]
    return len(records) == RANKS and all(record.busy and record.busy.count == SLICES for record in records)


@pytest.mark.slow  # The default run skips this test, because test_straggler.py tests the same, with simulated ranks.
def test_a_rank_that_becomes_15_percent_slower_is_named(runtime: Path) -> None:
    with daemon(), ranks() as processes, Feed() as feed:
        eventually(lambda: are_comparable(feed, processes))
        for _ in range(50):
            assert look(feed, processes) is None
        (runtime / f"slow-{SLOW_RANK}").touch()
        # The percentage rises until the rank's earlier, fast steps are older than the window of the last seconds.
        found = eventually(
            lambda: (seen := look(feed, processes)) and seen.percent == pytest.approx(15, abs=2) and seen
        )
        assert (found.rank, found.pid, found.ranks) == (SLOW_RANK, processes[SLOW_RANK].pid, RANKS)
        assert found.brick == "DownProjection"
        assert found.brick_excess_us == pytest.approx(600, rel=0.1)
        (runtime / "slow-0").touch()  # Now two of the four ranks are slow, so none is named.
        eventually(lambda: look(feed, processes) is None)
        for _ in range(50):
            assert look(feed, processes) is None


@pytest.mark.slow  # The default run skips this test, because test_two_ranks.py tests such a report, with torch.
def test_a_report_and_ls_name_the_straggler_in_text_and_json(runtime: Path) -> None:
    (runtime / f"slow-{SLOW_RANK}").touch()
    with daemon(), ranks(WITHOUT_PAUSES) as processes, running(processes):
        # One report may be too short for a verdict.
        sources = eventually(lambda: (seen := snapshot()) and all(one["straggler"] for one in seen) and seen)
        once = ("--headless", "--once", "--window=all", *PATIENTLY, "--view", "bricks")
        text = eventually(lambda: "straggler:" in (seen := cbtop(*once).stdout) and seen)
        ls = ("ls", *PATIENTLY)
        eventually(lambda: f"{SLOW_RANK}/{RANKS}" in (listed := cbtop(*ls).stdout) and "straggler" in listed)
        listed = eventually(
            lambda: (seen := json.loads(cbtop(*ls, "--format", "json").stdout))["stragglers"] and seen
        )
    assert {source["straggler"]["rank"] for source in sources} == {SLOW_RANK}
    assert [straggler["rank"] for straggler in listed["stragglers"]] == [SLOW_RANK]
    assert [source["rank"] for source in listed["sources"]] == list(range(RANKS))
    (line,) = [line for line in text.splitlines() if line.startswith("straggler:")]
    assert f"rank {SLOW_RANK} is" in line
    assert f"pid {processes[SLOW_RANK].pid} on" in line
    assert "DownProjection" in line
