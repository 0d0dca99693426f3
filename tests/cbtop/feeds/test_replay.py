"""Tests of a replay: a position shows the same state, whether it was reached by playing or by a jump.

The screen labels the replay as a replay.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.pilot import Pilot

from cbtop.client import source_record, trend
from cbtop.client.recent import RecentRecords
from cbtop.commands import replay
from cbtop.feeds.playback import RECENT_NS
from cbtop.feeds.replay import ReplayFeed, baselines_in
from cbtop.protocol.recording import FrameKind, RecordingOrigin, RecordingReader, RecordingWriter
from cbtop.tui.replay_app import ReplayApp
from cbtop.tui.views.header import Notice
from cbtop.tui.widgets.curve import NO_CURVE
from cbtop.viewmodels.merge import KEYS_JOINED_BY
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.time_travel import Mark
from tests.cbtop.conftest import screen_text, toasts
from tests.cbtop.made_recordings import BEGIN_NS, keyframe, made_recording
from tests.cbtop.recorded import Clock, profiler_in, source_of
from tests.integration.hosts import cbtop
from tests.representatives import first_by_default

SECONDS = 130
IMPERFECT = Path(__file__).parents[1] / "imperfect.cbtop"


class Hand:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a recording that no test may change."""
    directory = tmp_path_factory.mktemp("made")
    made_recording(directory, directory / "run.cbtop", SECONDS)
    return directory / "run.cbtop"


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a recording with a message every 0.7 s, so that the borders of seconds and slices shift."""
    directory = tmp_path_factory.mktemp("uneven")
    made_recording(directory, directory / "run.cbtop", 60, each_s=0.7)
    return directory / "run.cbtop"


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a recording that is long enough that a jump does not read all of it."""
    directory = tmp_path_factory.mktemp("long")
    made_recording(directory, directory / "run.cbtop", 400)
    return directory / "run.cbtop"


@pytest.fixture
def recording(made: Path, tmp_path: Path) -> Path:
    """Return a copy of the recording, which the test may change."""
    return Path(shutil.copy(made, tmp_path))


@pytest.fixture
def feed(recording: Path) -> Iterator[ReplayFeed]:
    with ReplayFeed(recording, clock_s=Hand()) as opened:
        yield opened


def steps(feed: ReplayFeed) -> int:
    view = feed.view(None, "decode")
    return view.steps.count if view and view.steps and view.phase == "decode" else 0


