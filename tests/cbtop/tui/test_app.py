"""Tests of the keys of the app, which must do what the footer and the help say, and of the app's refresh."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import pty
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from textual.binding import Binding
from textual.pilot import Pilot

from cbtop.client.store import Store
from cbtop.client.stream_recorder import SavedHistory
from cbtop.errors import CbtopError
from cbtop.feeds.feed import Feed, FeedEnd
from cbtop.feeds.kernel_request import KernelRequest
from cbtop.feeds.replay import ReplayFeed
from cbtop.protocol.requests import WHY, Request, State
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.reports import VIEWS as REPORTED
from cbtop.reports.text import text_report
from cbtop.tui.app import INTERVALS_S, CbtopApp
from cbtop.tui.export import KINDS, as_csv
from cbtop.tui.palette import KeysByName
from cbtop.tui.replay_app import ReplayApp
from cbtop.tui.run_app import RunApp
from cbtop.tui.selection import Selection
from cbtop.tui.terminal_watch import HANG_UP_EXIT
from cbtop.tui.views import VIEWS
from cbtop.tui.views.base import View
from cbtop.tui.views.bricks import Bricks
from cbtop.tui.views.graph import Graph
from cbtop.tui.views.help import HelpScreen
from cbtop.tui.views.layers import Layers
from cbtop.tui.views.overview import Overview, OverviewDrawing
from cbtop.tui.views.roofline import Roofline
from cbtop.tui.views.roofline_plot import RooflinePlot
from cbtop.tui.views.sampled import TITLE
from cbtop.tui.views.sources import Sources
from cbtop.tui.views.timeline import Timeline
from cbtop.tui.views.timeline_lanes import row_blocks
from cbtop.tui.views.timeline_map import HELD, TimelineMap
from cbtop.tui.widgets.columns import Cells
from cbtop.tui.widgets.footer import KeyFooter
from cbtop.tui.widgets.pager import Pager
from cbtop.tui.widgets.sorted_table import SortedTable
from cbtop.tui.widgets.table import Table
from cbtop.tui.widgets.tabs import TabBar
from cbtop.viewmodels.graph import GraphRow
from cbtop.viewmodels.roofline import RooflineView
from cbtop.viewmodels.source import SourceSummary, SourceView, source_view
from tests.cbtop import samples, seen_timelines
from tests.cbtop.asked_host import Host, answers
from tests.cbtop.conftest import ScriptedFeed, screen_text, toasts, view_of
from tests.cbtop.recorded import Clock, apply, profiler_in, source_of
from tests.cbtop.test_gpu_recording import RECORDED
from tests.integration.hosts import DEADLINE_S
from tests.representatives import first_by_default

AppPilot = Pilot[int]
SIZE = (120, 34)


def app_of(pilot: AppPilot) -> CbtopApp:
    assert isinstance(pilot.app, CbtopApp)
    return pilot.app


def table(pilot: AppPilot) -> SortedTable[Any]:
    return pilot.app.query_one("#bricks-table", SortedTable)


async def press(pilot: AppPilot, *keys: str) -> str:
    await pilot.press(*keys)
    await pilot.pause()
    return screen_text(app_of(pilot))


async def what_is_told(pilot: AppPilot) -> str:
    """Wait for all workers. Return the text of the newest toast."""
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()
    return toasts(pilot.app)[-1]


async def told_without_toasts(pilot: AppPilot) -> list[str]:
    """Wait for all workers. Return all notices of the app.

    Use this if toasts would cover the text that a test checks.
    """
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()
    return [note.message for note in pilot.app._notifications]


async def shown(pilot: AppPilot, *words: str) -> str:
    """Wait until these words are on the screen. Return the text of the screen."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not all(word in (text := screen_text(app_of(pilot))) for word in words):
        assert time.monotonic() < deadline_s, f"no {words} on:\n{text}"
        await pilot.pause(0.02)
    return text


# Each of these functions checks one action of the app. A function gets the key of the action, presses the key and
# checks the screen.


async def goes_to_view(pilot: AppPilot, key: str) -> None:
    await press(pilot, key)
    assert view_of(app_of(pilot)) == VIEWS[int(key) - 1].title.lower()


async def goes_to_the_next_view(pilot: AppPilot, key: str) -> None:
    await press(pilot, key)
    assert view_of(app_of(pilot)) == "layers"


async def goes_to_the_previous_view(pilot: AppPilot, key: str) -> None:
    await press(pilot, key)
    assert view_of(app_of(pilot)) == "overview"


async def shows_the_next_phase(pilot: AppPilot, key: str) -> None:
    assert "prefill" not in screen_text(app_of(pilot))
    assert "prefill" in await press(pilot, key)
    assert "prefill" not in await press(pilot, key)


async def shows_the_last_seconds_or_all_that_was_seen(pilot: AppPilot, key: str) -> None:
    shown = "since 20:02:11" if isinstance(app_of(pilot), ReplayApp) else "last 10.4 s"
    assert shown in screen_text(app_of(pilot)).splitlines()[0]
    (other,) = {"since 20:02:11", "last 10.4 s"} - {shown}
    for view in range(1, len(VIEWS) + 1):
        await press(pilot, str(view))
        assert other in await press(pilot, key)
        assert shown in await press(pilot, key)


async def marks_a_baseline(pilot: AppPilot, key: str) -> None:
    feed = app_of(pilot).feed
    assert isinstance(feed, ScriptedFeed)
    await press(pilot, key)
    assert "fewer than 5 of the last seconds have steps" in await what_is_told(pilot)
    feed.baseline = samples.COMPARED.baseline
    assert "noise" in await press(pilot, key)
    assert "the last seconds are marked" in await what_is_told(pilot)
    assert feed.marked == [samples.LIVE.key]


async def clears_the_baseline(pilot: AppPilot, key: str) -> None:
    feed = app_of(pilot).feed
    assert isinstance(feed, ScriptedFeed)
    feed.baseline = samples.COMPARED.baseline
    assert "noise" in await press(pilot, "b")
    assert "noise" not in await press(pilot, key)
    assert "cleared" in await what_is_told(pilot)


async def pauses_and_goes_on(pilot: AppPilot, key: str) -> None:
    assert "PAUSED" in await press(pilot, key)
    assert "PAUSED" not in await press(pilot, key)


async def merges_all_like_it(pilot: AppPilot, key: str) -> None:
    feed = app_of(pilot).feed
    assert isinstance(feed, ScriptedFeed)
    feed.seen.append(replace(samples.LIVE, key="other", pid=4243))
    for mode in ("sum of 2", "slowest of 2", "side by side of 2"):
        assert f"{mode}: pid 4242, pid 4243" in await press(pilot, key)
    assert "of 2: pid" not in await press(pilot, key)


async def shows_another_source(pilot: AppPilot, key: str) -> None:
    feed = app_of(pilot).feed
    assert isinstance(feed, ScriptedFeed)
    feed.seen.append(replace(samples.LIVE, key="other", program="second program"))
    text = await press(pilot, key)
    assert "second program" in text
    assert "2/2" in text


def short_status(pilot: AppPilot) -> None:
    """Shorten the status line, so that the tabs leave room for the text after it."""
    feed = app_of(pilot).feed
    assert isinstance(feed, ScriptedFeed)
    feed.line = "read here"


async def refreshes_more_often(pilot: AppPilot, key: str) -> None:
    short_status(pilot)
    for expected in (0.25, 0.25):
        assert f"every {expected:g} s · " in await press(pilot, key)
        assert app_of(pilot).interval_s == expected


async def refreshes_less_often(pilot: AppPilot, key: str) -> None:
    short_status(pilot)
    for expected in (1.0, 2.0, 5.0, 5.0):
        assert f"every {expected:g} s · " in await press(pilot, key)


