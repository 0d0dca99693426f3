"""Tests of how often the screen changes. Charts change once a second. Numbers always show the current moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from cbtop.tui.app import CbtopApp
from cbtop.tui.views.brick_detail import detail_lines
from cbtop.tui.views.once_a_second import Pictures
from cbtop.tui.widgets.lines import plain
from cbtop.viewmodels.durations import DurationBar
from cbtop.viewmodels.on_demand import with_parts
from cbtop.viewmodels.source import SourceView
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed, screen_text

WIDTH, HEIGHT = 100, 40


def at(second: int | None, calls: int) -> SourceView:
    """Return a process. Its first brick has `calls` calls, and each of them took `calls` ns."""
    brick, *others = samples.LIVE.bricks
    bars = (DurationBar(0.001 * calls, 0.001 * calls + 0.001, calls),)
    return with_parts(samples.LIVE, bricks=(with_parts(brick, count=calls, durations=bars), *others), second=second)


def drawn(source: SourceView, pictures: Pictures) -> tuple[str, str]:
    """Return the heading of the histogram and its axis."""
    lines = [plain(line) for line in detail_lines(source.bricks[0], source, WIDTH, HEIGHT, pictures)]
    heading = next(at for at, line in enumerate(lines) if line.startswith(" durations"))
    axis = next(line for line in lines[heading:] if "╷" in line)
    return lines[heading], axis


def test_a_histogram_is_drawn_once_a_second_and_has_the_current_call_count() -> None:
    pictures = Pictures(lambda: 0.0)
    first, axis = drawn(at(7, 111), pictures)
    assert "111 calls, highest bar 111" in first
    again, its_axis = drawn(at(7, 222), pictures)
    assert "222 calls, highest bar 111" in again
    assert its_axis == axis
    later, its_axis = drawn(at(8, 222), pictures)
    assert "222 calls, highest bar 222" in later
    assert its_axis != axis


@pytest.mark.parametrize(
    "changed",
    [
        lambda source: replace(source, second=None),  # the screen is paused, or the process sends no more data
        lambda source: replace(source, window=samples.RECENT.window),
        lambda source: replace(source, phase="prefill"),
        lambda source: replace(source, key="another:1:1:0"),
    ],
)
def test_pictures_are_drawn_again_for_any_other_second_or_process(
    changed: Callable[[SourceView], SourceView],
) -> None:
    pictures = Pictures(lambda: 0.0)
    drawn(at(7, 111), pictures)
    assert "highest bar 222" in drawn(changed(at(7, 222)), pictures)[0]


def test_where_the_screen_goes_elsewhere_in_time_pictures_are_of_there() -> None:
    pictures = Pictures(lambda: 0.0)
    drawn(at(7, 111), pictures)
    pictures.let_go()
    assert "highest bar 222" in drawn(at(7, 222), pictures)[0]


def test_pictures_of_a_slow_replay_are_drawn_once_a_second_of_the_watcher() -> None:
    now_s = 100.0
    pictures = Pictures(lambda: now_s)
    drawn(at(7, 111), pictures)
    now_s += 0.9
    assert "highest bar 111" in drawn(at(7, 222), pictures)[0]
    now_s += 0.1
    assert "highest bar 222" in drawn(at(7, 222), pictures)[0]


@pytest.mark.slow
async def test_what_is_paused_has_pictures_of_the_same_moment_as_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbtop.tui.views.brick_detail.Pictures", partial(Pictures, lambda: 0.0))
    feed = ScriptedFeed(at(7, 111))
    app = CbtopApp(feed, interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await pilot.pause()
        assert "highest bar 111" in screen_text(app)
        feed.seen[0] = at(7, 222)
        app.tick()
        await pilot.pause()
        assert "222 calls, highest bar 111" in screen_text(app)
        await pilot.press("space")
        await pilot.pause()
        assert "222 calls, highest bar 222" in screen_text(app)
