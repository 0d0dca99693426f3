"""Four ranks, one of them slow: it is named, and nobody is named where all are equal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cbtop.client.feed import Feed
from cbtop.viewmodels.model import StragglerView
from tests.integration.hosts import PATIENTLY, cbtop, daemon, eventually, snapshot

RANKS = 4
SLOW_RANK = 2

# Each step really takes its time; what its bricks took is said, so that a busy machine does not decide the test.
# A rank that has the file `slow-N` beside its ring is 15 % slower in one brick from then on, and waits less.
RANK = """
import os, sys, time
from pathlib import Path
from typing import Any
from cbtop import BrickId, BrickProfiler
from cbtop.protocol.messages import Manifest
rank = int(os.environ["RANK"])
slow = Path(os.environ["CBTOP_RUNTIME_DIR"]) / f"slow-{rank}"
profiler = BrickProfiler()
profiler.announce(Manifest("toy", "qwen2", "numba", "F32", 1, 2, 64, 512, 1000, 4000))
noise = (0.98, 1.01, 1.0, 0.99, 1.02, 1.0)
number = rank
while True:
    number += 1
    jitter = noise[number % len(noise)]
    extra_ns = 600_000 if slow.exists() else 0
    with profiler.step("decode", tokens=1):
        for layer in range(2):
            with profiler.layer(layer):
                profiler.record_elapsed(BrickId.RMS_NORM, int(400_000 * jitter))
                profiler.record_elapsed(BrickId.DOWN_PROJECTION, int(1_600_000 * jitter) + extra_ns // 2)
                profiler.record_elapsed("AllReduce", 900_000 - extra_ns // 2)
        time.sleep(0.01)
"""


@contextmanager
def ranks(script: str = RANK, count: int = RANKS) -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as running:
        found = []
        for rank in range(count):
            environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            process = running.enter_context(subprocess.Popen([sys.executable, "-c", script], env=environment))
            running.callback(process.kill)
            found.append(process)
        yield found


def named(feed: Feed) -> StragglerView | None:
    feed.poll(20)
    view = feed.view()
    return view.straggler if view else None


def are_comparable(feed: Feed, count: int = RANKS) -> bool:
    """Whether every rank has been seen for as long as a verdict looks back."""
    feed.poll(20)
    views = [view for source in feed.sources() if (view := feed.view(source.key))]
    return len(views) == count and all(view.steps and view.steps.count > 100 for view in views)


def test_a_rank_that_becomes_15_percent_slower_is_named(runtime: Path) -> None:
    with daemon(), ranks() as processes, Feed() as feed:
        eventually(lambda: are_comparable(feed))
        for _ in range(50):
            assert named(feed) is None
        (runtime / f"slow-{SLOW_RANK}").touch()
        # It rises as its quick steps are forgotten.
        found = eventually(lambda: (seen := named(feed)) and seen.percent == pytest.approx(15, abs=2) and seen)
    assert (found.rank, found.pid, found.ranks) == (SLOW_RANK, processes[SLOW_RANK].pid, RANKS)
    assert found.brick == "DownProjection"
    assert found.brick_excess_us == pytest.approx(600, rel=0.1)


def test_once_names_the_straggler_in_text_and_json(runtime: Path) -> None:
    (runtime / f"slow-{SLOW_RANK}").touch()
    with daemon(), ranks() as processes, Feed() as feed:
        eventually(lambda: are_comparable(feed))
        eventually(lambda: named(feed))
        # A look may be too short.
        sources = eventually(lambda: (seen := snapshot()) and all(one["straggler"] for one in seen) and seen)
        once = ("--headless", "--once", *PATIENTLY, "--view", "bricks")
        text = eventually(lambda: "straggler:" in (seen := cbtop(*once).stdout) and seen)
    assert {source["straggler"]["rank"] for source in sources} == {SLOW_RANK}
    (line,) = [line for line in text.splitlines() if line.startswith("straggler:")]
    assert f"rank {SLOW_RANK} is" in line
    assert f"pid {processes[SLOW_RANK].pid} on" in line
    assert "DownProjection" in line