async def says_that_nothing_can_be_saved_here(pilot: AppPilot, key: str) -> None:
    await press(pilot, key)  # This app is not connected to a daemon, so nothing can be saved.
    assert not toasts(pilot.app)


async def says_that_there_is_no_memory_to_look_into(pilot: AppPilot, key: str) -> None:
    await press(pilot, key)
    assert "no one daemon here" in await what_is_told(pilot)
    assert "PAUSED" not in screen_text(app_of(pilot))


async def does_nothing_where_there_is_no_range(pilot: AppPilot, key: str) -> None:
    await press(pilot, "6")
    await press(pilot, key)  # The key does nothing in this view, although it works in views with lists.
    assert "PAUSED" not in screen_text(app_of(pilot))


async def says_that_the_process_does_not_run_here(pilot: AppPilot, key: str) -> None:
    await press(pilot, key)
    assert "no process of yours" in await what_is_told(pilot)


async def says_that_its_roofs_are_of_another_machine(pilot: AppPilot, key: str) -> None:
    await press(pilot, key)
    assert await what_is_told(pilot) == "roofs\npid 4242 runs on buildbox: run `cbtop calibrate` there"


async def turns_light_and_dark(pilot: AppPilot, key: str) -> None:
    await press(pilot, key)
    assert pilot.app.theme == "cbtop-light"
    await press(pilot, key)
    assert pilot.app.theme == "cbtop-dark"


async def opens_the_help(pilot: AppPilot, key: str) -> None:
    await press(pilot, "5")
    assert "─ Roofline ─" in (await press(pilot, key)).splitlines()[0]


async def quits(pilot: AppPilot, key: str) -> None:
    await press(pilot, key)
    assert pilot.app.return_value == 0


async def suspends(pilot: AppPilot, key: str) -> None:
    suspended: list[bool] = []
    pilot.app.action_suspend_process = lambda: suspended.append(True)  # type: ignore[method-assign]
    await press(pilot, key)
    assert suspended


async def moves_down(pilot: AppPilot, key: str) -> None:
    await press(pilot, key, key)
    assert table(pilot).cursor == 2


async def moves_up(pilot: AppPilot, key: str) -> None:
    await press(pilot, "j", "j", key)
    assert table(pilot).cursor == 1


async def moves_a_page_down(pilot: AppPilot, key: str) -> None:
    await press(pilot, "6", "z", "z", "g", key)
    graph = pilot.app.query_one("#graph-table", Table)
    assert graph.cursor == graph.visible_rows


async def moves_a_page_up(pilot: AppPilot, key: str) -> None:
    await press(pilot, "6", "z", "z", "g", "j", "pagedown", key)
    assert pilot.app.query_one("#graph-table", Table).cursor == 1


async def moves_to_the_first_row(pilot: AppPilot, key: str) -> None:
    await press(pilot, "j", "j", "j", key)
    assert table(pilot).cursor == 0


async def moves_to_the_last_row(pilot: AppPilot, key: str) -> None:
    await press(pilot, key)
    assert table(pilot).cursor == len(samples.BRICKS) - 1


async def sorts_by_the_previous_column(pilot: AppPilot, key: str) -> None:
    assert "µs/tok▼" in await press(pilot, "s")
    assert "wall %▼" in await press(pilot, key)


async def copies_the_row(pilot: AppPilot, key: str) -> None:
    await press(pilot, key)
    head, _, row = pilot.app.clipboard.splitlines()
    assert head.startswith("| brick | category | wall % |"), head
    assert table(pilot).rows[0].name in row
    assert head.count("|") == row.count("|")
    assert "Markdown" in await what_is_told(pilot)


async def goes_to_the_next_match_and_round(pilot: AppPilot, key: str) -> None:
    await press(pilot, "slash", *"proj", "enter")
    names = [row.name for row in table(pilot).rows]
    assert len(names) > 1
    for _ in names:
        before = table(pilot).cursor
        await press(pilot, key)
        step = 1 if key == "n" else -1
        assert table(pilot).cursor == (before + step) % len(names)


async def opens_the_tree(pilot: AppPilot, key: str) -> None:
    assert "layer → brick → kernel" in await press(pilot, key)


async def offers_every_key_by_its_name(pilot: AppPilot, key: str) -> None:
    await press(pilot, key)
    await pilot.pause()
    await press(pilot, *"reverse")
    await shown(pilot, "reverse  S")
    await press(pilot, "enter")
    await pilot.pause()
    await shown(pilot, "wall %▲")


async def asks_for_a_format(pilot: AppPilot, key: str) -> None:
    assert "export this view as" in await press(pilot, key)
    assert "export this view as" not in await press(pilot, "escape")


async def sorts_by_the_next_column(pilot: AppPilot, key: str) -> None:
    assert "µs/tok▼" in await press(pilot, key)
    assert "incl p50▼" in await press(pilot, key)
    names = [row.name for row in table(pilot).rows]
    assert names == [row.name for row in sorted(samples.BRICKS, key=lambda row: -row.avg_inclusive_us)]


async def turns_the_order_round(pilot: AppPilot, key: str) -> None:
    assert "wall %▲" in await press(pilot, key)
    assert table(pilot).rows[0].name == "Embedding"


async def opens_and_closes_the_details(pilot: AppPilot, key: str) -> None:
    assert "intensity" not in await press(pilot)
    # The table leaves no room for the details until the key is pressed.
    assert "intensity" in await press(pilot, key)
    assert "intensity" not in await press(pilot, key)


async def filters_by_name(pilot: AppPilot, key: str) -> None:
    text = await press(pilot, key, *"proj")
    assert "GateProjection" in text
    assert "RmsNorm" not in text
    assert "RmsNorm" not in await press(pilot, "enter")
    assert "RmsNorm" in await press(pilot, "escape")


async def goes_back_but_never_out(pilot: AppPilot, key: str) -> None:
    await press(pilot, "enter")
    assert "intensity" not in await press(pilot, key)
    await press(pilot, key, key, key)
    assert pilot.app.is_running


async def folds_or_unfolds_the_node(pilot: AppPilot, key: str) -> None:
    assert "─   DownProjection" not in (await press(pilot, "6", key)).replace("▸", " ")
    assert "─   DownProjection" in (await press(pilot, key)).replace("▸", " ")


async def folds_the_node_or_goes_to_its_parent(pilot: AppPilot, key: str) -> None:
    await press(pilot, "6", "j", key)
    assert pilot.app.query_one("#graph-table", Table).cursor == 0
    assert "─   DownProjection" not in (await press(pilot, key)).replace("▸", " ")


async def unfolds_the_node_or_goes_to_its_first_child(pilot: AppPilot, key: str) -> None:
    await press(pilot, "6", key)
    assert pilot.app.query_one("#graph-table", Table).cursor == 1
    assert "downprojection_kernel" in await press(pilot, key)


def children_in_sight(pilot: AppPilot) -> dict[int | None, list[GraphRow]]:
    """Return the nodes of the graph that are drawn, as lists by their parent."""
    found: dict[int | None, list[GraphRow]] = defaultdict(list)
    source = app_of(pilot).source
    graph = source.graph if source else ()
    for row in pilot.app.query_one("#graph-table", Table).rows:
        found[row.parent].append(graph[row.at])
    return found


def head_of_graph(text: str) -> str:
    return next(line for line in text.splitlines() if "layer → brick" in line)


