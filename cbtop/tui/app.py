"""The terminal dashboard: an app that polls a feed and draws the screen from the newest view models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import ContentSwitcher, Input

from cbtop import units
from cbtop.comparison.noise import MIN_BLOCKS
from cbtop.compute import engine
from cbtop.errors import CbtopError
from cbtop.protocol.errors import ProtocolError
from cbtop.text import time_text
from cbtop.text.row_filter import AS_THEY_COME
from cbtop.tui.background import AskingDriver, BackgroundTold, is_light_by_environment
from cbtop.tui.errand import READ_S
from cbtop.tui.feeds import AppFeed, HistoryFile
from cbtop.tui.in_browser import is_in_browser
from cbtop.tui.kernels import Kernels
from cbtop.tui.palette import KeysByName
from cbtop.tui.roofs import Roofs
from cbtop.tui.selection import Selection
from cbtop.tui.terminal_watch import TerminalWatch
from cbtop.tui.time_travel import AskBack, TimeTravel
from cbtop.tui.views import EVIDENCE, EVIDENCE_OF_VERDICT, VIEWS
from cbtop.tui.views.base import View
from cbtop.tui.views.bricks import Bricks
from cbtop.tui.views.graph import Graph
from cbtop.tui.views.header import Header, Heading, Notice
from cbtop.tui.views.help import HelpScreen
from cbtop.tui.views.layers import Layers
from cbtop.tui.views.overview import Overview
from cbtop.tui.views.sources import Sources
from cbtop.tui.views.time_bar import TimeBar
from cbtop.tui.views.welcome import Welcome
from cbtop.tui.widgets.changed import ChangedCellsScreen
from cbtop.tui.widgets.footer import KeyFooter
from cbtop.tui.widgets.lines import ROLES, Line, clean
from cbtop.tui.widgets.sorted_table import SortedTable
from cbtop.tui.widgets.tabs import TabBar
from cbtop.tui.widgets.themes import THEMES, theme_for
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.time_travel import ReplayView

INTERVALS_S = (0.25, 0.5, 1.0, 2.0, 5.0)


class CbtopApp(App[int]):
    """The dashboard: header, tabs, one view, footer.

    The result of the app is the exit code of the command.
    """

    TITLE = "cbtop"
    CSS_PATH = "cbtop.tcss"
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {KeysByName}
    AUTO_FOCUS = None
    COMPONENT_CLASSES: ClassVar[set[str]] = set(ROLES)
    SHOWN: ClassVar[tuple[type[View], ...]] = VIEWS
    # Whether the dashboard shows the newest running process until the user chooses one.
    FOLLOWS: ClassVar[bool] = True
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"view({number - 1})", view.title, show=False)
            for number, view in enumerate(VIEWS, 1)
        ),
        Binding("tab", "step_view(1)", "next view", show=False, priority=True),
        Binding("shift+tab", "step_view(-1)", "previous view", show=False, priority=True),
        Binding("p", "phase", "phase"),
        Binding("r", "recent", "window"),
        Binding("m", "merge", "merge: sum, slowest, side by side, off", show=False, tooltip="merge"),
        Binding("space", "pause", "pause"),
        Binding(
            "left_square_bracket",
            "steps(-1)",
            "back one step; what was told together is one",
            show=False,
            tooltip="look back",
        ),
        Binding("right_square_bracket", "steps(1)", "on one step", show=False),
        Binding("left_curly_bracket", "steps(-10)", "back ten steps", show=False),
        Binding("right_curly_bracket", "steps(10)", "on ten steps", show=False),
        Binding("left_parenthesis", "seek(-10)", "back 10 s", show=False),
        Binding("right_parenthesis", "seek(10)", "on 10 s", show=False),
        Binding(
            "v", "range", "a range begins here; it ends here, and every view is of it", show=False, tooltip="range"
        ),
        Binding("escape", "leave_range", "leave the range", show=False, priority=True),
        Binding(
            "escape", "leave_evidence", "from the evidence back to where it was opened", show=False, priority=True
        ),
        Binding("end", "now", "from a look back to now", show=False, priority=True),
        Binding("less_than_sign", "step_source(-1)", "previous source", show=False),
        Binding("greater_than_sign", "step_source(1)", "next source", show=False, tooltip="next source"),
        Binding("plus,equals_sign", "faster", "refresh more often", show=False),
        Binding("minus", "slower", "refresh less often", show=False),
        Binding(
            "b",
            "mark_baseline",
            "baseline: compare with the last seconds as they are now",
            show=False,
            tooltip="baseline",
        ),
        Binding("B", "clear_baseline", "no baseline", show=False),
        Binding("K", "kernels", "kernels: record those of its next 3 steps, for the graph", show=False),
        Binding("C", "measure_roofs", "roofs: measure those of this machine again, after a question", show=False),
        Binding("w", "save_history", "save the range, or the last minutes, to a file", show=False),
        Binding("e", "export", "export this view: screenshot, json, csv, md or txt", show=False, tooltip="export"),
        Binding("t", "tree", Graph.title, show=False),
        Binding("T", "theme", "theme: light or dark", show=False),
        Binding("ctrl+p", "command_palette", "every key by its name", show=False, tooltip="all keys"),
        Binding("question_mark,f1", "help", "help", key_display="?"),
        Binding("q", "quit", "quit"),
        Binding("ctrl+c,ctrl+q", "quit", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "suspend", show=False, priority=True),
    ]

    def __init__(
        self,
        feed: AppFeed,
        *,
        interval_s: float = 0.5,
        save_history: Callable[[], HistoryFile] | None = None,
        look_back: AskBack | None = None,
        section: str = "all",
    ) -> None:
        """Create the app. `section` names the report section that is shown as the first view (default: the overview).

        `save_history` writes the daemon's history to a file. `look_back` opens the history.
        """
        # In a browser, Textual takes the driver that TEXTUAL_DRIVER names.
        super().__init__(driver_class=None if is_in_browser() else AskingDriver)
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-tall")]
        for theme in THEMES:
            self.register_theme(theme)
        self._follows_terminal = False
        self._color_system: str | None = "truecolor"
        self._set_light(is_light=False)
        self.feed = feed
        self._save_history = save_history
        self._ask_back = look_back
        self.interval_s = interval_s
        self.paused = False
        self.source: SourceView | None = None
        self.selection = Selection(follows=self.FOLLOWS)
        self.phase: str | None = None
        self.window = True
        self.merge: MergeMode | None = None
        # key of the shown process if this process is missing in the daemon's history, otherwise None
        self._missed: str | None = None
        self.rows = AS_THEY_COME
        # The order of each table that `rows` does not sort: (title of the sort column, whether the largest values
        # come first).
        self.orders: dict[str, tuple[str, bool]] = {}
        self._tick_timer: Timer | None = None
        self._views: list[View] = []
        self._opened_from: list[int] = []  # the tabs from which Enter opened the next view, the first one first
        self._first = next((at for at, view in enumerate(self.SHOWN) if view.section == section), 0)

    def compose(self) -> ComposeResult:
        self._header = Header(id="header")
        self._notice = Notice(id="notice")
        self._tabs = TabBar([view.title for view in self.SHOWN], active=self._first, id="tabs")
        self._welcome = Welcome(install="" if engine.is_installed() else engine.INSTALL, id="welcome")
        self._views = [view(id=view.title.lower()) for view in self.SHOWN]
        self._kernels = Kernels(self, self._notice.show_progress, lambda: self.paused)
        self._roofs = Roofs(self, self._notice.show_progress)
        self._time_bar = TimeBar(id="time")
        self._travel = self._time_travel()
        yield self._header
        yield self._notice
        yield self._tabs
        self._switcher = ContentSwitcher(self._welcome, *self._views, initial="welcome", id="views")
        yield self._switcher
        yield KeyFooter(id="footer")
        yield self._time_bar

    def _time_travel(self) -> TimeTravel:
        return TimeTravel(
            self, self.show, self.arrive, self._notice.show_progress, self._source_key, ask=self._ask_back
        )

    def _source_key(self) -> str | None:
        """The key of the source that the screen shows."""
        return None if self.source is None else self.source.key

    @property
    def _shown_feed(self) -> AppFeed:
        """The feed on the screen: the recording if the user looks at the past, otherwise the live feed."""
        return self._travel.past or self.feed

    def get_default_screen(self) -> Screen[Any]:
        return ChangedCellsScreen(id="_default")

    def on_mount(self) -> None:
        # After ^Z and fg, the terminal is empty, so everything must be drawn again.
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        self._choose_rows()
        self.tick()
        self._tick_timer = self.set_interval(self.interval_s, self.tick)
        if not self.is_headless:
            TerminalWatch(self.leave_with).begin()
            if self._follows_terminal and isinstance(self._driver, AskingDriver):
                self._driver.ask_background()

    def choose_theme(self, name: str | None) -> None:
        """Set the theme `dark` or `light`. If `name` is None, follow the terminal's background."""
        self._follows_terminal, self._color_system = name is None, self.console.color_system
        self._set_light(is_light=is_light_by_environment() if name is None else name == "light")

    def _set_light(self, *, is_light: bool) -> None:
        self.theme = theme_for(self._color_system, is_light=is_light).name

    def on_background_told(self, event: BackgroundTold) -> None:
        if self._follows_terminal:
            self._set_light(is_light=event.is_light)

    def _choose_rows(self) -> None:
        for name, table in self._sorted_tables().items():
            if self.rows.sort:
                table.want(self.rows.sort)
            elif name in self.orders:
                table.want(self.orders[name][0], descending=self.orders[name][1])
        self.query_one(Bricks).look_for(self.rows.filter)

    def _sorted_tables(self) -> dict[str, SortedTable[Any]]:
        """The tables that the user can sort, by the `section` of their view."""
        return {view.section: table for view in self._views if isinstance(table := view.focus_target, SortedTable)}

    @property
    def chosen_orders(self) -> dict[str, tuple[str, bool]]:
        """The tables that the user has sorted, each with (title of the sort column, whether the largest values
        come first).
        """
        return {name: table.chosen for name, table in self._sorted_tables().items() if table.chosen is not None}

    def tick(self) -> None:
        """Poll the feed for new data. Update the screen, unless it is paused."""
        self.feed.poll()
        if (end := self.feed.finished()) is not None:
            self.exit(end.exit_code, return_code=end.exit_code)
        elif self.paused:
            self._look()
        else:
            self.show()

    def _look(self) -> None:
        """Select the newest process, unless the screen is paused or shows a merge. Tell the user about other new
        ones.
        """
        may_move = not self.paused and self.merge is None
        told = self.selection.look(self.feed.sources(), is_complete=self.feed.is_complete, may_move=may_move)
        if told:
            self.notify(told, timeout=READ_S, markup=False)

    def show(self) -> None:
        """Draw the screen from the newest view model."""
        self._look()
        self._follow_records()
        self._travel.hold()
        self.source = self._view()
        self._show_surroundings()
        self._show_content()

    def arrive(self) -> None:
        """Draw the screen for a new moment. First all views drop their cached pictures."""
        for view in self._views:
            view.let_go()
        self.show()

    def _follow_records(self) -> None:
        self._shown_feed.follow_records(self.SHOWN[self._tabs.active].needs_records)

    def _view(self) -> SourceView | None:
        feed, key = self._shown_feed, self.selection.key
        if feed is not self.feed and all(key != one.key for one in feed.sources()):
            if key != self._missed:
                self._missed = key
                self._travel.tell("the process that is shown now was not there then: another is", severity="warning")
            key = None
        if self.merge is None:
            return feed.view(key, self.phase, window=self.window)
        return feed.merged(self.merge, key, self.phase, window=self.window)

    def _show_surroundings(self) -> None:
        position = self.selection.position(self._shown_feed.sources())
        self._header.show_heading(Heading(self.source, self.paused, position, self.replay()))
        note: Line = (
            (f"every {time_text.seconds(self.interval_s)} · ", "faint"),
            (clean(self._shown_feed.status()), "dim"),
        )
        self._tabs.set_note(note)
        self._show_time()

    def _show_time(self) -> None:
        found = self._travel.time()
        if found is None and self.paused and self._travel.can_look_back:
            found = self.feed.watched()
        self._time_bar.show_time(found)

    def replay(self) -> ReplayView | None:
        """Return the position in the recording, or None if the screen shows live data."""
        past = self._travel.past
        return None if past is None else past.replay()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the keys that move in time while the help or the filter is open.

        Esc is also disabled without a range if no other view opened the view, and End while the screen is live.
        They keep their other meanings, such as closing the filter.
        """
        if action not in ("steps", "seek", "seek_to", "range", "leave_range", "leave_evidence", "now"):
            return True
        if (
            (action == "leave_range" and self._travel.chosen_s is None)
            or (action == "leave_evidence" and not self._opened_from)
            or (action == "now" and self._travel.past is None)
        ):
            return False
        is_covered = len(self.screen_stack) > 1 or isinstance(self.focused, Input)
        return None if is_covered else True

    def _show_content(self) -> None:
        source, view = self.source, self._views[self._tabs.active]
        is_empty = source is not None and not (source.has_data or source.graph)
        is_awaited = source is not None and (source.state == "live" or bool(source.loss.unread))
        if source is None or (is_empty and is_awaited and view.wants_data):
            self._notice.show_source(None, self.feed.refused)
            self._show_welcome(source)
            return
        self._notice.show_source(source, self.feed.refused)
        view.source = source
        self._show_view(view)

    def _show_welcome(self, source: SourceView | None) -> None:
        """Show the welcome screen. `source` is None or has no data yet."""
        self._switcher.current = "welcome"
        self._welcome.show(source, self.feed.status(), self.feed.refused, self.feed.starting)

    def _show_view(self, view: View) -> None:
        if self._switcher.current != view.id:
            self._switcher.current = view.id
            self.call_after_refresh(view.focus_target.focus)

    def action_view(self, index: int) -> None:
        """Show the view with this index in the list of tabs."""
        self._opened_from.clear()
        self._show_tab(index)

    def press_in_view(self, index: int, key: str) -> None:
        """Show the view with this index in the list of tabs, and press `key` there."""
        self.action_view(index)
        self.call_after_refresh(self.simulate_key, key)

    def _show_tab(self, index: int) -> None:
        self._tabs.set_active(index)
        self._follow_records()
        # A recording can provide the records of the paused moment at once. So show the records even if the screen is
        # paused.
        if self.SHOWN[index].needs_records and (self.replay() is not None or not self.paused):
            self.show()
        else:
            self._show_content()

    def action_step_view(self, steps: int) -> None:
        self.action_view((self._tabs.active + steps) % len(self.SHOWN))

    def on_tab_bar_chosen(self, event: TabBar.Chosen) -> None:
        self.action_view(event.index)

    def on_layers_opened(self, event: Layers.Opened) -> None:
        graph = next(view for view in self._views if isinstance(view, Graph))
        self._open_from_here(self._views.index(graph))
        graph.open_node(event.node)

    def on_overview_evidence_opened(self, event: Overview.EvidenceOpened) -> None:
        """Show the evidence of a row of the overview: its phase, its layer, its brick, or its device."""
        subject = event.subject
        if self.source is not None and subject.name in [steps.phase for steps in self.source.phases]:
            self.phase = subject.name
        index = self.SHOWN.index(EVIDENCE_OF_VERDICT.get(event.verdict, EVIDENCE[subject.kind]))
        self._open_from_here(index)
        if self.source is not None and self.source.phase != self.phase is not None:
            self.show()
        self._views[index].point_at(subject)

    def _open_from_here(self, index: int) -> None:
        """Show a view from which Esc comes back to the present one."""
        self._opened_from.append(self._tabs.active)
        self._show_tab(index)

    def action_leave_evidence(self) -> None:
        self._show_tab(self._opened_from.pop())

    def on_sources_source_chosen(self, event: Sources.SourceChosen) -> None:
        """Show only the chosen source in every view, and stop following the newest process."""
        self.selection.choose(event.key)
        self.merge = None
        self.show()

    def action_pause(self) -> None:
        """Pause the screen. If it is paused already, return to the present."""
        if self.paused:
            self.action_now()
        else:
            self._freeze()

    def _freeze(self) -> None:
        self.paused = True
        # While the screen is paused, the user may scroll or unfold any part, and it must show the paused moment. So
        # make all parts now.
        if self.source is not None:
            self.source = self.source.held()
        self._show_surroundings()
        self._show_content()

    def action_now(self) -> None:
        """Leave the pause and show the present."""
        self._missed = None
        is_elsewhere = self._travel.past is not None
        self._travel.leave()
        self.paused = False
        if is_elsewhere:
            self.arrive()
        else:
            self.show()

    def action_steps(self, steps: int) -> None:
        """Pause the screen, then move in time by `steps` steps of the shown process."""
        self._hold()
        self._travel.move_steps(steps)

    def action_seek(self, by_s: float) -> None:
        """Pause the screen, then move in time by `by_s` seconds."""
        self._hold()
        self._travel.move(by_s)

    def action_range(self) -> None:
        """Begin a time range at the shown moment.

        If a range has already begun, end it at the shown moment and show it.
        """
        self._hold()
        self._travel.mark()

    def action_leave_range(self) -> None:
        self._travel.leave_range()

    def _hold(self) -> None:
        if self._travel.can_look_back and not self.paused:
            self._freeze()

    def on_time_bar_time_chosen(self, event: TimeBar.TimeChosen) -> None:
        if self._travel.past is not None:
            self._travel.go_to(event.share * self._travel.past.duration_s)

    def action_phase(self) -> None:
        """Show the next phase, with current data even if the screen is paused."""
        if self.source is None or not self.source.phases:
            return
        phases = [steps.phase for steps in self.source.phases]
        at = phases.index(self.source.phase) if self.source.phase in phases else -1
        self.phase = phases[(at + 1) % len(phases)]
        self.show()

    def action_recent(self) -> None:
        """Switch between the statistics of the recent window and those since the start."""
        self.window = not self.window
        self.show()

    def action_mark_baseline(self) -> None:
        """Make the recent window the baseline for comparisons. An earlier baseline is dropped."""
        if self.source is None:
            self._tell_baseline("there is no process yet that could be compared with", severity="warning")
        elif self._shown_feed.mark_baseline(self.source.key):
            self.feed.baselines = self._shown_feed.baselines
            after = f"what follows is compared with them, from {MIN_BLOCKS} s of it on; B clears it"
            self._tell_baseline("the last seconds are marked", after)
            self.show()
        else:
            why = f"fewer than {MIN_BLOCKS} of the last seconds have steps: too few to tell a change from noise"
            self._tell_baseline(why, severity="warning")

    def action_clear_baseline(self) -> None:
        """Forget the baselines, so that nothing is compared with a baseline any longer."""
        for feed in (self.feed, self._shown_feed):
            feed.clear_baseline()
        self._tell_baseline("cleared")
        self.show()

    def _tell_baseline(self, *lines: str, severity: SeverityLevel = "information") -> None:
        self.notify("\n".join(lines), title="baseline", severity=severity, timeout=READ_S, markup=False)

    def action_merge(self) -> None:
        """Select the next merge mode: sum, slowest, side by side, or none. A merge combines all sources with the same
        model.
        """
        modes = (None, *MergeMode)
        mode = modes[(modes.index(self.merge) + 1) % len(modes)]
        if mode is not None and (why := self._why_not_merged(mode)):
            self.notify(clean(why), title="merge", severity="warning", markup=False)
            return
        self.merge = mode
        self.show()

    def _why_not_merged(self, mode: MergeMode) -> str:
        """Return why the shown source cannot be merged. Return "" if it can be merged."""
        found = self._shown_feed.merged(mode, self.selection.key, self.phase, window=self.window)
        if found is None:
            return "there is no process yet that could be merged"
        if self.merge is not None or found.merged is None or len(found.merged.members) > 1:
            return ""
        return f"{found.merged.members[0]} alone runs this model in this program: a merge needs two"

    def action_step_source(self, steps: int) -> None:
        """Show the source `steps` positions later in the list, and stop following the newest process."""
        self.selection.step(steps, self._shown_feed.sources())
        self.show()

    def action_faster(self) -> None:
        self._set_interval(max((step for step in INTERVALS_S if step < self.interval_s), default=INTERVALS_S[0]))

    def action_slower(self) -> None:
        self._set_interval(min((step for step in INTERVALS_S if step > self.interval_s), default=INTERVALS_S[-1]))

    def _set_interval(self, interval_s: float) -> None:
        self.interval_s = interval_s
        if self._tick_timer is not None:
            self._tick_timer.stop()
        self._tick_timer = self.set_interval(interval_s, self.tick)
        self._show_surroundings()

    def action_theme(self) -> None:
        self._follows_terminal = False
        self._set_light(is_light=self.current_theme.dark)

    def action_save_history(self) -> None:
        """Write the shown time range to a file. If no range is shown, write the daemon's history of the last minutes.

        A thread writes the file, because this may take long.
        """
        save_range = self._travel.saving()
        save, what = (
            (save_range, "the range is in") if save_range else (self._save_history, "the last minutes are in")
        )
        if save is not None:
            self.run_worker(partial(self._save, save, what), thread=True, group="history")

    def _save(self, save: Callable[[], HistoryFile], what: str) -> None:
        try:
            saved = save()
        except (CbtopError, ProtocolError) as error:
            show = partial(self.notify, clean(str(error)), severity="error", markup=False)
        else:
            text = f"{clean(str(saved.path))}, {units.size_bytes(saved.size_bytes)}"
            show = partial(self.notify, text, title=what, markup=False)
        self.call_from_thread(show)

    def action_kernels(self) -> None:
        self._kernels.begin(self.source, is_recording=self.replay() is not None)

    def action_measure_roofs(self) -> None:
        self._roofs.begin(self.source, is_recording=self.replay() is not None)

    def action_tree(self) -> None:
        self.action_view(self.SHOWN.index(Graph))

    def action_export(self) -> None:
        """Ask for a format and export the shown view to a file in the working directory."""
        # Imported here, because importing all reports would delay the first frame by a thirtieth of a second.
        from cbtop.tui.export import ask_and_export

        view = self._views[self._tabs.active]
        if self.source is not None and self._switcher.current == view.id:
            ask_and_export(self, view, self.source, self.replay())

    def action_help(self) -> None:
        shown = self.SHOWN[self._tabs.active]
        others = [view for view in self.SHOWN if view is not shown]
        self.push_screen(HelpScreen(Binding.make_bindings(self.BINDINGS), [shown, *others]))

    async def action_quit(self) -> None:
        self.exit(0)

    def leave_with(self, exit_code: int) -> None:
        """Leave the app, because the terminal is gone or a signal was received."""
        self.exit(exit_code, return_code=exit_code)
