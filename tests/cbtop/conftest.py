"""Fixtures for tests of the screen: a feed that the test controls, and the screen as plain text."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual._context import active_app
from textual.app import App
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.widgets import ContentSwitcher

from cbtop.comparison.baseline import Snapshot
from cbtop.comparison.comparison import Comparison
from cbtop.feeds.feed import FeedEnd
from cbtop.tui.app import CbtopApp
from cbtop.viewmodels.graph import GraphRow
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.merged import MergedView
from cbtop.viewmodels.source import SourceSummary, SourceView
from cbtop.viewmodels.time_travel import TimeView
from tests.cbtop import samples

GOLDENS = Path(__file__).parent / "tui" / "views" / "goldens"


@pytest.fixture(autouse=True, scope="session")
def _rules_are_parsed_once() -> Iterator[None]:
    """Cache the parsed style rules, because parsing them for each app takes 20 % of a screen test."""
    parse, parsed = Stylesheet._parse_rules, dict[tuple[object, ...], list[RuleSet]]()

    def of_text(self: Stylesheet, *text: Any, **of: Any) -> list[RuleSet]:
        key = text, (*of.items(),), (*self._variables.items(),)
        if key not in parsed:
            parsed[key] = parse(self, *text, **of)
        return parsed[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Stylesheet, "_parse_rules", of_text)
        yield


async def _until_nothing_is_left(min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """Wait until all messages are processed and drawn. Give up after `max_sleep` seconds."""
    loop, app, ends_s = asyncio.get_running_loop(), active_app.get(), time.monotonic() + max_sleep
    while time.monotonic() < ends_s:
        await asyncio.sleep(0)
        if loop._ready:  # type: ignore[attr-defined]
            continue
        if not app.screen_stack:
            return
        screen = app.screen
        if app._resize_event is not None:
            app._check_resize()
        elif (
            screen._dirty_widgets or screen._layout_required or screen._scroll_required or screen._repaint_required
            or screen._recompose_required or screen._callbacks
        ):  # fmt: skip
            screen._on_timer_update()  # Textual calls this function 120 times per second.
        else:
            return


@pytest.fixture(autouse=True, scope="session")
def _keys_wait_for_no_clock() -> Iterator[None]:
    """Replace the waits of Textual after a key by waits for events.

    After each key, Textual sleeps two or three times for 20 ms until the process is idle. These sleeps took two
    thirds of the time of a screen test, and are too short on a busy machine.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("textual.app.wait_for_idle", _until_nothing_is_left)
        patched.setattr("textual.pilot.wait_for_idle", _until_nothing_is_left)
        yield


class ScriptedFeed:
    """A feed that returns the views in `seen` and counts its calls."""

    def __init__(self, *seen: SourceView) -> None:
        self.seen = list(seen)
        self.polls = 0
        self.line = "ipc:///run/user/1000/cbtop/daemon.sock"
        self.refused = ""
        self.starting = ""
        self.is_complete = True
        self.end: FeedEnd | None = None
        self.baseline: Comparison | None = None  # result of marking a baseline; None: too few steps for a baseline
        self.baselines: Sequence[Snapshot] = ()
        self.marked: list[str] = []
        self.time: TimeView | None = None
        self.follows_records = False

    def poll(self) -> None:
        self.polls += 1

    def sources(self) -> tuple[SourceSummary, ...]:
        return tuple(SourceSummary(view.key, view.program, view.state) for view in self.seen)

    def view(self, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        shown = samples.RECENT.window if window else None
        wanted = [replace(view, window=shown) for view in self.seen if key in (None, view.key)]
        if self.marked:
            wanted = [replace(view, baseline=self.baseline) for view in wanted]
        if not wanted:
            return None
        if phase == "prefill":
            return replace(wanted[0], phase="prefill", steps=samples.PREFILL)
        return wanted[0]

    def merged(self, mode: MergeMode, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        view = self.view(key, phase, window=window)
        if view is None:
            return None
        names, keys = (tuple(f"pid {seen.pid}" for seen in self.seen), tuple(seen.key for seen in self.seen))
        return replace(view, merged=MergedView(mode, names, keys, left_out=0))

    def mark_baseline(self, key: str) -> bool:
        self.marked += [key] if self.baseline else []
        return self.baseline is not None

    def clear_baseline(self) -> None:
        self.marked.clear()

    def follow_records(self, on: bool) -> None:
        self.follows_records = on

    def watched(self) -> TimeView | None:
        return self.time

    def status(self) -> str:
        return self.line

    def finished(self) -> FeedEnd | None:
        return self.end


@pytest.fixture
def feed() -> ScriptedFeed:
    return ScriptedFeed(samples.LIVE)


class KnownCost:
    """Fixed numbers instead of the measured cost of this viewer."""

    cpu_percent, over_s, resident_bytes = 3.42, 10.0, 84_100_000

    def tick(self) -> None:
        pass


@pytest.fixture
def known_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the cost of the viewer by fixed numbers, because stored screens (goldens) show it."""
    monkeypatch.setattr("cbtop.feeds.feed.OwnCost", KnownCost)


def screen_text(app: CbtopApp) -> str:
    """Return the text of the screen without colours and trailing blanks."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips) + "\n"


def toasts(app: App[Any]) -> list[str]:
    """Return the titles and texts of the toasts on the screen, the newest last.

    Toasts are shown only with `run_test(notifications=True)`. Without this argument, NoMatches is raised.
    """
    return [str(toast.render()) for toast in app.screen.query_one("ToastRack").query("Toast")]


def view_of(app: CbtopApp) -> str | None:
    """Return the id of the view on the screen."""
    return app.query_one("#views", ContentSwitcher).current


@pytest.fixture
def rows_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the node of each graph row that is computed."""
    made: list[int] = []
    begin = GraphRow.__init__

    def noted(row: GraphRow, *values: Any, **named: Any) -> None:
        begin(row, *values, **named)
        made.append(row.id)

    monkeypatch.setattr(GraphRow, "__init__", noted)
    return made


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare the text with a stored file in views/goldens. With CBTOP_UPDATE_GOLDENS=1, write this file."""

    def compare(name: str, text: str) -> None:
        path = GOLDENS / f"{name}.txt"
        if os.environ.get("CBTOP_UPDATE_GOLDENS") == "1":
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path.name} is missing; CBTOP_UPDATE_GOLDENS=1 writes it"
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Show local times in UTC."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()