async def sorts_the_children_of_each_node(pilot: AppPilot, key: str) -> None:
    as_they_ran = children_in_sight(pilot) if await press(pilot, "6", "z", "z") else {}
    assert "incl avg µs▼" in await press(pilot, "s")
    if key == "comma":
        assert "▼" not in head_of_graph(await press(pilot, key))
        assert children_in_sight(pilot) == as_they_ran
        return
    by_time = children_in_sight(pilot)
    assert by_time.keys() == as_they_ran.keys()
    for parent, rows in by_time.items():
        assert rows == sorted(as_they_ran[parent], key=lambda row: -(row.avg_inclusive_us or -1))
    assert by_time != as_they_ran
    while "▼" in head_of_graph(await press(pilot, key)):
        pass
    assert children_in_sight(pilot) == as_they_ran


async def turns_the_order_of_children_round(pilot: AppPilot, key: str) -> None:
    assert "incl avg µs▼" in await press(pilot, "6", "z", "z", "s")
    before = children_in_sight(pilot)[None]
    assert "incl avg µs▲" in await press(pilot, key)
    times = [row.avg_inclusive_us or -1 for row in children_in_sight(pilot)[None]]
    assert times == sorted(row.avg_inclusive_us or -1 for row in before)


async def folds_or_unfolds_everything(pilot: AppPilot, key: str) -> None:
    assert "▾" not in await press(pilot, "6", key)
    assert "▸" not in await press(pilot, key)


async def scrolls_the_help(pilot: AppPilot, key: str) -> None:
    await press(pilot, "question_mark", key)
    assert pilot.app.screen.query_one(Pager).scroll_target_y > 0


async def scrolls_the_help_back(pilot: AppPilot, key: str) -> None:
    await press(pilot, "question_mark", "j", key)
    assert pilot.app.screen.query_one(Pager).scroll_target_y == 0


async def closes_the_help(pilot: AppPilot, key: str) -> None:
    await press(pilot, "question_mark")
    assert isinstance(pilot.app.screen, HelpScreen)
    await press(pilot, key)
    assert not isinstance(pilot.app.screen, HelpScreen)
    assert pilot.app.is_running


async def finds_nodes(pilot: AppPilot, key: str) -> None:
    text = await press(pilot, "6", "z", key, *"down")  # all nodes are folded
    assert " of " in text
    graph = pilot.app.query_one("#graph-table", Table)
    assert "DownProjection" in text
    first = graph.cursor
    await press(pilot, "enter", "n")
    assert graph.cursor != first
    await press(pilot, "N")
    assert graph.cursor == first
    assert " of " not in (await press(pilot, "escape")).splitlines()[-2]


async def goes_to_the_next_node_found_and_round(pilot: AppPilot, key: str) -> None:
    await press(pilot, "6", "slash", *"layer.[3-6]", "enter")
    graph = pilot.app.query_one("#graph-table", Table)
    begin, seen = graph.current.id, []
    while begin not in seen:
        await press(pilot, key)
        seen.append(graph.current.id)
        assert len(seen) < 10
    assert len(seen) == 4


async def looks_for_nothing_any_more(pilot: AppPilot, key: str) -> None:
    assert "⏎ keeps" in await press(pilot, "6", "slash", *"ffn", "enter")
    assert "⏎ keeps" not in await press(pilot, key, key)
    assert pilot.app.is_running


Check = Callable[[AppPilot, str], Awaitable[None]]


def goes_in_the_layers(*before: str, shows: str) -> Check:
    """Return a function that tests a key in the map of layers.

    The function opens the map at the fifth of ten layers, which is the slowest. It presses `before` and then the key,
    and expects `shows` on the screen.
    """

    async def check(pilot: AppPilot, key: str) -> None:
        await press(pilot, "3", *before)
        assert shows in await press(pilot, key)

    return check


def moves_the_timeline(has_moved: Callable[[Sight, Sight], bool], *before: str) -> Check:
    """Return a function that tests a key of the timeline.

    The function presses `before` and then the key. It passes the timeline positions before and after to `has_moved`,
    which must accept them.
    """

    async def check(pilot: AppPilot, key: str) -> None:
        app = app_of(pilot)
        assert isinstance(app.feed, ScriptedFeed)
        app.feed.seen = [seen_timelines.at(20.0)]
        app.tick()
        await press(pilot, "4", *before)
        was = sight(app)
        await press(pilot, key)
        assert has_moved(was, sight(app)), (was, sight(app))

    return check


@dataclass(frozen=True)
class Sight:
    begin_ns: int
    end_ns: int
    at: int | None  # number of the block under the cursor, in the cursor's row
    row: int  # number of the row with the cursor
    is_held: bool

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.begin_ns


def sight(app: CbtopApp) -> Sight:
    text = screen_text(app)
    at = re.search(r"(\d+) of \d+ in its row", text)
    drawn = app.query_one(TimelineMap)
    assert drawn.row is not None
    titles = [(row.lane.name, row.title) for row in row_blocks(seen_timelines.timeline_at(20.0).lanes)]
    row = titles.index((drawn.row.lane.name, drawn.row.title))
    return Sight(*drawn.in_sight_ns, int(at[1]) if at else None, row, HELD in text)


WHOLE_NS = seen_timelines.timeline_at(20.0).length_ns


async def opens_the_layer_in_the_graph(pilot: AppPilot, key: str) -> None:
    await press(pilot, "3", key)
    assert view_of(app_of(pilot)) == "graph"


async def moves_the_cursor_of_the_overview(pilot: AppPilot, key: str) -> None:
    drawing = app_of(pilot).query_one(OverviewDrawing)
    await press(pilot, "1", "j", "j")
    before = drawing.current
    await press(pilot, key)
    assert drawing.current not in (None, before)


async def opens_the_evidence(pilot: AppPilot, key: str) -> None:
    await press(pilot, "1", "j", key)
    assert view_of(app_of(pilot)) != "overview"


async def goes_back_to_the_overview(pilot: AppPilot, key: str) -> None:
    await press(pilot, "1", "j", "enter")
    assert view_of(app_of(pilot)) != "overview"
    await press(pilot, key)
    assert view_of(app_of(pilot)) == "overview"


async def closes_the_sampled_functions(pilot: AppPilot, key: str) -> None:
    await press(pilot, "1")
    app_of(pilot).query_one(OverviewDrawing).open_sampled(True)
    assert TITLE in screen_text(app_of(pilot))
    assert TITLE not in await press(pilot, key)


async def unfolds_those_that_have_ended(pilot: AppPilot, key: str) -> None:
    await press(pilot, str(VIEWS.index(Sources) + 1), "G")
    assert "bench.py" in await press(pilot, key)


