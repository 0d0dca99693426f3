"""A replay shows what was true at its position, whichever way it came there, and says that it is one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.pilot import Pilot

from cbtop.client.replay import ReplayFeed
from cbtop.protocol.recording import FrameKind, RecordingReader
from cbtop.tui.replay_app import ReplayApp
from tests.cbtop.conftest import screen_text
from tests.cbtop.made_recordings import made_recording
from tests.integration.hosts import cbtop

SECONDS = 130


class Hand:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once, and only read."""
    directory = tmp_path_factory.mktemp("made")
    made_recording(directory, directory / "run.cbtop", SECONDS)
    return directory / "run.cbtop"


@pytest.fixture
def recording(made: Path, tmp_path: Path) -> Path:
    """One that may be written to."""
    return Path(shutil.copy(made, tmp_path))


@pytest.fixture
def feed(recording: Path) -> Iterator[ReplayFeed]:
    with ReplayFeed(recording, clock_s=Hand()) as opened:
        yield opened


def steps(feed: ReplayFeed) -> int:
    view = feed.view(None, "decode")
    return view.steps.count if view and view.steps and view.phase == "decode" else 0


@given(moves=st.lists(st.floats(-10, SECONDS + 10), max_size=5))
def test_wherever_it_comes_from_it_shows_what_was_true_then(moves: list[float], made: Path) -> None:
    with ReplayFeed(made, clock_s=Hand()) as feed:
        for to_s in moves:
            feed.seek(to_s)
            assert steps(feed) == int(2 * feed.at_s) == int(2 * min(max(to_s, 0), SECONDS))


def test_a_jump_touches_a_keyframe_and_the_frames_behind_it_and_no_others(feed: ReplayFeed) -> None:
    feed.touched = 0
    feed.seek(100)
    assert feed.touched <= 2 * (5 + 1) + 2  # two a second, for a keyframe's period and the warm-up


def test_it_plays_as_time_passes_and_stays_at_its_end(recording: Path) -> None:
    hand = Hand()
    with ReplayFeed(recording, speed=2, clock_s=hand) as feed:
        hand.now_s = 3
        feed.poll()
        assert (feed.at_s, steps(feed)) == (6, 12)
        feed.is_playing = False
        hand.now_s = 10
        feed.poll()
        assert feed.at_s == 6
        feed.is_playing = True
        hand.now_s = 10_000
        feed.poll()
        assert feed.at_s == feed.duration_s == SECONDS


def test_playing_on_past_a_keyframe_keeps_what_was_seen(feed: ReplayFeed) -> None:
    for at_s in range(0, 40, 5):
        feed.seek(at_s)
    view = feed.view()
    assert view is not None
    assert view.tokens_per_sec_history


def test_a_recording_that_was_not_closed_shows_the_same(runtime: Path, tmp_path: Path) -> None:
    made_recording(runtime, tmp_path / "run.cbtop", 20, close=False)
    with ReplayFeed(tmp_path / "run.cbtop", clock_s=Hand()) as feed:
        feed.seek(20)
        assert steps(feed) == 40
        assert not feed.replay().is_complete


def test_a_damaged_frame_is_told_and_the_next_keyframe_heals(recording: Path) -> None:
    reader = RecordingReader(recording)
    live = list(reader.frames(0, (FrameKind.LIVE,)))[3]
    data = bytearray(recording.read_bytes())
    data[live.offset + 40] ^= 255
    recording.write_bytes(data)
    with ReplayFeed(recording, clock_s=Hand()) as feed:
        feed.seek(9)
        assert "damaged messages: 1" in feed.status()
        assert steps(feed) == 18


# --- the screen ---------------------------------------------------------------------------------------------


async def press(pilot: Pilot[int], *keys: str) -> str:
    await pilot.press(*keys)
    await pilot.pause()
    app = pilot.app
    assert isinstance(app, ReplayApp)
    return screen_text(app)


@pytest.mark.parametrize(
    ("keys", "at_s"),
    [
        (("right",), 65),
        (("left",), 55),
        (("pagedown",), 120),
        (("shift+right", "right"), 125),
        (("pageup",), 0),
        (("shift+left",), 0),
        (("home",), 0),
        (("end",), SECONDS),
        (("5", "left"), 55),
        (("3", "end"), SECONDS),
    ],
)
async def test_every_key_that_moves_in_time_does(feed: ReplayFeed, keys: tuple[str, ...], at_s: int) -> None:
    feed.seek(60)
    async with ReplayApp(feed, interval_s=60).run_test(size=(120, 34)) as pilot:
        text = await press(pilot, *keys)
        assert (feed.at_s, steps(feed)) == (at_s, 2 * at_s)
        assert f"{at_s // 60}:{at_s % 60:02}/2:10" in text