@settings(max_examples=settings.default.max_examples // 4)
@given(moves=st.lists(st.floats(-10, SECONDS + 10), max_size=5))
def test_wherever_it_comes_from_it_shows_what_was_true_then(moves: list[float], made: Path) -> None:
    with ReplayFeed(made, clock_s=Hand()) as feed:
        for to_s in moves:
            feed.seek(to_s)
            assert steps(feed) == int(2 * feed.at_s) == int(2 * min(max(to_s, 0), SECONDS))


def known(feed: ReplayFeed) -> list[object]:
    """Return everything that the replay shows now: all data, and the data of the last seconds.

    This includes the view of each process and the view of merged processes.
    """
    views = [
        view
        for window in (False, True)
        for source in feed.sources()
        for view in (feed.view(source.key, window=window), feed.merged(MergeMode.SUM, source.key, window=window))
        if view
    ]
    listed = [row for view in views if view.listed for row in view.listed.rows()]
    return [*(replace(view, graph=tuple(view.graph), listed=None) for view in views), *listed]


def leaves(value: object, where: str = "") -> Iterator[tuple[str, object]]:
    """Yield each number, text or other single value inside `value`, with its path."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value) if each.compare}
    if isinstance(value, dict | list | tuple):
        for at, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, f"{where}/{at}")
    else:
        yield where, value


# `plays` plays from the start to each position. `jumps` jumps from one position to the next.
@settings(max_examples=settings.default.max_examples // 4)
@given(moves=st.lists(st.floats(0, 1), min_size=1, max_size=3), curve_s=st.integers(4, 9), window_s=st.floats(1, 4))
@pytest.mark.parametrize("of", ["imperfect", "uneven"])
def test_after_a_jump_it_shows_what_it_shows_when_all_before_was_played(
    of: str, uneven: Path, moves: list[float], curve_s: int, window_s: float
) -> None:
    path = IMPERFECT if of == "imperfect" else uneven
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(source_record, "HISTORY_S", curve_s)
        patched.setattr(trend, "SECONDS", curve_s)
        with ReplayFeed(path, window_s, clock_s=Hand()) as jumps, ReplayFeed(path, window_s, clock_s=Hand()) as plays:
            for share in moves:
                jumps.seek(share * jumps.duration_s)
            for at_s in range(int(jumps.at_s)):
                plays.seek(at_s)
            plays.seek(jumps.at_s)
            if (one := known(jumps)) != (other := known(plays)):
                pairs = zip(leaves(one), leaves(other), strict=True)
                assert [pair for pair in pairs if pair[0] != pair[1]] == []


@pytest.mark.slow
def test_a_jump_reads_as_far_back_as_the_curves_go_and_no_further(long: Path) -> None:
    with ReplayFeed(long, clock_s=Hand()) as feed:
        feed.playback.touched = 0
        feed.seek(300)
        assert (
            2 * source_record.HISTORY_S < feed.playback.touched < 2 * (1.1 * source_record.HISTORY_S + 15 + 5) + 2
        )  # two frames a second
        assert len(feed.view(None, "decode").tokens_per_sec_history) == source_record.HISTORY_S


@pytest.mark.slow
def test_steps_to_and_fro_read_a_few_seconds(long: Path) -> None:
    with ReplayFeed(long, clock_s=Hand()) as feed:
        feed.seek(300)
        for at_s in (299, 300, 295, 290, 286, 300):
            feed.playback.touched = 0
            feed.seek(at_s)
            assert (feed.at_s, steps(feed)) == (at_s, 2 * at_s)
            assert feed.playback.touched <= 2 * 15


def test_the_way_to_a_moment_can_be_gone_bit_by_bit(made: Path) -> None:
    hand = Hand()

    def clock() -> float:
        hand.now_s += 0.01
        return hand.now_s

    with ReplayFeed(made, clock_s=clock) as feed:
        feed.is_playing = False
        feed.aim(60)
        shares = []
        while not feed.advance(0.05):
            shares.append(feed.on_its_way)
            feed.poll()
            assert feed.at_s == 60  # During the jump, the target is already shown as the position.
        assert len(shares) > 10
        assert shares == sorted(shares)
        assert all(share is not None and 0 < share <= 1 for share in shares)
        assert (feed.on_its_way, steps(feed)) == (None, 120)


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


@pytest.mark.slow
def test_last_steps_before_an_end_appear_whether_seek_or_timeline_was_first(runtime: Path, tmp_path: Path) -> None:
    made_recording(runtime, tmp_path / "run.cbtop", 20, ends=True, ended_s=60)
    found = []
    for is_open_first in (False, True):
        with ReplayFeed(tmp_path / "run.cbtop", clock_s=Hand()) as feed:
            if is_open_first:
                feed.follow_records(True)
            # The jump to 75 has read this part of the recording. The jump to 70 uses it again.
            for to_s in (75, 40, 70):
                feed.seek(to_s)
            feed.follow_records(True)
            view = feed.view()
            assert view is not None
            assert view.timeline is not None
            found.append((view.timeline.newest_s, view.timeline.newest.name if view.timeline.newest else ""))
            assert view.timeline.missing == 0
            # The timeline has two steps a second. The first step may be cut off.
            assert view.timeline.steps > 2 * RECENT_NS / 1e9 - 2
    assert found[0] == found[1]


@pytest.mark.slow
def test_of_each_that_ended_the_records_before_its_end_are_read(runtime: Path, tmp_path: Path) -> None:
    made_recording(runtime, tmp_path / "run.cbtop", 20, ends=True, ended_s=260)
    with ReplayFeed(tmp_path / "run.cbtop", clock_s=Hand()) as feed:
        feed.seek(75)
        (known,) = feed.store.sources.values()
        for number, end_s in enumerate((5, 8, 12, 40, 74)):  # Add other sources that have no records.
            other = replace(known, key=f"{number}", window=deepcopy(known.window), recent=RecentRecords())
            other.window.now_ns = BEGIN_NS + end_s * 1_000_000_000
            feed.store.sources[other.key] = other
        feed.follow_records(True)
        assert known.recent.missing == 0
        assert [key for key, one in feed.store.sources.items() if len(one.recent)] == [known.key]
        feed.follow_records(False)
        feed.seek(20 + (feed.playback.reach_ns // 1_000_000_000) + 15)
        feed.playback.touched = 0
        feed.follow_records(True)
        assert feed.playback.touched == 0  # These sources end too early for this jump, so the jump reads nothing.


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


# Keys that a replay at 1:00 receives, and the position in seconds that is expected afterwards.
MOVES: list[tuple[tuple[str, ...], float]] = [
    (("right",), 65),
    (("left",), 55),
    (("pagedown",), 120),
    (("shift+right", "right"), 125),
    (("pageup",), 0),
    (("shift+left",), 0),
    (("home",), 0),
    (("end",), SECONDS),
    (("left_square_bracket",), 59.5),  # A step ends every 0.5 s. This key goes back to the end of the previous step.
    (("right_square_bracket", "right_square_bracket"), 61),
    (("left_curly_bracket",), 55),
    (("right_curly_bracket", "3", "right_square_bracket"), 65.5),
    (("left_parenthesis",), 50),
    (("right_parenthesis", "3", "right_square_bracket"), 70.5),
    (("5", "left"), 55),
    (("3", "end"), SECONDS),
]


@first_by_default("moves", [MOVES[::3], MOVES], ids=len)
async def test_every_key_that_moves_in_time_does(
    feed: ReplayFeed, moves: list[tuple[tuple[str, ...], float]]
) -> None:
    async with ReplayApp(feed, interval_s=60).run_test(size=(120, 34)) as pilot:
        for keys, at_s in moves:
            feed.seek(60)
            text = await press(pilot, "1", *keys)
            assert (keys, feed.at_s, steps(feed)) == (keys, at_s, 2 * at_s)
            assert f"{int(at_s) // 60}:{int(at_s) % 60:02}/2:10" in text


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


@pytest.mark.slow
async def test_the_footer_and_the_help_list_the_keys_except_the_key_that_saves(feed: ReplayFeed) -> None:
    async with ReplayApp(feed, interval_s=60).run_test(size=(120, 120)) as pilot:
        assert "← back 5 s" in (await press(pilot)).splitlines()[-1]
        text = await press(pilot, "question_mark")
        assert "on 1 min" in text
        assert "to the beginning" in text
        assert "last minutes" not in text
        await press(pilot, "pagedown", "end", "left")
        assert feed.at_s == 0  # While the help is open, these keys scroll it, so the replay does not move.


@pytest.mark.slow
async def test_the_time_bar_says_where_it_is_and_a_click_goes_there(feed: ReplayFeed) -> None:
    def bar(text: str) -> str:
        return text.splitlines()[-2]

    feed.seek(65)
    feed.is_playing = False
    async with ReplayApp(feed, interval_s=60).run_test(size=(100, 34)) as pilot:
        line = bar(await press(pilot))
        assert (line[:6], line[-5:]) == (" 1:05 ", " 2:10")
        inner = line[6:-5]
        assert inner == "━" * 44 + "●" + "─" * 43  # The time bar shows the position in its middle and has no marks.
        await pilot.click("#time", offset=(6, 0))
        await pilot.pause()
        assert feed.at_s == 0
        await pilot.click("#time", offset=(6 + 87, 0))
        await pilot.pause()
        assert feed.at_s == SECONDS
        await pilot.click("#time", offset=(99, 0))  # This click is next to the time bar, so nothing happens.
        assert feed.at_s == SECONDS


async def test_the_time_bar_marks_where_a_process_stalled_as_far_as_was_read() -> None:
    with ReplayFeed(IMPERFECT, clock_s=Hand()) as feed:
        feed.seek(10)
        assert Mark.STALLED not in feed.marks.values()
        feed.seek(24)
        stalled = [second for second, mark in feed.marks.items() if mark is Mark.STALLED]
        assert stalled == list(range(stalled[0], stalled[-1] + 1))
        # The process stalls for 6 s. A stall is recognised after 2 s, so 3 to 5 seconds are marked.
        assert 3 <= len(stalled) <= 5
        feed.is_playing = False
        async with ReplayApp(feed, interval_s=60).run_test(size=(100, 34)) as pilot:
            line = (await press(pilot)).splitlines()[-2]
            assert "✗ stalled" in line
            assert line.index("✗") / 100 == pytest.approx(stalled[0] / 24, abs=0.1)


def test_the_time_bar_marks_where_a_process_ended_that_was_seen_to_run(runtime: Path, tmp_path: Path) -> None:
    made_recording(runtime, tmp_path / "run.cbtop", 20, ends=True)
    with ReplayFeed(tmp_path / "run.cbtop", clock_s=Hand()) as feed:
        feed.seek(20)
        assert feed.marks == {20: Mark.ENDED}


@pytest.mark.slow
async def test_after_a_jump_a_long_ended_process_has_its_figures_and_a_reason(runtime: Path, tmp_path: Path) -> None:
    made_recording(runtime, tmp_path / "run.cbtop", 20, ends=True, ended_s=260)
    for way in (range(200), ()):
        with ReplayFeed(tmp_path / "run.cbtop", clock_s=Hand()) as feed:
            for at_s in way:
                feed.seek(at_s)
            feed.seek(200)
            feed.is_playing = False
            assert steps(feed) == 40
            async with ReplayApp(feed, interval_s=60).run_test(size=(120, 34)) as pilot:
                assert (NO_CURVE in await press(pilot)) is (not way)
                text = " ".join((await press(pilot, "4")).split())
                assert "of a recording its last ones are read where it ended less than two minutes before" in text


@pytest.mark.slow
async def test_the_filter_keeps_its_arrows(feed: ReplayFeed) -> None:
    feed.seek(60)
    async with ReplayApp(feed, interval_s=60).run_test(size=(120, 34)) as pilot:
        await press(pilot, "2")
        await press(pilot, "slash", "b", "left", "a", "home")
        assert feed.at_s == 60
        await press(pilot, "escape", "left")
        assert feed.at_s == 55


@pytest.mark.slow
async def test_a_bracket_goes_one_step_end_on_or_back_and_a_replay_stays_there() -> None:
    with ReplayFeed(IMPERFECT, clock_s=Hand()) as feed:
        # In this recording, the last step before the pause ends before 8 s, and the next step ends after 13 s.
        feed.seek(12.0)

        def ended() -> int:
            view = feed.view()
            assert view is not None
            return sum(phase.count for phase in view.phases)

        async with ReplayApp(feed, interval_s=60).run_test(size=(120, 34)) as pilot:
            stuck, counts = ended(), list[int]()
            for _ in range(3):
                await press(pilot, "left_square_bracket")
                counts.append(ended())
            assert stuck > counts[0] > counts[1] > counts[2]
            assert "PAUSED" in screen_text(pilot.app)  # type: ignore[arg-type]
            for count in (counts[1], counts[0], stuck):
                await press(pilot, "right_square_bracket")
                assert ended() == count
            await press(pilot, "right_square_bracket")
            assert ended() > stuck
            assert feed.at_s > 13
            before_s = feed.at_s
            await press(pilot, "right_curly_bracket", "left_curly_bracket")
            assert feed.at_s == before_s


def test_steps_are_found_of_who_began_after_what_is_looked_back_in_did(runtime: Path, tmp_path: Path) -> None:
    made_recording(runtime, tmp_path / "run.cbtop", 20, begins_s=10)
    with ReplayFeed(tmp_path / "run.cbtop", clock_s=Hand()) as feed:
        feed.seek(30)
        (key,) = (one.key for one in feed.sources())
    for asked in (key, f"another{KEYS_JOINED_BY}{key}", None, "another"):
        # At the beginning of the replay, no process is known yet.
        with ReplayFeed(tmp_path / "run.cbtop", clock_s=Hand()) as feed:
            assert feed.search.steps_away(30, -1, asked) == (29.5, 1)
            assert feed.search.steps_away(20, 3, asked) == (21.5, 3)


@pytest.mark.slow
async def test_where_no_step_ends_it_goes_by_seconds_and_says_so_once() -> None:
    with ReplayFeed(IMPERFECT, clock_s=Hand()) as feed:
        async with ReplayApp(feed, interval_s=60).run_test(size=(120, 34), notifications=True) as pilot:
            await press(pilot, "end", *["right_square_bracket"] * 2)
            assert feed.at_s == feed.duration_s
            said = toasts(pilot.app)
            assert said == ["time\nno step of it ended in the minutes after: it goes by seconds"]
            feed.seek(0.01)
            await press(pilot, "left_curly_bracket")
            assert feed.at_s == 0


@pytest.mark.slow
async def test_a_long_way_is_gone_while_the_screen_answers_and_its_share_is_shown(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = Hand()

    def clock() -> float:
        hand.now_s += 0.01
        return hand.now_s

    told: list[float | None] = []
    monkeypatch.setattr(Notice, "show_progress", lambda _notice, _what, done=None: told.append(done))
    with ReplayFeed(recording, clock_s=clock) as feed:
        feed.is_playing = False
        async with ReplayApp(feed, interval_s=60).run_test(size=(120, 34)) as pilot:
            app = pilot.app
            assert isinstance(app, ReplayApp)
            app.action_seek_to(1)
            assert (feed.on_its_way, told) != (None, [])
            app.action_seek(-5)  # The new target is near, so the replay plays to it instead of jumping.
            app.tick()
            assert "0:00/2:10" in screen_text(app)
            while feed.on_its_way is not None:
                await pilot.pause(0.01)
            await pilot.pause()
            assert steps(feed) == 2 * (SECONDS - 5)
            assert "2:05/2:10" in screen_text(app)
        shares = [done for done in told if done is not None]
        assert len(shares) > 5
        # The first share of progress, `shares[0]`, still belongs to the jump to the end of the recording.
        assert shares[1:] == sorted(shares[1:])
        assert told[-1] is None


# --- as text ------------------------------------------------------------------------------------------------


def test_headless_prints_the_end_or_the_moment_asked_for(recording: Path) -> None:
    done = cbtop("--headless", "--replay", str(recording))
    assert done.returncode == 0
    assert done.stdout.startswith("REPLAY of run.cbtop, recorded 2023-11-1")
    assert "at 2:10 of 2:10" in done.stdout
    done = cbtop("replay", str(recording), "--once", "--at", "30.2", "--format", "json")
    document = json.loads(done.stdout)
    assert document["replay"]["at_s"] == 30.2
    assert document["sources"][0]["steps"]["count"] == 60


@first_by_default(("window_s", "at_s"), [(20, 62.5), (10, 9.0), (30, 1000)])
def test_headless_prints_a_window_as_long_as_was_asked_for(recording: Path, window_s: int, at_s: float) -> None:
    done = cbtop("replay", str(recording), "--at", str(at_s), "--window", str(window_s), "--format", "json")
    (source,) = json.loads(done.stdout)["sources"]
    known_s = min(window_s, at_s)
    assert known_s <= source["window_covers_s"] <= known_s * 1.1 + 1
    assert source["steps"]["count"] == 2 * source["window_covers_s"]


@pytest.mark.parametrize("begins_s", [0, 7])
def test_the_first_moment_with_data_is_where_a_screen_opens(
    runtime: Path, tmp_path: Path, begins_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_recording(runtime, tmp_path / "run.cbtop", 10, begins_s=begins_s)
    opened: list[tuple[float, bool]] = []

    def show(feed: ReplayFeed, *_: object) -> int:
        view = feed.view()
        opened.append((feed.at_s, view is not None and view.has_data))
        return 0

    monkeypatch.setattr(replay, "is_headless", lambda _: False)
    monkeypatch.setattr(replay, "show_on_screen", show)
    assert cbtop("replay", str(tmp_path / "run.cbtop")).returncode == 0
    assert cbtop("replay", str(tmp_path / "run.cbtop"), "--at", "0").returncode == 0
    assert opened == [(begins_s, True), (0, begins_s == 0)]


def test_a_selected_process_says_where_its_data_begin(tmp_path: Path, runtime: Path) -> None:
    made_recording(runtime, tmp_path / "run.cbtop", 10, begins_s=3)
    for selected, begins_s in (((), 3), (("99",), 0)):
        with ReplayFeed(tmp_path / "run.cbtop", selected=selected) as feed:
            assert feed.search.first_data_s() == begins_s


@pytest.mark.parametrize("holds_data", [False, True])
def test_headless_names_another_moment_only_where_one_would_do(
    runtime: Path, tmp_path: Path, holds_data: bool
) -> None:
    profiler, path = profiler_in(runtime, Clock()), tmp_path / "run.cbtop"
    writer = RecordingWriter(path, RecordingOrigin("here", BEGIN_NS, 1), 1 << 30)
    with profiler.step("decode"):
        source = source_of(runtime)
        writer.append(keyframe(source, 0))
        writer.append(keyframe(source, 5))
    if holds_data:
        source.poll()
        writer.append(keyframe(source, 6))
    writer.close()
    for more in (["--at", "5"], ["--at", "5", "--source", "77"]):
        done = cbtop("replay", str(path), "--headless", *more)
        assert (done.returncode, done.stdout) == (3, "")
        assert ("holds no data: it ends before any process had recorded anything" in done.stderr) is not holds_data
        assert ("has recorded anything by then; try another --at" in done.stderr) is holds_data


def test_a_file_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none.cbtop", tmp_path):
        done = cbtop("replay", str(path))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"cbtop: {path}")


# --- a baseline ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_recording_is_a_baseline_as_a_whole_or_with_its_last_seconds(recording: Path) -> None:
    (whole,) = baselines_in(recording)
    decode = whole.of("decode")
    assert decode is not None
    assert decode.times is not None
    assert (whole.covers_s, decode.steps) == (pytest.approx(SECONDS, rel=0.11), pytest.approx(2 * whole.covers_s))
    assert decode.times.step_us.mean == 100
    assert whole.surroundings.host
    (last,) = baselines_in(recording, 20.0)
    assert last.covers_s == pytest.approx(20, abs=4)
    assert last.end_ns == pytest.approx(whole.end_ns, abs=15e9)


@pytest.mark.slow
def test_what_is_marked_after_a_jump_is_the_window_before_it(feed: ReplayFeed) -> None:
    feed.seek(100.0)
    view = feed.view()
    assert view is not None
    assert feed.mark_baseline(view.key)
    assert feed.at_s == 100.0
    (base,) = feed.baselines
    assert base.covers_s == pytest.approx(10, abs=1.1)
    feed.seek(20.0)
    view = feed.view(None, "decode")
    assert view is not None
    assert view.baseline is not None
    assert (view.baseline.why_not, view.baseline.slower) == ("", [])
    feed.seek(100.0)
    view = feed.view(None, "decode")
    assert view is not None
    assert view.baseline is not None
    assert view.baseline.why_not == "these seconds are the baseline's own"


@pytest.mark.slow
def test_headless_compares_all_of_a_recording_with_all_of_another(recording: Path, tmp_path: Path) -> None:
    other = tmp_path / "host"
    other.mkdir()
    made_recording(other, tmp_path / "base.cbtop", 30)
    done = cbtop("replay", str(recording), "--baseline", str(tmp_path / "base.cbtop"), "--format", "json")
    assert done.returncode == 0, done.stderr
    (source,) = json.loads(done.stdout)["sources"]
    assert source["baseline"]["not_comparable"] is None
    assert source["baseline"]["now_covers_s"] > 100
    assert source["window_s"] is None
    changes = {(one["brick"], one["layer"]): one for one in source["baseline"]["changes"]}
    # The comparison reads the typical time of a call from a histogram, so it is exact to one bucket.
    assert changes["a", None]["now"] == changes["a", None]["before"] == pytest.approx(100, rel=0.01)


def test_a_baseline_that_is_none_is_a_usage_error(recording: Path, tmp_path: Path) -> None:
    (tmp_path / "none").write_text("none")
    made_recording(tmp_path, tmp_path / "short.cbtop", 3)
    for name, why in (
        ("missing", "missing"),
        ("none", "is not a recording"),
        ("short.cbtop", "5 or more of its seconds"),
    ):
        done = cbtop("replay", str(recording), "--baseline", str(tmp_path / name))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("cbtop: --baseline")
        assert why in done.stderr