CHECKS: dict[tuple[type, str], Check] = {
    (Sources, "choose"): unfolds_those_that_have_ended,
    (Layers, "step(-1)"): goes_in_the_layers(shows="Layer 3 · whole layer"),
    (Layers, "step(1)"): goes_in_the_layers(shows="Layer 5 · whole layer"),
    (Layers, "brick(1)"): goes_in_the_layers(shows="Layer 4 · DownProjection"),
    (Layers, "brick(-1)"): goes_in_the_layers("down", shows="Layer 4 · whole layer"),
    (Layers, "to_end(0)"): goes_in_the_layers(shows="Layer 0 · "),
    (Layers, "to_end(-1)"): goes_in_the_layers(shows="Layer 9 · "),
    (Overview, "move(1)"): moves_the_cursor_of_the_overview,
    (Overview, "move(-1)"): moves_the_cursor_of_the_overview,
    (Overview, "open"): opens_the_evidence,
    (Overview, "close"): closes_the_sampled_functions,
    (CbtopApp, "leave_evidence"): goes_back_to_the_overview,
    (Layers, "open"): opens_the_layer_in_the_graph,
    (Timeline, "zoom(1)"): moves_the_timeline(lambda was, now: 0 < now.length_ns < was.length_ns and now.is_held),
    (Timeline, "zoom(-1)"): moves_the_timeline(lambda was, now: now.length_ns > was.length_ns and now.is_held),
    (Timeline, "fit"): moves_the_timeline(lambda _, now: (now.begin_ns, now.end_ns) == (0, WHOLE_NS)),
    (Timeline, "newest"): moves_the_timeline(lambda was, now: was.is_held and not now.is_held, "0", "z", "g"),
    (Timeline, "oldest"): moves_the_timeline(lambda was, now: was.begin_ns > now.begin_ns == 0),
    (Timeline, "step(-1)"): moves_the_timeline(lambda was, now: (was.at or 0) - 1 == now.at, "l", "l"),
    (Timeline, "step(1)"): moves_the_timeline(lambda was, now: (was.at or 0) + 1 == now.at, "l", "l"),
    (Timeline, "pan(-1)"): moves_the_timeline(lambda was, now: was.begin_ns - now.begin_ns == was.length_ns // 2),
    (Timeline, "pan(1)"): moves_the_timeline(lambda was, now: now.begin_ns - was.begin_ns == was.length_ns // 2, "g"),
    (Timeline, "row(1)"): moves_the_timeline(lambda was, now: now.row == was.row + 1),
    (Timeline, "row(-1)"): moves_the_timeline(lambda was, now: now.row == was.row - 1),
    (Timeline, "zoom_to"): moves_the_timeline(lambda was, now: 0 < now.length_ns < was.length_ns / 4, "l", "l"),
    **{(CbtopApp, f"view({index})"): goes_to_view for index in range(len(VIEWS))},
    (CbtopApp, "step_view(1)"): goes_to_the_next_view,
    (CbtopApp, "step_view(-1)"): goes_to_the_previous_view,
    (CbtopApp, "phase"): shows_the_next_phase,
    (CbtopApp, "recent"): shows_the_last_seconds_or_all_that_was_seen,
    (CbtopApp, "merge"): merges_all_like_it,
    (CbtopApp, "mark_baseline"): marks_a_baseline,
    (CbtopApp, "clear_baseline"): clears_the_baseline,
    **{(CbtopApp, f"steps({by})"): says_that_there_is_no_memory_to_look_into for by in (-10, -1, 1, 10)},
    **{(CbtopApp, f"seek({by})"): says_that_there_is_no_memory_to_look_into for by in (-10, 10)},
    (CbtopApp, "range"): says_that_there_is_no_memory_to_look_into,
    (CbtopApp, "leave_range"): does_nothing_where_there_is_no_range,
    (CbtopApp, "now"): does_nothing_where_there_is_no_range,
    (CbtopApp, "pause"): pauses_and_goes_on,
    (CbtopApp, "step_source(-1)"): shows_another_source,
    (CbtopApp, "step_source(1)"): shows_another_source,
    (CbtopApp, "faster"): refreshes_more_often,
    (CbtopApp, "slower"): refreshes_less_often,
    (CbtopApp, "save_history"): says_that_nothing_can_be_saved_here,
    (CbtopApp, "kernels"): says_that_the_process_does_not_run_here,
    (CbtopApp, "measure_roofs"): says_that_its_roofs_are_of_another_machine,
    (Roofline, "app.measure_roofs"): says_that_its_roofs_are_of_another_machine,
    (CbtopApp, "theme"): turns_light_and_dark,
    (CbtopApp, "help"): opens_the_help,
    (CbtopApp, "quit"): quits,
    (CbtopApp, "suspend_process"): suspends,
    (Table, "move(1)"): moves_down,
    (Table, "move(-1)"): moves_up,
    (Table, "page(1)"): moves_a_page_down,
    (Table, "page(-1)"): moves_a_page_up,
    (Table, "first"): moves_to_the_first_row,
    (Table, "last"): moves_to_the_last_row,
    (SortedTable, "sort(1)"): sorts_by_the_next_column,
    (SortedTable, "sort(-1)"): sorts_by_the_previous_column,
    (SortedTable, "match(1)"): goes_to_the_next_match_and_round,
    (SortedTable, "match(-1)"): goes_to_the_next_match_and_round,
    (Table, "copy"): copies_the_row,
    (CbtopApp, "tree"): opens_the_tree,
    (CbtopApp, "export"): asks_for_a_format,
    (CbtopApp, "command_palette"): offers_every_key_by_its_name,
    (SortedTable, "reverse"): turns_the_order_round,
    (Bricks, "toggle_detail"): opens_and_closes_the_details,
    (Bricks, "filter"): filters_by_name,
    (Bricks, "back"): goes_back_but_never_out,
    (Graph, "open"): folds_or_unfolds_the_node,
    (Graph, "fold"): folds_the_node_or_goes_to_its_parent,
    (Graph, "unfold"): unfolds_the_node_or_goes_to_its_first_child,
    (Graph, "find"): finds_nodes,
    (Graph, "match(1)"): goes_to_the_next_node_found_and_round,
    (Graph, "match(-1)"): goes_to_the_next_node_found_and_round,
    (Graph, "back"): looks_for_nothing_any_more,
    (Graph, "app.kernels"): says_that_the_process_does_not_run_here,
    (Graph, "toggle_all"): folds_or_unfolds_everything,
    (Graph, "sort(1)"): sorts_the_children_of_each_node,
    (Graph, "sort(-1)"): sorts_the_children_of_each_node,
    (Graph, "reverse"): turns_the_order_of_children_round,
    (Pager, "scroll_down"): scrolls_the_help,
    (Pager, "scroll_up"): scrolls_the_help_back,
    (Pager, "page_down"): scrolls_the_help,
    (Pager, "page_up"): scrolls_the_help_back,
    (Pager, "scroll_home"): scrolls_the_help_back,
    (Pager, "scroll_end"): scrolls_the_help,
    (HelpScreen, "dismiss"): closes_the_help,
}
OWNERS = (CbtopApp, Table, SortedTable, *VIEWS, Pager, HelpScreen)
BINDINGS = [
    (owner, binding) for owner in OWNERS for binding in Binding.make_bindings(vars(owner).get("BINDINGS", ()))
]


# No key reverts the effect of these actions, so each needs a new app.
LEAVE_A_CHANGE = (
    merges_all_like_it, shows_another_source, refreshes_more_often, refreshes_less_often, marks_a_baseline,
    clears_the_baseline, offers_every_key_by_its_name, quits, suspends, moves_a_page_down, moves_a_page_up,
    sorts_by_the_next_column, sorts_by_the_previous_column, turns_the_order_round,
    unfolds_the_node_or_goes_to_its_first_child, folds_or_unfolds_everything, sorts_the_children_of_each_node,
    turns_the_order_of_children_round, moves_the_cursor_of_the_overview, opens_the_evidence,
    goes_back_to_the_overview,
)  # fmt: skip


# Of each of these keys, the opposite is tested by default.
OPPOSITES = (moves_a_page_up, sorts_by_the_previous_column)


def every_key() -> Iterator[Any]:
    """Return every key.

    Keys that leave the screen as it was are tested one after another on one screen, because opening a screen takes
    most of a test's time. A key is a slow test if an earlier key has the same check, or if it is the opposite of
    another key.
    """
    met, in_turn = set(), defaultdict(list)
    for owner, binding in BINDINGS:
        check, one = CHECKS[owner, binding.action], (owner, binding)
        if check in met or check in LEAVE_A_CHANGE or owner is Layers:
            is_alike = owner is Layers and binding.action in ("step(-1)", "brick(-1)", "to_end(0)")
            marks = [pytest.mark.slow] if check in met or is_alike or check in OPPOSITES else []
            yield pytest.param([one], id=f"{owner.__name__}-{binding.key}", marks=marks)
        else:
            in_turn[owner].append(one)
        met.add(check)
    for owner, keys in in_turn.items():
        yield pytest.param(keys, id=owner.__name__)


@pytest.mark.parametrize("keys", [*every_key()])
async def test_every_key_does_what_it_says(keys: list[tuple[type, Binding]], feed: ScriptedFeed) -> None:
    app = CbtopApp(feed, section="bricks", interval_s=0.5)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        before = await press(pilot)
        for owner, binding in keys:
            assert binding.description, f"{owner.__name__}, {binding.key}: without a description it is in no help"
            try:
                await CHECKS[owner, binding.action](pilot, binding.key)
            except AssertionError as failed:
                failed.add_note(f"{owner.__name__}, {binding.key}")
                raise
            if len(keys) > 1:
                app.clear_notifications()
                assert await press(pilot, "escape", "2", "g") == before, f"{owner.__name__}, {binding.key}"


async def test_pause_freezes_the_screen_and_keeps_polling(feed: ScriptedFeed) -> None:
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        before = await press(pilot, "space")
        feed.seen[0] = replace(samples.LIVE, program="changed meanwhile")
        polls = feed.polls
        app.tick()
        await pilot.pause()
        assert feed.polls == polls + 1
        assert screen_text(app) == before
        assert "changed meanwhile" in await press(pilot, "space")


async def test_w_writes_the_last_minutes_and_says_where_or_why_not(feed: ScriptedFeed) -> None:
    answers: list[SavedHistory | CbtopError] = [SavedHistory(Path("/tmp/[b]x.cbtop"), 1_230_000), CbtopError("[no]")]

    def save() -> SavedHistory:
        answer = answers.pop(0)
        if isinstance(answer, CbtopError):
            raise answer
        return answer

    app = CbtopApp(feed, section="bricks", interval_s=60, save_history=save)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        for _ in range(2):
            await pilot.press("w")
            await what_is_told(pilot)
        assert toasts(app) == ["the last minutes are in\n/tmp/[b]x.cbtop, 1.23 MB", "[no]"]
        assert [toast.has_class("-error") for toast in app.screen.query("Toast")] == [False, True]


def seen_as(host: Host) -> ScriptedFeed:
    """Return a feed that shows this host with its own key."""
    stem = host.ring.stem.replace("-", ":")
    return ScriptedFeed(replace(samples.LIVE, key=f"{socket.gethostname()}:{stem}", pid=os.getpid()))


async def test_shift_k_asks_the_shown_process_for_kernels_and_the_graph_shows_them(runtime: Path) -> None:
    may_go_on = threading.Event()

    def answers_late(host: Host, request: Request) -> None:
        host.say(request.number, State.RUNNING, 1)
        host.wait_for(may_go_on)
        answers(host, request)

    pid = os.getpid()
    with Host(runtime, answers_late), Feed() as feed:
        app = CbtopApp(feed, section="bricks", interval_s=0.1)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("r")  # Show the data of all time, because the last seconds may already have no steps.
            await shown(pilot, "DownProjection")
            assert "nvjet" not in await press(pilot, "6")
            await pilot.press("K")
            await shown(pilot, f"recording kernels of pid {pid}", "33 %")
            # The screen still reacts to keys while kernels are recorded.
            text = await press(pilot, "K", "g", "enter")
            assert [note.message for note in app._notifications] == ["one process is being asked already"]
            assert "33 %" in text
            assert "├──" not in text
            await press(pilot, "enter")
            may_go_on.set()
            assert (await told_without_toasts(pilot))[-1] == (
                f"decode: 3 steps recorded of pid {pid}, 8 launches a step, 12.00 µs in kernels\n"
                "4 launches in no call of a module that is known\n"
                "Graph shows them under their bricks: Enter unfolds one"
            )
            text = await shown(pilot, "▸ DownProjection")
            assert "recording kernels" not in text
            await press(pilot, "j", "enter")
            await shown(pilot, "└──   nvjet_tst_64x8", "burst µs")
            text = await press(pilot, "space")  # While the screen is paused, it shows a copy of the graph.
            rows = [line.split() for line in text.splitlines() if "RmsNorm" in line or "nvjet" in line]
            assert [row[-4] for row in rows] == ["1.00", "–"]


@first_by_default("state", [State.TAKEN, State.NOT_ON_CUDA])
async def test_shift_k_says_why_a_process_refuses(runtime: Path, state: State) -> None:
    with Host(runtime, lambda host, request: host.say(request.number, state)) as host:
        app = CbtopApp(seen_as(host), section="bricks", interval_s=60)
        async with app.run_test(size=SIZE, notifications=True) as pilot:
            await pilot.press("K")
            assert await what_is_told(pilot) == f"kernels\npid {os.getpid()} refuses: {WHY[state]}"
            assert app.screen.query_one("Toast").has_class("-error")


async def test_shift_k_waits_a_set_time_for_an_idle_process_and_then_withdraws(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbtop.tui.kernels.KernelRequest", partial(KernelRequest, wait_s=0.1))
    with Host(runtime, lambda host, request: None) as host:
        app = CbtopApp(seen_as(host), section="bricks", interval_s=60)
        async with app.run_test(size=SIZE, notifications=True) as pilot:
            await pilot.press("K")
            assert f"pid {os.getpid()} has begun no step in 0.1 s" in await what_is_told(pilot)
            assert host.recorder.asked == 0
            assert "waiting" not in screen_text(app)


@pytest.mark.slow
async def test_who_leaves_while_a_process_is_asked_takes_back_what_was_asked(runtime: Path) -> None:
    is_asked = threading.Event()
    with Host(runtime, lambda host, request: is_asked.set()) as host:
        async with CbtopApp(seen_as(host), section="bricks", interval_s=60).run_test(size=SIZE) as pilot:
            await pilot.press("K")
            while not is_asked.is_set():
                await pilot.pause(0.02)
            await pilot.press("q")
        deadline_s = time.monotonic() + DEADLINE_S
        while host.recorder.asked:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.02)  # The thread of the request may still report its result.


@first_by_default(
    ("source", "keys", "why"),
    [
        (None, "K", "there is no process yet"),
        (samples.GONE, "K", "pid 4242 is gone"),
        (samples.LIVE, "mK", "press m until one is shown"),
        (samples.LIVE, "K", "pid 4242 on buildbox is no process of yours that runs on this machine"),
    ],
)
async def test_shift_k_says_why_what_is_shown_cannot_be_asked(source: SourceView | None, keys: str, why: str) -> None:
    others = [replace(source, key="other")] if source else []
    app = CbtopApp(ScriptedFeed(*([source] if source else []), *others), section="bricks", interval_s=60)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press(*keys)
        assert why in await what_is_told(pilot)
        assert len(toasts(app)) == 1


@first_by_default(
    ("source", "why"),
    [(None, "there is no process yet"), (samples.LIVE, "pid 4242 alone runs this model in this program")],
)
async def test_a_merge_of_fewer_than_two_is_refused_with_why_and_changes_nothing(
    source: SourceView | None, why: str
) -> None:
    app = CbtopApp(ScriptedFeed(*([source] if source else [])), section="bricks", interval_s=60)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.pause()
        before = app.source
        await pilot.press("m")
        assert why in await what_is_told(pilot)
        assert (app.merge, app.source) == (None, before)


@pytest.mark.slow
async def test_shift_k_asks_nobody_of_a_recording() -> None:
    with ReplayFeed(RECORDED) as feed:
        async with ReplayApp(feed, interval_s=60).run_test(size=SIZE, notifications=True) as pilot:
            await pilot.press("K")
            assert "this is a recording" in await what_is_told(pilot)


HERE = replace(samples.LIVE, host=socket.gethostname())


@first_by_default(
    ("source", "keys", "why"),
    [
        (None, "C", "there is no process yet"),
        (samples.LIVE, "mC", "press m until one is shown"),
        (samples.LIVE, "C", "run `cbtop calibrate` there"),
    ],
)
async def test_shift_c_says_why_the_roofs_of_what_is_shown_cannot_be_measured(
    source: SourceView | None, keys: str, why: str
) -> None:
    others = [replace(source, key="other")] if source else []
    app = CbtopApp(ScriptedFeed(*([source] if source else []), *others), section="bricks", interval_s=60)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.press(*keys)
        assert why in await what_is_told(pilot)


class MadeCalibration:
    """A fake measurement of roofs (peak rates). The measurement runs until the test sets `found`."""

    def __init__(self, source: SourceView) -> None:
        self.status, self.closed = "measuring roofs: 2 threads", False
        self.done = None
        self.found: list[str] | CbtopError | None = None

    def poll(self) -> list[str] | None:
        if isinstance(self.found, CbtopError):
            raise self.found
        return self.found

    def __enter__(self) -> MadeCalibration:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[MadeCalibration]:
    made: list[MadeCalibration] = []

    def begin(source: SourceView) -> MadeCalibration:
        made.append(MadeCalibration(source))
        return made[-1]

    monkeypatch.setattr("cbtop.tui.roofs.Calibration", begin)
    return made


@first_by_default("fails", [False, True])
async def test_shift_c_measures_the_roofs_in_a_thread_with_progress_and_a_result(
    fails: bool, calibrations: list[MadeCalibration]
) -> None:
    app = CbtopApp(ScriptedFeed(HERE), section="bricks", interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("C")
        assert "press C again to measure" in (await told_without_toasts(pilot))[-1]
        assert not calibrations
        app.clear_notifications()
        await pilot.press("C")
        await shown(pilot, "measuring roofs: 2 threads")
        text = await press(pilot, "C", "5")  # The screen still reacts to keys while roofs (peak rates) are measured.
        assert "Roofline" in text
        assert [note.message for note in app._notifications] == ["they are being measured already"]
        calibrations[0].found = CbtopError("no room") if fails else ["dram_read 20.00 GB/s", "kept in /x"]
        wanted = "no room" if fails else "dram_read 20.00 GB/s\nkept in /x"
        assert (await told_without_toasts(pilot))[-1] == wanted
        assert "measuring roofs" not in screen_text(app)
        assert [one.closed for one in calibrations] == [True]


async def test_who_leaves_while_roofs_are_measured_ends_that(calibrations: list[MadeCalibration]) -> None:
    async with CbtopApp(ScriptedFeed(HERE), section="bricks", interval_s=60).run_test(size=SIZE) as pilot:
        await pilot.press("C", "C")
        await shown(pilot, "measuring roofs")
        await pilot.press("q")
    deadline_s = time.monotonic() + DEADLINE_S
    while not calibrations[0].closed:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)


async def test_the_first_source_opens_the_view_and_gets_the_keys(feed: ScriptedFeed) -> None:
    live, feed.seen = feed.seen, []
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        text = screen_text(app)
        assert "cbtop demo" in text
        assert "sort" not in text.splitlines()[-1]
        feed.seen = live
        app.tick()
        await pilot.pause()
        assert "sort" in (await press(pilot, "j")).splitlines()[-1]
        assert table(pilot).cursor == 1


@pytest.mark.slow
async def test_a_process_with_steps_and_no_bricks_is_shown_by_its_steps() -> None:
    bare = replace(
        samples.LIVE, bricks=(), categories=(), graph=(), roofline=RooflineView((), (), ()), critical_path=None
    )
    app = CbtopApp(ScriptedFeed(bare))
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        text = screen_text(app)
        assert view_of(app) == "overview"
        assert "tokens/s" in text
        assert "ms/token p50" in text
        assert all(steps.phase in text for steps in bare.phases)


@pytest.mark.slow
async def test_the_footer_names_the_keys_of_the_view_that_is_open(feed: ScriptedFeed) -> None:
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        assert "filter" in (await shown(pilot, "filter")).splitlines()[-1]
        footer = (await press(pilot, "6")).splitlines()[-1]
        assert "open/fold" in footer
        assert "filter" not in footer


@first_by_default("width", [40, 80, 120, 200])
async def test_the_footer_names_as_many_keys_as_it_has_room_for(feed: ScriptedFeed, width: int) -> None:
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=(width, 40)) as pilot:
        # The footer of this view has less room, because it lists the view's own keys.
        footer = (await shown(pilot, "s sort  S reverse")).splitlines()[-1].rstrip()
        assert footer.endswith("? help  q quit")
        assert ("^p all keys" in footer) == (width >= 120)
        more = ("m merge", "[ look back", "v range", "> next source", "b baseline", "e export")
        assert all(key in footer for key in more) == (width == 200)


async def test_a_workload_that_failed_ends_the_app_with_its_exit_code(feed: ScriptedFeed) -> None:
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        feed.end = FeedEnd(2, "model.gguf is [red]truncated[/]")
        app.tick()
        await pilot.pause()
    assert app.return_value == 2
    assert app.return_code == 2


OTHER = replace(samples.LIVE, key="other", program="second program")


async def test_the_newest_process_is_shown_until_a_key_has_chosen_one(feed: ScriptedFeed) -> None:
    third = replace(samples.LIVE, key="third", program="third program")
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.pause()
        feed.seen.insert(0, OTHER)
        app.tick()
        await pilot.pause()
        assert "second program started and is shown now" in (await what_is_told(pilot)).replace("\n", " ")
        assert "second program" in screen_text(app).splitlines()[0]
        await press(pilot, "greater_than_sign", "less_than_sign")
        feed.seen.insert(0, third)
        app.tick()
        await pilot.pause()
        assert "second program" in screen_text(app).splitlines()[0]
        assert "third program started: < shows it" in toasts(app)


@first_by_default("key", ["space", "m"])
async def test_a_held_screen_and_a_merge_stay_where_they_are(key: str, feed: ScriptedFeed) -> None:
    feed.seen.append(replace(samples.LIVE, key="alike"))
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        await press(pilot, key)
        feed.seen.insert(0, OTHER)
        app.tick()
        await pilot.pause()
        assert app.selection.key == samples.LIVE.key


async def test_a_process_that_ended_gives_way_to_the_newest_that_runs(feed: ScriptedFeed) -> None:
    feed.seen.append(OTHER)
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.pause()
        feed.seen = [OTHER, replace(samples.LIVE, state=SourceStatus.ENDED)]
        app.tick()
        await pilot.pause()
        assert "has ended: second program runs and is shown now" in await what_is_told(pilot)


@pytest.mark.slow
async def test_the_last_process_stays_on_the_screen_when_it_has_ended(feed: ScriptedFeed) -> None:
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        feed.seen = [
            replace(OTHER, state=SourceStatus.ENDED), replace(samples.LIVE, state=SourceStatus.ENDED),
        ]  # fmt: skip
        app.tick()
        await pilot.pause()
        assert app.selection.key == samples.LIVE.key


async def test_what_starts_is_told_and_takes_no_screen_over(feed: ScriptedFeed) -> None:
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await press(pilot, "greater_than_sign")
        feed.seen.insert(0, OTHER)  # A new process is the first in the list.
        app.tick()
        await pilot.pause()
        assert "second program started: < shows it" in (await what_is_told(pilot)).replace("\n", " ")
        assert "second program" not in screen_text(app).splitlines()[0]
        app.tick()
        assert len(toasts(app)) == 1
        assert "second program" in (await press(pilot, "less_than_sign")).splitlines()[0]


async def test_a_process_that_ends_stays_on_the_screen_and_the_others_are_told(feed: ScriptedFeed) -> None:
    feed.seen.append(OTHER)
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await press(pilot, "greater_than_sign", "less_than_sign")
        feed.seen = [OTHER, replace(samples.LIVE, state=SourceStatus.ENDED)]
        app.tick()
        await pilot.pause()
        assert "has ended; second program runs: < shows it" in await what_is_told(pilot)
        head = screen_text(app).splitlines()[0]
        assert "ENDED" in head
        assert samples.LIVE.program in head
        assert "second program" in (await press(pilot, "less_than_sign")).splitlines()[0]


async def test_the_newest_is_chosen_from_all_that_runs(feed: ScriptedFeed) -> None:
    feed.is_complete = False
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await pilot.pause()
        feed.seen.insert(0, OTHER)
        feed.is_complete = True
        app.tick()
        await pilot.pause()
        assert "second program" in screen_text(app).splitlines()[0]
        assert not toasts(app)


async def test_a_source_that_nobody_tells_of_any_more_gives_way_to_the_newest(feed: ScriptedFeed) -> None:
    feed.seen.append(OTHER)
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        assert "second program" in await press(pilot, "greater_than_sign")
        feed.seen.pop()
        app.tick()
        await pilot.pause()
        assert "second program" not in screen_text(app)


async def test_the_cursor_keeps_its_row_and_a_sort_tops_it_unless_a_user_placed_it(
    feed: ScriptedFeed,
) -> None:
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        first = table(pilot).current
        assert first is not None
        slow = replace(samples.LIVE.bricks[-1], name="Newcomer", total_exclusive_us=1e12)
        feed.seen = [replace(samples.LIVE, bricks=(slow, *samples.LIVE.bricks))]
        app.tick()
        await pilot.pause()
        assert (table(pilot).rows[0], table(pilot).cursor) == (slow, 1)
        assert table(pilot).current == first
        await press(pilot, "S", "S")
        assert table(pilot).current == slow
        await press(pilot, "j", "S")
        assert table(pilot).current == first


@pytest.mark.slow
async def test_a_filter_finds_names_and_categories_and_says_how_many_of_all(feed: ScriptedFeed) -> None:
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        for typed, found, name in (
            ("att", "6 of 16", "AttentionScore"),  # The typed text `att` finds some bricks only by their category.
            ("ffn", "4 of 16", "GateProjection"),
            ("^(gate|up)p", "2 of 16", "UpProjection"),
            ("(", "0 of 16", ""),
        ):
            text = await press(pilot, "slash", *typed)
            lines = [line for line in text.splitlines() if f" {found} " in line]
            assert [line.split()[0] for line in lines] == [typed]
            assert name in text
            assert found in await press(pilot, "enter", "n"), typed
            assert found not in await press(pilot, "escape"), typed


async def test_the_palette_has_each_of_our_keys_and_none_of_textuals_own(feed: ScriptedFeed) -> None:
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        await press(pilot)
        app.action_command_palette()
        await pilot.pause()
        here = app.screen_stack[0]
        offered = {str(hit.text).rpartition("  ")[0] async for hit in KeysByName(here).discover()}
        # These actions are not offered now: the palette is already open, and the screen shows neither a range nor a
        # past moment.
        elsewhere = {"command_palette", "leave_range", "now", "leave_evidence"}
        ours = {
            binding.description
            for owner, binding in BINDINGS
            if owner in (CbtopApp, Bricks, SortedTable) and binding.action not in elsewhere
        }
        assert ours <= offered
        assert {text.rpartition(", in ")[0] or text for text in offered} <= {
            binding.description for _, binding in BINDINGS
        }


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("theme", "theme: light or dark  T"),
        ("screenshot", "export this view: screenshot, json, csv, md or txt  e"),
        ("save", "save the range, or the last minutes, to a file  w"),
        ("zoom", "zoom in, in Timeline  4 z"),
    ],
)
async def test_the_palette_finds_the_words_that_users_of_other_tools_type(
    feed: ScriptedFeed, word: str, text: str
) -> None:
    app = CbtopApp(feed, interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        found = sorted([hit async for hit in KeysByName(app.screen).search(word)], key=lambda hit: -hit.score)
        assert found[0].text == text


async def test_the_palette_presses_a_key_of_another_view_there(
    feed: ScriptedFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoomed: list[int] = []
    monkeypatch.setattr(Timeline, "action_zoom", lambda timeline, steps: zoomed.append(steps))
    app = CbtopApp(feed, interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        await pilot.press("ctrl+p", *"zoom in")
        await pilot.pause(1)
        await pilot.press("enter", "enter")
        await pilot.pause()
        assert (zoomed, app.screen.query_one(TabBar).active) == ([1], 3)


@pytest.mark.slow
async def test_a_click_sorts_by_a_head_or_presses_a_key_and_a_double_one_is_enter(feed: ScriptedFeed) -> None:
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        lines = (await press(pilot)).splitlines()
        y = next(index for index, line in enumerate(lines) if "wall %▼" in line)
        for title, shown_as in (("incl p50", "incl p50▼"), ("incl p50", "incl p50▲"), ("brick", "brick▲")):
            await pilot.click(offset=(lines[y].index(title) + 1, y))
            await pilot.pause()
            assert shown_as in screen_text(app).splitlines()[y]
        await pilot.click(offset=(8, y + 3), times=2)
        await pilot.pause()
        assert table(pilot).cursor == 2
        assert "inclusive" in screen_text(app)
        await pilot.click(offset=(screen_text(app).splitlines()[-1].index("? help"), SIZE[1] - 1))
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)


# The default test saves one view in every format and the cells of every view. The slow test saves all other
# combinations of view and format.
@first_by_default(
    "wanted",
    [
        [(Bricks, ending) for ending, _ in KINDS.values()],
        [(view, "csv") for view in VIEWS],
        *(
            pytest.param([(view, ending)], marks=pytest.mark.slow)
            for view in VIEWS
            for ending, _ in KINDS.values()
            if view is not Bricks and ending != "csv"
        ),
    ],
)
async def test_e_writes_the_view_shown_into_a_new_file_and_names_it(
    feed: ScriptedFeed, wanted: list[tuple[type[View], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cbtop.tui.export.time.strftime", lambda *_: "now")
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        for view, ending in wanted:
            (taken := tmp_path / f"cbtop-{view.title.lower()}-now.{ending}").write_text("another's")
            await press(pilot, str(VIEWS.index(view) + 1), "e", next(key for key in KINDS if KINDS[key][0] == ending))
            path = tmp_path / f"cbtop-{view.title.lower()}-now-2.{ending}"
            assert await what_is_told(pilot) == f"{view.title} is in\n{path}"
            assert taken.read_text() == "another's"
            holds_the_view(app, view, ending, path.read_text(encoding="utf-8"))


async def test_a_picture_has_no_toast_and_the_toast_returns_after_it(
    feed: ScriptedFeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = CbtopApp(feed, interval_s=60)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        app.notify("the-last-picture", timeout=60)
        assert "the-last-picture" in await press(pilot)
        await press(pilot, "e", "s")
        assert "the-last-picture" in await press(pilot)
    (picture,) = tmp_path.iterdir()
    assert "Overview" in picture.read_text(encoding="utf-8")
    assert "the-last-picture" not in picture.read_text(encoding="utf-8")


def holds_the_view(app: CbtopApp, view: type[View], ending: str, text: str) -> None:
    if ending == "json":
        assert json.loads(text)["sources"][0]["pid"] == samples.LIVE.pid
    elif ending == "txt":
        assert app.source is not None
        assert text == text_report([app.source], [view.section] if view.section in REPORTED else REPORTED) + "\n"
    elif ending == "svg":
        assert text.startswith("<svg")
        assert view.title in text
    else:
        cells = app.query_one(view).cells()
        assert cells is not None
        rows = list(csv.reader(text.splitlines())) if ending == "csv" else text.splitlines()
        assert len(rows) == len(cells.rows) + (1 if ending == "csv" else 2), view
        assert all(title in rows[0] for title in cells.head)


def test_numbers_and_names_of_a_csv_are_what_a_program_reads() -> None:
    cells = Cells(("brick", "µs/tok", "a change", "note"), (("■ Down, Up", "15,024", "-1,234.5", "n/a"),))
    assert list(csv.reader(as_csv(cells).splitlines()))[1] == ["Down, Up", "15024", "-1234.5", "n/a"]


async def test_what_cannot_be_written_is_said(
    feed: ScriptedFeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        await press(pilot, "e", "t")
        assert "No such file or directory" in await what_is_told(pilot)


def test_how_often_to_press_is_counted_the_shorter_way_round() -> None:
    def summary(key: str) -> SourceSummary:
        return SourceSummary(key, key, SourceStatus.LIVE)

    selection = Selection()
    selection.look([summary("c"), summary("b"), summary("a")], is_complete=True)
    selection.choose("a")
    told = selection.look([summary(key) for key in "dcba"], is_complete=True)
    assert told == "d started: > shows it"
    selection.choose("b")
    told = selection.look([summary(key) for key in "edcba"], is_complete=True)
    assert told == "e started: > 2 times shows it"
    for _ in range(2):
        selection.step(1, [summary(key) for key in "edcba"])
    assert selection.key == "e"


def test_what_had_ended_and_runs_again_since_time_went_back_has_not_started() -> None:
    a, b = (SourceSummary(key, key, SourceStatus.LIVE) for key in "ab")
    selection = Selection()
    selection.look([a, replace(b, state=SourceStatus.ENDED)], is_complete=True)
    assert selection.look([a, b], is_complete=True) == ""
    assert selection.look([a, replace(b, state=SourceStatus.ENDED)], is_complete=True) == ""


async def test_a_click_on_a_tab_opens_its_view(feed: ScriptedFeed) -> None:
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.click("#tabs", offset=(27, 0))
        await pilot.pause()
        assert view_of(app) == "layers"


async def test_moving_in_the_roofline_lights_another_point(feed: ScriptedFeed) -> None:
    app = CbtopApp(feed, section="bricks", interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        await press(pilot, "5", "j")
        plot = app.query_one(RooflinePlot)
        assert [text for line in plot.draw(*plot.size) for text, role in line if "lit" in role.split()] == ["b"]


def test_the_refresh_rates_span_the_allowed_band() -> None:
    assert (min(INTERVALS_S), max(INTERVALS_S)) == (0.25, 5.0)


@pytest.mark.slow
def test_a_lost_terminal_ends_the_app_even_if_the_hang_up_signal_is_ignored() -> None:
    script = """
        import signal, sys
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        from cbtop.tui.app import CbtopApp
        from tests.cbtop.conftest import ScriptedFeed
        sys.exit(CbtopApp(ScriptedFeed()).run())
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        drawn = b""
        while b"WAITING" not in drawn:
            drawn += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(timeout=DEADLINE_S) == HANG_UP_EXIT
    finally:
        process.kill()
        process.wait()


async def test_of_many_nodes_only_those_in_sight_are_made_into_rows(tmp_path: Path, rows_made: list[int]) -> None:
    profiler = profiler_in(tmp_path, Clock())

    def decode() -> None:
        with profiler.step("decode", 1):
            for layer in range(100):
                with profiler.layer(layer):
                    for name in "abcdefghi":
                        with profiler.brick(name):
                            pass

    decode()
    source, store = source_of(tmp_path), Store()
    source.poll()
    apply(store, source.snapshot())
    record = store.sources[source.key]
    feed = ScriptedFeed(source_view(record))
    app = CbtopApp(feed, section="bricks", interval_s=1000)
    async with app.run_test(size=SIZE) as pilot:
        await press(pilot, "6", "z", "z")  # fold all nodes, then unfold all
        text = await press(pilot, "pagedown")
        assert "Layer" in text
        assert 10 < len(set(rows_made)) <= 4 * SIZE[1]
        decode()
        source.poll()
        apply(store, source.delta())
        rows_made.clear()
        feed.seen = [source_view(record)]
        app.tick()
        await pilot.pause()
        assert 10 < len(set(rows_made)) <= 2 * SIZE[1]


async def test_rows_scrolled_into_a_paused_screen_are_of_the_moment_it_was_paused(tmp_path: Path) -> None:
    profiler = profiler_in(tmp_path, clock := Clock())

    def decode(us: int) -> None:
        with profiler.step("decode", 1):
            for layer in range(100):
                with profiler.layer(layer):
                    clock.sleep_us(us)

    decode(7)
    source, store = source_of(tmp_path), Store()
    source.poll()
    apply(store, source.snapshot())
    app = CbtopApp(ScriptedFeed(source_view(store.sources[source.key])), section="bricks", interval_s=1000)
    async with app.run_test(size=SIZE) as pilot:
        await press(pilot, "6", "z", "z", "space")
        decode(1000)
        source.poll()
        apply(store, source.delta())
        rows = [line for line in (await press(pilot, "G")).splitlines() if "Layer 9" in line]
        assert len(rows) == 10
        assert all(" 7.00 " in row for row in rows)


async def test_a_footer_that_is_drawn_after_the_help_closed_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    app = CbtopApp(ScriptedFeed(samples.LIVE), interval_s=60)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        footer = app.screen.query_one(KeyFooter)
        await pilot.press("escape")
        await pilot.pause()
        assert not footer.is_attached
        drawn: list[int] = []
        monkeypatch.setattr(footer, "draw", lambda width, height: drawn.append(width) or [])
        footer.redraw()
        assert not drawn


@pytest.mark.parametrize("key", ["question_mark", "e", "ctrl+p"])
async def test_a_toast_is_not_over_a_dialog_and_returns_after_it(key: str) -> None:
    app = CbtopApp(ScriptedFeed(samples.LIVE), interval_s=60)
    async with app.run_test(size=SIZE, notifications=True) as pilot:
        app.notify("the last seconds are marked", timeout=60)
        await pilot.pause()
        assert "the last seconds are marked" in screen_text(app)
        await pilot.press(key)
        await pilot.pause()
        assert len(app.screen_stack) == 2
        assert all(not toast.visible for toast in app.screen.query("Toast"))
        await pilot.press("escape")
        await pilot.pause()
        assert "the last seconds are marked" in screen_text(app)


class EndedProgram:
    """A program of `cbtop run --watch` that has ended."""

    is_running = False

    def written(self) -> Sequence[str]:
        return ()

    def interrupt(self) -> None:
        raise AssertionError("an ended program cannot be interrupted")

    def resize(self, columns: int, rows: int) -> None:
        """Ignore the size."""


async def test_tabs_keep_their_names_when_the_watched_program_has_ended() -> None:
    feed = ScriptedFeed(samples.LIVE)
    feed.line = "python has ended with exit code 3"
    app = RunApp(feed, EndedProgram(), interval_s=60)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        text = screen_text(app)
        assert "  python has ended with exit code 3" in text
        assert all(f"{number} {view.title[:5]}" in text for number, view in enumerate(RunApp.SHOWN, 1))
