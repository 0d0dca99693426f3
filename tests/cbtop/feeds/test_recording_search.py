"""Tests of the process that a replay shows first if the recording has several processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbtop.commands import replay
from cbtop.daemon.source import Source
from cbtop.feeds.replay import ReplayFeed
from cbtop.protocol.process import RUN_ID
from cbtop.protocol.recording import FrameKind, RecordingOrigin, RecordingWriter
from tests.cbtop.made_recordings import BEGIN_NS, HELLO, frame
from tests.cbtop.recorded import Clock, profiler_in, source_of
from tests.integration.hosts import cbtop

IS_COMMAND, IS_CHILD = f"{os.getpid()},7:", "1,7:"


def two_processes(directory: Path, run_ids: tuple[str, str], steps: tuple[int, int]) -> tuple[Path, list[str]]:
    """Record two processes for ten seconds. The first one has data from second 2 on, the second one from second 5 on.

    `run_ids` are their values of CBTOP_RUN_ID. Return the recording and the keys of the processes.
    """
    sources: list[Source] = []
    profilers = []
    for at, run_id in enumerate(run_ids):
        (folder := directory / f"process{at}").mkdir(mode=0o700)
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(RUN_ID, run_id)
            profilers.append((clock := Clock(), profiler_in(folder, clock)))
            with profilers[-1][1].step("load", tokens=0):
                clock.sleep_us(1)
        sources.append(source_of(folder))
    path = directory / "run.cbtop"
    writer = RecordingWriter(path, RecordingOrigin("here", BEGIN_NS, HELLO.realtime_ns), 1 << 30)
    for at_s in range(11):
        messages = []
        for (clock, profiler), source, count, start_s in zip(profilers, sources, steps, (2, 5), strict=True):
            if at_s < start_s:
                continue
            for _ in range(count if at_s == start_s else 0):
                with profiler.step("decode", tokens=1), profiler.brick("a", 8):
                    clock.sleep_us(100)
            source.poll()
            messages += [*source.snapshot()]
        writer.append(frame(FrameKind.KEYFRAME, at_s, HELLO, *messages))
    writer.close()
    return path, [source.key for source in sources]


@pytest.mark.parametrize(
    ("run_ids", "steps", "shown"),
    [
        ((IS_CHILD, IS_COMMAND), (50, 20), 1),
        ((IS_COMMAND, IS_CHILD), (20, 50), 0),
        (("", ""), (20, 50), 1),  # a recording of an older version
        (("", ""), (50, 20), 0),
        ((IS_CHILD, IS_CHILD), (20, 50), 1),  # the command is a shell or a launcher
    ],
)
def test_a_replay_opens_on_the_command_else_on_the_most_steps(
    tmp_path: Path,
    run_ids: tuple[str, str],
    steps: tuple[int, int],
    shown: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, keys = two_processes(tmp_path, run_ids, steps)
    opened: list[tuple[str, float]] = []

    def show(feed: ReplayFeed, *_: object) -> int:
        view = feed.view()
        assert view is not None
        assert view.has_data
        opened.append((view.key, feed.at_s))
        return 0

    monkeypatch.setattr(replay, "is_headless", lambda _: False)
    monkeypatch.setattr(replay, "show_on_screen", show)
    assert cbtop("replay", str(path)).returncode == 0
    assert opened == [(keys[shown], (2, 5)[shown])]
    with ReplayFeed(path) as feed:
        feed.seek(feed.duration_s)
        assert feed.sources()[0].key == keys[shown]
    with ReplayFeed(path, is_history=True) as history:
        history.seek(history.duration_s)
        assert [one.key for one in history.sources()] == sorted(keys, key=keys.index, reverse=True)


@pytest.mark.parametrize("run_id", ["", "x:", "12x,3:", "-4:", "99999999:", "٣:"])
def test_an_invalid_id_of_a_run_is_no_command(tmp_path: Path, run_id: str) -> None:
    path, _ = two_processes(tmp_path, (run_id, IS_COMMAND), (1, 1))
    with ReplayFeed(path) as feed:
        feed.seek(feed.duration_s)
        told = {record.hello.command_pid for record in feed.store.sources.values() if record.hello}
    assert told == {None, os.getpid()}
