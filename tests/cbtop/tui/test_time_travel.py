"""Tests of looking back in a live view and of ranges: keys, time bar and header."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from textual.pilot import Pilot

from cbtop.errors import CbtopError
from cbtop.feeds.replay import ReplayFeed
from cbtop.reports.text import text_report
from cbtop.text import ascii_signs, time_text
from cbtop.tui.app import CbtopApp
from cbtop.tui.replay_app import ReplayApp
from cbtop.tui.time_travel import TimeTravel
from cbtop.tui.views.timeline_map import HELD
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.time_travel import Mark, TimeView
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed, screen_text, toasts
from tests.cbtop.feeds.test_replay import IMPERFECT, Hand
from tests.integration.hosts import DEADLINE_S
from tests.representatives import first_by_default

SIZE = (120, 34)


class Opened(ReplayFeed):
    """A replay feed that checks that it is closed only once."""

    is_closed = False

    def close(self) -> None:
        if not self.is_closed:
            super().close()
        self.is_closed = True


class Memory:
    """The stored history of a daemon. A call returns a recording that ends now, or the reason why there is none."""

    def __init__(self, why_not: str = "") -> None:
        self.opened: list[Opened] = []
        self.asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._why_not = why_not

    def __call__(self) -> Callable[[], ReplayFeed]:
        self.asked += 1
        return self._open

    def _open(self) -> ReplayFeed:
        self.may_answer.wait(DEADLINE_S)
        if self._why_not:
            raise CbtopError(self._why_not)
        self.opened.append(Opened(IMPERFECT, clock_s=Hand(), is_history=True))
        return self.opened[-1]

    @property
    def feed(self) -> ReplayFeed:
        return self.opened[-1]


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.may_answer.set()
    for feed in made.opened:
        feed.close()


@pytest.fixture(autouse=True)
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    """Replace the clock that measures how long the screen has been paused. Returns the fake clock."""
    made = Hand()
    monkeypatch.setattr("cbtop.tui.app.TimeTravel", partial(TimeTravel, clock_s=made))
    return made


def live_app(feed: ScriptedFeed, memory: Memory) -> CbtopApp:
    return CbtopApp(feed, section="bricks", interval_s=60, look_back=memory)


async def press(pilot: Pilot[int], *keys: str) -> str:
    """Press the keys and wait for all of their effects, including those in threads.

    Returns the text of the screen.
    """
    for key in (*keys, None):
        await pilot.press(*([key] if key else []))
        await pilot.app.workers.wait_for_complete()
        await pilot.pause()
    assert isinstance(pilot.app, CbtopApp)
    return screen_text(pilot.app)


def told(pilot: Pilot[int]) -> str:
    return toasts(pilot.app)[-1]


def shown(pilot: Pilot[int]) -> SourceView:
    assert isinstance(pilot.app, CbtopApp)
    assert pilot.app.source is not None
    return pilot.app.source


def ended(feed: ReplayFeed) -> int:
    """Return how many steps of the first process had ended at the shown moment."""
    view = feed.view()
    assert view is not None
    return sum(phase.count for phase in view.phases)


# --- looking back while live --------------------------------------------------------------------------------


async def test_brackets_look_back_from_the_held_moment_and_space_returns_to_now(
    feed: ScriptedFeed, memory: Memory
) -> None:
    async with live_app(feed, memory).run_test(size=SIZE) as pilot:
        assert "PAUSED" in await press(pilot, "space")
        assert memory.asked == 0
        text = await press(pilot, "left_square_bracket")
        assert "◂ PAST" in text
        assert "PAUSED" not in text
        duration_s, one_back = memory.feed.duration_s, ended(memory.feed)
        assert duration_s - 1 < memory.feed.at_s < duration_s
        await press(pilot, "right_square_bracket")
        assert ended(memory.feed) > one_back
        await press(pilot, "left_curly_bracket")
        assert duration_s - 5 < memory.feed.at_s < duration_s - 1
        await press(pilot, "right_curly_bracket", "left_square_bracket")
        assert ended(memory.feed) == one_back
        assert shown(pilot).program == memory.feed.sources()[0].label.partition(",")[0]
        polls = feed.polls
        pilot.app.tick()  # type: ignore[attr-defined]
        assert feed.polls == polls + 1  # The app still reads new data while it shows a past moment.
        text = await press(pilot, "space")
        assert "LIVE" in text
        assert shown(pilot).program == samples.LIVE.program
        assert memory.asked == 1


@pytest.mark.slow
async def test_a_bracket_or_v_holds_what_is_live_and_end_goes_back(feed: ScriptedFeed, memory: Memory) -> None:
    async with live_app(feed, memory).run_test(size=SIZE) as pilot:
        assert "◂ PAST" in await press(pilot, "left_parenthesis")
        assert memory.feed.at_s == pytest.approx(memory.feed.duration_s - 10)
        assert "LIVE" in await press(pilot, "end")
        assert "◂ PAST" in await press(pilot, "v")
        assert memory.feed.at_s == memory.feed.duration_s
        assert memory.asked == 2
        assert "LIVE" in await press(pilot, "space")


@pytest.mark.slow
async def test_time_that_is_held_is_counted(feed: ScriptedFeed, memory: Memory, hand: Hand) -> None:
    async with live_app(feed, memory).run_test(size=SIZE) as pilot:
        await press(pilot, "space")
        hand.now_s = 7
        await press(pilot, "left_parenthesis")
        assert memory.feed.at_s == pytest.approx(memory.feed.duration_s - 17)


@pytest.mark.slow
async def test_keys_while_the_daemon_is_asked_add_up_and_space_asks_no_more(
    feed: ScriptedFeed, memory: Memory
) -> None:
    memory.may_answer.clear()
    async with live_app(feed, memory).run_test(size=SIZE) as pilot:
        await pilot.press("left_parenthesis", "left_parenthesis", "right_square_bracket")
        await pilot.pause()
        assert "asking the daemon what it remembers" in screen_text(pilot.app)  # type: ignore[arg-type]
        memory.may_answer.set()
        await press(pilot)
        assert memory.feed.duration_s - 20 < memory.feed.at_s < memory.feed.duration_s - 19
        await press(pilot, "space")
        memory.may_answer.clear()
        await pilot.press("left_square_bracket", "space")
        memory.may_answer.set()
        text = await press(pilot)
        assert "LIVE" in text
        assert "asking" not in text
        assert memory.asked == 2


@first_by_default(
    "why", ["the daemon at ipc:///x keeps no history", "… did not answer: it is gone, or older than this cbtop"]
)
async def test_a_missing_memory_is_explained_in_one_line_and_the_screen_stays_held(
    why: str, feed: ScriptedFeed
) -> None:
    async with live_app(feed, Memory(why)).run_test(size=SIZE, notifications=True) as pilot:
        text = await press(pilot, "left_square_bracket")
        assert told(pilot) == f"time\n{why}"
        assert "PAUSED" in text
        assert "asking" not in text
        assert "LIVE" in await press(pilot, "space")


@pytest.mark.slow
async def test_the_phase_the_view_and_the_timeline_are_those_of_then(feed: ScriptedFeed, memory: Memory) -> None:
    async with live_app(feed, memory).run_test(size=SIZE) as pilot:
        await press(pilot, "left_parenthesis")
        for number in range(1, 9):
            assert "◂ PAST" in await press(pilot, str(number))
        await press(pilot, "4")
        assert shown(pilot).timeline is not None
        await press(pilot, "greater_than_sign", "r", "p", "m", "b", "B")
        assert "LIVE" in await press(pilot, "space")


@pytest.mark.slow
async def test_a_timeline_that_was_held_of_then_is_not_shown_of_now(feed: ScriptedFeed, memory: Memory) -> None:
    async with live_app(feed, memory).run_test(size=SIZE) as pilot:
        await press(pilot, "left_parenthesis", "4")
        assert HELD in await press(pilot, "z")
        feed.seen = [shown(pilot).held()]  # The live feed now has the process that was paused.
        assert HELD not in await press(pilot, "space")


async def test_a_held_screen_has_a_bar_of_the_last_minutes_with_a_sign_per_mark(
    feed: ScriptedFeed, memory: Memory
) -> None:
    feed.time = TimeView(200.0, 200.0, {40 * at: mark for at, mark in enumerate(Mark)}, is_now=True)
    async with live_app(feed, memory).run_test(size=(160, 34)) as pilot:
        assert "3:20" not in await press(pilot)
        line = (await press(pilot, "space")).splitlines()[-2]
        bar = line[6:].partition(" 3:20 ")[0]
        assert len({sign.encode("ascii", ascii_signs.ERRORS) for sign in "✗▲■▸│●═"}) == 7
        assert [sign for sign in bar if sign in "✗▲■▸│"] == ["│", "▸", "■", "▲", "✗"]
        for word in ("stalled", "verdict", "ended", "started", "phase", "[ looks back"):
            assert word in line
        assert "✗" not in (await press(pilot, "space")).splitlines()[-2]
    feed.time = None
    async with live_app(feed, memory).run_test(size=SIZE) as pilot:
        before = await press(pilot)
        assert len((await press(pilot, "space")).splitlines()) == len(before.splitlines())


@pytest.mark.slow
async def test_where_the_process_shown_was_not_there_then_that_is_said_once(
    feed: ScriptedFeed, memory: Memory
) -> None:
    async with live_app(feed, memory).run_test(size=SIZE, notifications=True) as pilot:
        await press(pilot, "left_square_bracket", "left_square_bracket", "2", "3")
        said = toasts(pilot.app)
        assert said == ["time\nthe process that is shown now was not there then: another is"]


@pytest.mark.slow
async def test_a_report_made_in_a_look_back_says_so(feed: ScriptedFeed, memory: Memory) -> None:
    async with live_app(feed, memory).run_test(size=SIZE) as pilot:
        await press(pilot, "left_parenthesis")
        text = text_report([shown(pilot)], ["bricks"], memory.feed.replay())
        at = time_text.date(memory.feed.replay().recorded_s + memory.feed.at_s)
        assert text.startswith(f"LOOKING BACK on vm at {at}, 10.0 s before the daemon was asked")


# --- ranges -------------------------------------------------------------------------------------------------


async def test_v_begins_a_range_moving_extends_it_v_shows_it_and_escape_leaves_it(
    feed: ScriptedFeed, memory: Memory
) -> None:
    async with live_app(feed, memory).run_test(size=SIZE) as pilot:
        await press(pilot, "left_parenthesis")
        begins_s = memory.feed.at_s
        text = await press(pilot, "v", "left_curly_bracket")
        assert "═" in text.splitlines()[-2]
        assert memory.feed.range_s is None
        await press(pilot, "v")
        assert memory.feed.range_s is not None
        assert begins_s - 8 < memory.feed.range_s[0] < begins_s - 1
        assert memory.feed.range_s[1] == begins_s
        source = shown(pilot)
        assert source.window is not None
        assert source.window.range_s is not None
        for number in range(1, 9):
            text = await press(pilot, str(number))
            assert f", {source.steps.count} steps" in text.splitlines()[0]  # type: ignore[union-attr]
            assert "═" in text.splitlines()[-2]
        text = await press(pilot, "2", "escape")
        assert memory.feed.range_s is None
        assert "═" not in text.splitlines()[-2]
        assert memory.feed.at_s == begins_s


@pytest.mark.slow
async def test_v_while_live_begins_a_range_at_the_moment_that_is_held(feed: ScriptedFeed, memory: Memory) -> None:
    async with live_app(feed, memory).run_test(size=SIZE) as pilot:
        await press(pilot, "v")
        await press(pilot, "left_parenthesis", "v")
        duration_s = memory.feed.duration_s
        assert memory.feed.range_s == pytest.approx((duration_s - 10, duration_s))


@pytest.mark.slow
async def test_a_range_wants_two_moments_and_moving_leaves_one_that_is_shown(
    feed: ScriptedFeed, memory: Memory
) -> None:
    async with live_app(feed, memory).run_test(size=SIZE, notifications=True) as pilot:
        await press(pilot, "left_parenthesis", "v", "v")
        assert "it begins here" in told(pilot)
        await press(pilot, "escape", "v", "left_square_bracket", "v")
        assert memory.feed.range_s is not None
        await press(pilot, "left_square_bracket")
        assert memory.feed.range_s is None


@pytest.mark.slow
async def test_w_writes_the_range_and_the_file_opens_as_it(
    feed: ScriptedFeed, memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with live_app(feed, memory).run_test(size=SIZE, notifications=True) as pilot:
        await press(pilot, "left_parenthesis", "v", "right_square_bracket", "right_square_bracket", "v")
        before = shown(pilot)
        await press(pilot, "w")
        (path,) = tmp_path.glob("*.cbtop")
        assert str(path) in told(pilot)
    with ReplayFeed(path, clock_s=Hand()) as again:
        async with ReplayApp(again, interval_s=60, section="bricks").run_test(size=SIZE, notifications=True) as pilot:
            text = await press(pilot)
            view = shown(pilot)
            assert (view.steps, view.bricks) == (before.steps, before.bricks)
            assert "REPLAY" in text
            assert f", {before.steps.count} steps" in text.splitlines()[0]  # type: ignore[union-attr]
            await press(pilot, "escape")
            assert again.range_s is None


@pytest.mark.slow
async def test_w_in_a_replay_says_how_to_choose_a_range_and_space_plays_on_from_it() -> None:
    with ReplayFeed(IMPERFECT, clock_s=Hand()) as replay:
        async with ReplayApp(replay, interval_s=60).run_test(size=SIZE, notifications=True) as pilot:
            await press(pilot, "w")
            assert "v chooses a range" in told(pilot)
            await press(pilot, "space", "right_parenthesis", "v", "right", "v")
            assert replay.range_s == (10, 15)
            assert "PAUSED" not in await press(pilot, "space")
            assert (replay.range_s, replay.is_playing, replay.at_s) == (None, True, 15)


@pytest.mark.slow
async def test_the_filter_keeps_its_v_its_brackets_and_its_escape(feed: ScriptedFeed, memory: Memory) -> None:
    async with live_app(feed, memory).run_test(size=SIZE) as pilot:
        await press(pilot, "left_parenthesis", "v", "slash", "v", "left_square_bracket")
        assert memory.feed.at_s == pytest.approx(memory.feed.duration_s - 10)
        await press(pilot, "escape", "left_square_bracket")
        # The start of the range was marked before. The mark is still there, because the filter got the keys in
        # between.
        assert "═" in await press(pilot)
        assert "═" not in await press(pilot, "escape")
