"""Tests of what the terminal receives: nothing if nothing changes, and otherwise only the changed cells."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from textual._compositor import CompositorUpdate
from textual.pilot import Pilot
from textual.screen import Screen

from cbtop.tui.app import CbtopApp
from cbtop.tui.views import VIEWS
from cbtop.tui.views.devices import Devices
from cbtop.tui.views.timeline import Timeline
from cbtop.viewmodels.source import SourceView
from tests.cbtop import samples, seen_timelines
from tests.cbtop.conftest import ScriptedFeed
from tests.cbtop.made_machines import GPU, NVML, machine
from tests.representatives import first_by_default

MOVE = re.compile(r"\x1b\[(\d+);(\d+)H")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records what the app writes to the terminal. In tests, Textual writes nothing by itself."""
    found: list[str] = []

    def display(app: CbtopApp, screen: Screen[object], renderable: CompositorUpdate | None) -> None:
        if renderable is not None:
            found.append(renderable.render_segments(app.console))

    monkeypatch.setattr(CbtopApp, "_display", display)
    return found


async def sent_in_a_tick(
    sent: list[str], key: str, *turns: SourceView, size: tuple[int, int] = (120, 40)
) -> Sequence[str]:
    """Open the view of `key`, then show the process as each of `turns` in turn.

    Return the output of these changes.
    """
    feed = ScriptedFeed(samples.LIVE)
    app = CbtopApp(feed, interval_s=60)
    async with app.run_test(size=size) as pilot:
        await pilot.press(key)
        await stands_still(app, pilot, sent)
        for turn in turns:
            sent.clear()
            feed.seen = [turn]
            await ticks(app, pilot)
        return list(sent)


async def ticks(app: CbtopApp, pilot: Pilot[int]) -> None:
    app.tick()
    await pilot.pause()


async def stands_still(app: CbtopApp, pilot: Pilot[int], sent: list[str]) -> None:
    for _ in range(20):
        sent.clear()
        await ticks(app, pilot)
        if not sent:
            return
    raise AssertionError(f"never at rest: {sent}")


@first_by_default("source", [samples.LIVE, samples.COMPARED], ids=["alone", "beside a baseline"])
async def test_nothing_is_sent_while_nothing_changes(sent: list[str], source: SourceView) -> None:
    feed = ScriptedFeed(source)
    app = CbtopApp(feed, interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        for number, view in enumerate(VIEWS, 1):
            await pilot.press(str(number))
            await stands_still(app, pilot, sent)
            feed.seen = [replace(source)]
            await ticks(app, pilot)
            assert sent == [], view.title


@pytest.mark.slow
async def test_a_timeline_sends_nothing_without_new_records_or_while_it_is_held(
    sent: list[str],
) -> None:
    key = str(1 + VIEWS.index(Timeline))
    shown = seen_timelines.at(20.0)
    turns = (shown, replace(shown))
    assert await sent_in_a_tick(sent, key, *turns) == []
    feed = ScriptedFeed(shown)
    app = CbtopApp(feed, interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press(key, "z")
        await stands_still(app, pilot, sent)
        feed.seen = [seen_timelines.at(19.0)]
        sent.clear()
        await ticks(app, pilot)
        assert sent == []
        await pilot.press("G")
        await ticks(app, pilot)
        assert sent


async def test_of_a_figure_that_moved_its_line_is_sent_and_no_blank_one(sent: list[str]) -> None:
    first, *others = samples.LIVE.bricks
    turns = (replace(samples.LIVE, bricks=(replace(first, p50_us=us), *others)) for us in (1.5, 2.71))
    written = "".join(await sent_in_a_tick(sent, "2", *turns))
    # Only two lines are written: the row in the table, and the details below the table.
    assert len({row for row, _ in MOVE.findall(written)}) == 2
    assert "2.71" in written
    assert "2,111" not in written  # The p99 is to the right of the changed p50, and must not be written again.


async def test_a_sample_of_the_devices_sends_the_lines_that_moved_and_no_others(sent: list[str]) -> None:
    key = str(1 + VIEWS.index(Devices))
    turns = []
    for memory_bytes in (4_000_000_000, 5_123_456_789):
        sampled = replace(NVML, devices=(replace(GPU, memory_used_bytes=memory_bytes),))
        turns.append(replace(samples.LIVE, machines=(machine(sampled),)))
    written = "".join(await sent_in_a_tick(sent, key, *turns))
    rows = {row for row, _ in MOVE.findall(written)}
    assert 1 <= len(rows) < 10, rows
