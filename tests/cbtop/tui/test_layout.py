"""Tests of the layout of screens from 40×10 to 300×100.

No widgets overlap, none is cut off, and little room stays empty.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from textual.geometry import Region
from textual.pilot import Pilot
from textual.widget import Widget

from cbtop.feeds.replay import ReplayFeed
from cbtop.tui.app import CbtopApp
from cbtop.tui.views import VIEWS
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import width_of
from cbtop.viewmodels.source import SourceView
from tests.cbtop import made_machines, samples
from tests.cbtop.conftest import ScriptedFeed, screen_text
from tests.cbtop.seen_timelines import timeline_at
from tests.cbtop.viewmodels.verdicts.cases import IMPERFECT
from tests.representatives import first_by_default

LEAST = (40, 10)
SIZES = {
    "imperfect": [LEAST, (120, 40)],
    "COMPILING": [LEAST, (99, 19)],
    "HOSTILE": [LEAST, (99, 19)],
    "SIDE_BY_SIDE": [LEAST, (118, 10)],
}
MATRIX = [(80, 24), (200, 60), *((width, height) for width in range(40, 301, 26) for height in range(10, 101, 15))]
# Required percentage of used cells below the tabs, at 120×40 and at 200×60. In a line, all cells up to the last
# character count as used, except gaps wider than a column of a table. All cells of a chart count as used.
USED = 60
VOID, CHART_FOOT, SCALE = re.compile(r" {41,}"), re.compile(r"-\d+ s +0 s|└[─┬]+|╷.*╷|┤([▁▂▃▄▅▆▇█·]+ ?)+"), "│┤"


@cache
def imperfect() -> SourceView:
    with ReplayFeed(IMPERFECT) as feed:
        feed.seek(20.0)
        view = feed.view(window=True)
    assert view is not None
    return view


def source_of(name: str) -> SourceView:
    return imperfect() if name == "imperfect" else getattr(samples, name)


def leaves(app: CbtopApp) -> list[tuple[Widget, Region]]:
    """Return all visible widgets without children, each with its region of the screen."""
    placed = app.screen._compositor.visible_widgets.items()
    shown = [(widget, region.intersection(clip)) for widget, (region, clip) in placed]
    return [
        (widget, region)
        for widget, region in shown
        if region.area and not any(child.display for child in widget.children)
    ]


def is_laid_out(app: CbtopApp, size: tuple[int, int], of: str) -> None:
    screen, placed = Region(0, 0, *size), leaves(app)
    for widget, region in placed:
        assert region in screen, f"{of}: {widget} lies at {region}"
        if isinstance(widget, Drawing):
            lines = widget.draw(*widget.size)
            widest = max(map(width_of, lines), default=0)
            assert widest <= widget.size.width, f"{of}: {widest} cells in {widget}, {widget.size}"
    for (one, its), (other, others) in combinations(placed, 2):
        assert not its.intersection(others).area, f"{of}: {one} and {other} share {its.intersection(others)}"


async def at_every_size(source: SourceView, sizes: list[tuple[int, int]]) -> None:
    app = CbtopApp(ScriptedFeed(source), interval_s=60)
    async with app.run_test(size=sizes[0]) as pilot:
        for size in sizes:
            await pilot.resize_terminal(*size)
            for number, view in enumerate(VIEWS, 1):
                await shows(pilot, number)
                is_laid_out(app, size, f"{view.title} at {size[0]}×{size[1]}")


async def shows(pilot: Pilot[int], number: int) -> None:
    await pilot.press(str(number))
    await pilot.pause()


@first_by_default(("name", "sizes"), SIZES.items(), 2, ids=list(SIZES))
async def test_no_widget_lies_on_another_or_draws_beyond_its_place(name: str, sizes: list[tuple[int, int]]) -> None:
    await at_every_size(source_of(name), sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["imperfect", "LIVE", "CHECKED", "COMPILING", "GONE", "NO_ROOF", "SIDE_BY_SIDE", "SLOWEST", "STRAGGLING",
             "STALE", "STALLED", "OVERLAPPED", "DEEP", "HOSTILE"]
)  # fmt: skip
async def test_nor_at_any_size(name: str) -> None:
    await at_every_size(source_of(name), MATRIX)


def used_cells(lines: list[str]) -> int:
    used = set[tuple[int, int]]()
    for row, line in enumerate(lines):
        blank = {column for void in VOID.finditer(line.rstrip()) for column in range(*void.span())}
        used |= {(row, column) for column in range(len(line.rstrip())) if column not in blank}
        for foot in CHART_FOOT.finditer(line):
            begin = max(lines[row - 1].rfind(mark, 0, foot.start() + 1) for mark in SCALE)
            if begin < 0:
                continue
            above = row - (foot[0][0] != "┤")
            while above >= 0 and lines[above][begin : begin + 1] in set(SCALE):
                used |= {(above, column) for column in range(begin, foot.end())}
                above -= 1
    return len(used)


def test_trailing_blanks_and_gaps_of_panes_are_not_used_and_a_chart_is() -> None:
    assert used_cells(["brick" + " " * 40 + "1.5" + " " * 9]) == 48
    assert used_cells(["brick" + " " * 41 + "pane"]) == 9
    assert used_cells(["2┤   ", "0┤ ▂ ", "  -9 s 0 s"]) == 2 * 10 + 10
    assert used_cells(["9│   ", " └─┬─"]) == 5 + 5 - 1 + 1


def watched() -> dict[str, SourceView]:
    """Return two processes by name. `imperfect` has problems and records.

    `demo` is healthy, like the process of `cbtop demo`.
    """
    history = {"tokens_per_sec_history": (80.0,) * 60, "step_us_history": (8_000.0,) * 60}
    listed = samples.list_of(replace(samples.ALONE, **history), costs=samples.COSTS)
    demo = replace(samples.LIVE, machines=(made_machines.H100,), listed=listed, timeline=timeline_at(20.0))
    return {"imperfect": replace(imperfect(), timeline=timeline_at(20.0)), "demo": demo}


@first_by_default(
    ("size", "name"),
    [
        pytest.param((120, 40), "imperfect", id="120x40-imperfect"),
        pytest.param((120, 40), "demo", id="120x40-demo", marks=pytest.mark.slow),
        pytest.param((200, 60), "imperfect", id="200x60-imperfect", marks=pytest.mark.slow),
        pytest.param((200, 60), "demo", id="200x60-demo"),
    ],
)
async def test_most_of_the_screen_is_used(size: tuple[int, int], name: str) -> None:
    app = CbtopApp(ScriptedFeed(watched()[name]), interval_s=60)
    async with app.run_test(size=size) as pilot:
        for number, view in enumerate(VIEWS, 1):
            await shows(pilot, number)
            lines = screen_text(app).splitlines()
            tabs = next(index for index, line in enumerate(lines) if " 1 Overview " in line)
            body = lines[tabs + 1 : -1]
            used = 100 * used_cells(body) / (size[0] * len(body))
            assert used >= USED, f"{view.title}: {used:.0f} %"


async def test_in_the_other_theme_every_drawing_has_its_background() -> None:
    app = CbtopApp(ScriptedFeed(samples.LIVE), interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        before = [widget.rich_style.bgcolor for widget, _ in leaves(app)]
        await pilot.press("T")
        await pilot.pause()
        drawings = [widget for widget, _ in leaves(app) if isinstance(widget, Drawing)]
        assert [drawing.rich_style.bgcolor for drawing in drawings] != before
        for drawing in drawings:
            (*_, last) = drawing.render_line(drawing.size.height - 1)
            shown = {segment.style.bgcolor for segment in drawing.render_line(0) if segment.style}
            assert drawing.rich_style.bgcolor in shown | {last.style.bgcolor if last.style else None}
