"""Tests of open descriptors: programs with cbtop, viewers and the daemon close all descriptors in the end."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cbtop.daemon.daemon import DaemonInside
from cbtop.daemon.post_mortem import post_mortem
from cbtop.daemon.source import Source
from cbtop.feeds.feed import Feed
from cbtop.feeds.replay import ReplayFeed
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.endpoint import default_endpoint
from tests.cbtop.made_recordings import made_recording
from tests.integration.hosts import eventually
from tests.representatives import first_by_default

TIMES = 3


def descriptors() -> list[str]:
    """Return the targets (paths) of all open descriptors of this process."""
    # Repeat until nothing is collected, because the end of one object can make others unreachable.
    while gc.collect():
        pass
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # This is the descriptor of the listing itself, which is closed now.
            continue
    return sorted(found)


def records(profiler: BrickProfiler) -> None:
    with profiler.step("decode", tokens=1), profiler.brick("a", 8):
        pass


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    """Record something in a process that has ended. Returns the path of its ring."""
    profiler = BrickProfiler(recorder=RingRecorder(tmp_path))
    records(profiler)
    profiler.close()
    (ring,) = tmp_path.glob("*.ring")
    return ring


def a_profiler_that_is_asked_for_its_statistics(ring: Path) -> None:
    profiler = BrickProfiler(recorder=RingRecorder(ring.parent))
    records(profiler)
    assert profiler.stats_for("a")
    profiler.close()


def a_profiler_that_nobody_closes(ring: Path) -> None:
    profiler = BrickProfiler(recorder=RingRecorder(ring.parent))
    records(profiler)
    assert profiler.stats_for("a")


def a_source_that_is_closed(ring: Path) -> None:
    source = Source(ring)
    source.poll()
    source.close()


def a_source_that_is_dropped(ring: Path) -> None:
    Source(ring).poll()


def a_ring_that_is_looked_into_after_its_end(ring: Path) -> None:
    assert post_mortem(ring).steps


def a_viewer_with_the_daemon_inside(ring: Path) -> None:
    with Feed() as feed:
        eventually(lambda: feed.poll(50) or feed.sources())


def a_recording_that_is_replayed(ring: Path) -> None:
    path = ring.with_suffix(".cbtop")
    if not path.exists():
        (ring.parent / "made").mkdir()
        made_recording(ring.parent / "made", path, 5)
    with ReplayFeed(path) as feed:
        feed.seek(3.0)


@first_by_default(
    "whoever",
    [
        a_profiler_that_is_asked_for_its_statistics,
        a_profiler_that_nobody_closes,
        a_source_that_is_closed,
        a_source_that_is_dropped,
        a_ring_that_is_looked_into_after_its_end,
        a_viewer_with_the_daemon_inside,
        a_recording_that_is_replayed,
    ],
    4,
    ids=lambda whoever: whoever.__name__.replace("_", " "),
)
def test_no_more_are_open_after_than_before(
    ring: Path, whoever: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(ring.parent))
    # The first run opens some descriptors that stay open: those of ZeroMQ, and those of the last profiler.
    whoever(ring)
    before = descriptors()
    for _ in range(TIMES):
        whoever(ring)
    after = descriptors()
    assert len(after) <= len(before), after


def test_a_daemon_that_ends_lets_go_of_every_process_it_watched(ring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CBTOP_RUNTIME_DIR", str(ring.parent))
    daemon = DaemonInside(default_endpoint())
    eventually(lambda: ring.name in " ".join(descriptors()))
    daemon.close()
    # The descriptor of the ring is closed, although the daemon object still exists.
    assert ring.name not in " ".join(descriptors())


def test_a_forked_child_lets_go_of_what_its_parent_read(tmp_path: Path) -> None:
    profiler = BrickProfiler(recorder=RingRecorder(tmp_path))
    records(profiler)
    assert profiler.stats_for("a")
    (ring,) = tmp_path.glob("*.ring")

    def read_only() -> int:
        """Return the number of descriptors of the ring that are open for reading."""
        found = 0
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                is_ring = os.readlink(f"/proc/self/fd/{descriptor}") == str(ring)
                flags = next(
                    line
                    for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
                    if "flags" in line
                )
            except FileNotFoundError:
                continue
            found += is_ring and int(flags.split()[1], 8) & os.O_ACCMODE == os.O_RDONLY
        return found

    assert read_only() == 1
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(read_only())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_only() == 1
    profiler.close()