async def test_it_is_labelled_with_its_date_and_space_holds_it(feed: ReplayFeed) -> None:
    async with ReplayApp(feed, interval_s=60).run_test(size=(120, 34)) as pilot:
        text = await press(pilot)
        assert "REPLAY" in text
        assert "LIVE" not in text
        assert "2023-11-1" in text
        assert "PAUSED" in await press(pilot, "space")
        assert not feed.is_playing
        assert "0:05/2:10" in await press(pilot, "right")
        assert "PAUSED" not in await press(pilot, "space")
        assert feed.is_playing


async def test_the_keys_are_in_the_footer_and_the_help_and_the_key_that_saves_is_not(feed: ReplayFeed) -> None:
    async with ReplayApp(feed, interval_s=60).run_test(size=(120, 120)) as pilot:
        assert "← back 5 s" in (await press(pilot)).splitlines()[-1]
        text = await press(pilot, "question_mark")
        assert "on 1 min" in text
        assert "to the beginning" in text
        assert "last minutes" not in text
        await press(pilot, "pagedown", "end", "left")
        assert feed.at_s == 0  # the help has these keys for itself


async def test_the_filter_keeps_its_arrows(feed: ReplayFeed) -> None:
    feed.seek(60)
    async with ReplayApp(feed, interval_s=60).run_test(size=(120, 34)) as pilot:
        await press(pilot, "2")
        await press(pilot, "slash", "b", "left", "a", "home")
        assert feed.at_s == 60
        await press(pilot, "escape", "left")
        assert feed.at_s == 55


# --- as text ------------------------------------------------------------------------------------------------


def test_headless_prints_the_end_or_the_moment_asked_for(recording: Path) -> None:
    done = cbtop("--headless", "--replay", str(recording))
    assert done.returncode == 0
    assert done.stdout.startswith("REPLAY of run.cbtop, recorded 2023-11-1")
    assert "at 2:10 of 2:10" in done.stdout
    done = cbtop("replay", str(recording), "--at", "30.2", "--format", "json")
    document = json.loads(done.stdout)
    assert document["replay"]["at_s"] == 30.2
    assert document["sources"][0]["steps"]["count"] == 60


@pytest.mark.parametrize(("window_s", "at_s"), [(20, 62.5), (10, 9.0), (30, 1000)])
def test_headless_prints_a_window_as_long_as_was_asked_for(recording: Path, window_s: int, at_s: float) -> None:
    done = cbtop("replay", str(recording), "--at", str(at_s), "--window", str(window_s), "--format", "json")
    (source,) = json.loads(done.stdout)["sources"]
    known_s = min(window_s, at_s)
    assert known_s <= source["window_covers_s"] <= known_s * 1.1 + 1
    assert source["steps"]["count"] == 2 * source["window_covers_s"]


def test_a_file_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.cbtop", tmp_path):
        done = cbtop("replay", str(path))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"cbtop: {path}")


def timeline_of(feed: ReplayFeed) -> list[tuple[int, str]]:
    """When each of its spans began, by that."""
    view = feed.view(None, "decode")
    if view is None or view.timeline is None:
        return []
    begin_ns = view.timeline.begin_ns
    return sorted(
        (begin_ns + span.start_ns, span.name)
        for lane in view.timeline.lanes
        for row in lane.rows
        for span in row.spans
    )


def test_records_are_decoded_only_where_they_are_followed(feed: ReplayFeed) -> None:
    feed.seek(60)
    touched = feed.touched
    assert timeline_of(feed) == []
    feed.follow_records(True)
    assert timeline_of(feed)
    assert feed.touched - touched <= 40  # of the last ten seconds and some
    feed.follow_records(False)
    assert timeline_of(feed) == []
    touched = feed.touched
    feed.seek(61)
    assert feed.touched - touched <= 3


@given(moves=st.lists(st.floats(1, SECONDS), min_size=1, max_size=4), late=st.booleans())
def test_a_timeline_ends_with_the_moment_however_it_was_come_to(made: Path, moves: list[float], late: bool) -> None:
    with ReplayFeed(made, clock_s=Hand()) as feed, ReplayFeed(made, clock_s=Hand()) as straight:
        straight.follow_records(True)
        if not late:
            feed.follow_records(True)
        for to_s in moves:
            feed.seek(to_s)
        feed.follow_records(True)
        straight.seek(moves[-1])
        shown, wanted = timeline_of(feed), timeline_of(straight)
        assert shown[-1:] == wanted[-1:]
        common = min(len(shown), len(wanted))
        assert shown[len(shown) - min(common, 8) :] == wanted[len(wanted) - min(common, 8) :]


def test_what_else_is_shown_stays_as_it_is_when_records_are_followed(feed: ReplayFeed) -> None:
    feed.seek(30)
    feed.seek(39)
    before = feed.view(None, "decode", window=True)
    feed.follow_records(True)
    after = feed.view(None, "decode", window=True)
    assert before is not None
    assert after is not None
    assert after.timeline is not None
    assert replace(after, timeline=None) == before
    steps_before = steps(feed)
    feed.seek(45)
    assert steps(feed) == steps_before + 12
    assert timeline_of(feed)[-1] != timeline_of(feed)[0]
