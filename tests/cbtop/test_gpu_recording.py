"""Tests of every view and report with h100.cbtop, a recording of h100.py on an H100."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cbtop.feeds.replay import ReplayFeed
from cbtop.feeds.run_reader import runs_in
from cbtop.reports import DEVICES, REPORTS
from cbtop.reports.text import SECTIONS
from cbtop.tui.app import CbtopApp
from cbtop.tui.views import VIEWS
from cbtop.viewmodels.source import SourceView
from tests.cbtop.conftest import screen_text

RECORDED = Path(__file__).with_name("h100.cbtop")
DECODE_S = 20.0  # position in the recording at which the server has loaded its model and serves requests


pytestmark = pytest.mark.usefixtures("utc")


@pytest.fixture
def feed(known_cost: None) -> Iterator[ReplayFeed]:
    with ReplayFeed(RECORDED) as feed:
        feed.is_playing = False
        feed.seek(DECODE_S)
        yield feed


@pytest.fixture
def view(feed: ReplayFeed) -> SourceView:
    found = feed.view(None, "decode")
    assert found is not None
    return found


async def test_each_view_shows_it_as_agreed(feed: ReplayFeed, golden: Callable[[str, str], None]) -> None:
    app = CbtopApp(feed, interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        for number, view in enumerate(VIEWS, 1):
            await pilot.press(str(number))
            await pilot.pause()
            golden(f"h100-{view.title.lower()}", screen_text(app))


def test_its_text_is_as_agreed(view: SourceView, golden: Callable[[str, str], None]) -> None:
    golden("h100-report", REPORTS["text"]([view], [*SECTIONS, DEVICES]) + "\n")


def test_its_bricks_are_the_devices_and_its_books_close(view: SourceView) -> None:
    assert {brick.backend for brick in view.bricks if "launch-bound" not in brick.name} <= {"torch on cuda", "torch"}
    found = json.loads(REPORTS["json"]([view], []))["sources"][0]
    books = found["books"]
    assert books["wall_us"] == pytest.approx(books["bricks_us"] + books["gaps_us"] + books["unattributed_us"])
    assert "captured graphs on the device, less 1." in found["backend"]
    assert view.steps is not None
    assert view.steps.count > view.steps.recorded > 0


def test_no_rate_is_made_of_what_waited_for_the_host(view: SourceView) -> None:
    assert view.roofline is not None
    placed = [brick.name for brick in view.roofline.points]
    assert "LmHead" in placed
    assert not [name for name in placed if "launch-bound" in name]
    assert all(0 < (brick.percent_of_roof or 1) <= 100 for brick in view.roofline.points)


@pytest.mark.slow
def test_a_run_knows_the_gpu_it_was_on_and_the_clock_while_it_ran() -> None:
    """The idle GPU has a clock of 345 MHz before the first and after the last step. This clock must not count."""
    (run,) = runs_in(RECORDED)
    assert run.surroundings.devices == ("NVIDIA H100 80GB HBM3",)
    assert run.gpu_clock_mhz == 1980
    assert run.host_busy_percent == pytest.approx(6.6, abs=1)
