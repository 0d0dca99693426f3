"""The terminal dashboard: a clock that polls a feed, and a screen drawn from the newest viewmodel."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.command import Provider
from textual.notifications import SeverityLevel
from textual.timer import Timer
from textual.widgets import ContentSwitcher
from textual.worker import get_current_worker

from cbtop import formatting
from cbtop.client.calibration import Calibration, why_not_measured
from cbtop.client.kernel_request import POLL_S, KernelRequest, own_source
from cbtop.errors import CbtopError
from cbtop.protocol.errors import ProtocolError
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.tui.export import ExportScreen, write_export
from cbtop.tui.palette import KeysByName
from cbtop.tui.selection import Selection
from cbtop.tui.views import VIEWS
from cbtop.tui.views.base import View
from cbtop.tui.views.graph import Graph
from cbtop.tui.views.header import Header, Heading, Notice
from cbtop.tui.views.help import HelpScreen
from cbtop.tui.views.layers import Layers
from cbtop.tui.views.welcome import Welcome
from cbtop.tui.widgets.footer import KeyFooter
from cbtop.tui.widgets.lines import ROLES, Line, clean
from cbtop.tui.widgets.tabs import TabBar
from cbtop.tui.widgets.themes import DARK, LIGHT
from cbtop.viewmodels.model import MergeMode, ReplayView, SourceSummary, SourceView

INTERVALS_S = (0.25, 0.5, 1.0, 2.0, 5.0)
TERMINAL_CHECK_S = 1.0
READ_S = 10.0  # how long what became of a request stays on the screen
LEAVE_WITHIN_S = 8.0  # stopping a demo's workload takes up to five of them
HANG_UP_EXIT = 129


class AppFeedEnd(Protocol):
    """The workload this app was started for has failed; saying why is left to whoever started the app."""

    @property
    def exit_code(self) -> int: ...


class SavedHistory(Protocol):
    """A file made of what the daemon remembered."""

    @property
    def path(self) -> Path: ...

    @property
    def size_bytes(self) -> int: ...


class AppFeed(Protocol):
    """Where the numbers come from. No call blocks."""

    def poll(self) -> None:
        """Take in what has arrived. Called every tick, also while the screen is paused."""

    def sources(self) -> tuple[SourceSummary, ...]:
        """Every source seen, in a stable order."""

    def view(self, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        """Source `key` (None: the newest live one) in `phase` (None: the default); None: none seen yet.

        Its statistics are of all that was seen, or of the `window`, the last seconds.
        """

    def merged(self, mode: MergeMode, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        """All sources like `key` as one."""

    def follow_records(self, on: bool) -> None:
        """Receive every record too, as a timeline needs them, or no more."""

    @property
    def is_complete(self) -> bool:
        """Whether all that runs has been told; what comes later has started since."""

    def status(self) -> str:
        """One line about the link."""

    @property
    def refused(self) -> str:
        """Why the daemon does not take us, or we not its messages; empty when all is well or may yet be."""

    def finished(self) -> AppFeedEnd | None:
        """Not None when the workload this app was started for has failed."""


class CbtopApp(App[int]):
    """Header, tabs, one view, footer. The result is the exit code."""

    TITLE = "cbtop"
    CSS_PATH = "cbtop.tcss"
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {KeysByName}
    AUTO_FOCUS = None
    COMPONENT_CLASSES: ClassVar[set[str]] = set(ROLES)
    SHOWN: ClassVar[tuple[type[View], ...]] = VIEWS
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(number), f"view({number - 1})", view.title, show=False)
            for number, view in enumerate(VIEWS, 1)
        ),
        Binding("tab", "step_view(1)", "next view", show=False, priority=True),
        Binding("shift+tab", "step_view(-1)", "previous view", show=False, priority=True),
        Binding("p", "phase", "phase"),
        Binding("r", "recent", "window"),
        Binding("m", "merge", "merge: sum, slowest, side by side, off", show=False),
        Binding("space", "pause", "pause"),
        Binding("less_than_sign", "step_source(-1)", "previous source", show=False),
        Binding("greater_than_sign", "step_source(1)", "next source", show=False),
        Binding("plus,equals_sign", "faster", "refresh more often", show=False),
        Binding("minus", "slower", "refresh less often", show=False),
        Binding("K", "kernels", "kernels: record those of its next 3 steps, for the graph", show=False),
        Binding("C", "measure_roofs", "roofs: measure those of this machine again, seconds at work", show=False),
        Binding("w", "save_history", "write the last minutes to a file", show=False),
        Binding("e", "export", "export this view: svg, json, csv, md or txt", show=False),
        Binding("t", "tree", Graph.title, show=False),
        Binding("T", "theme", "light or dark", show=False),
        Binding("ctrl+p", "command_palette", "every key by its name", show=False),
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
        save_history: Callable[[], SavedHistory] | None = None,
        section: str = "all",
    ) -> None:
        """`section` of a report is the view that opens first; the overview where none shows that."""
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-tall")]
        for theme in (DARK, LIGHT):
            self.register_theme(theme)
        self.theme = DARK.name
        self.feed = feed
        self._save_history = save_history
        self.interval_s = interval_s
        self.paused = False
        self.source: SourceView | None = None
        self.selection = Selection()
        self.phase: str | None = None
        self.window = True
        self.merge: MergeMode | None = None
        self._tick_timer: Timer | None = None
        self._first = next((at for at, view in enumerate(self.SHOWN) if view.section == section), 0)

    def compose(self) -> ComposeResult:
        self._header = Header(id="header")
        self._notice = Notice(id="notice")
        self._tabs = TabBar([view.title for view in self.SHOWN], active=self._first, id="tabs")
        self._welcome = Welcome(id="welcome")
        self._views = [view(id=view.title.lower()) for view in self.SHOWN]
        yield self._header
        yield self._notice
        yield self._tabs
        self._switcher = ContentSwitcher(self._welcome, *self._views, initial="welcome", id="views")
        yield self._switcher
        yield KeyFooter(id="footer")

    def on_mount(self) -> None:
        # After ^Z and fg the terminal is empty: what has not changed must be drawn too.
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        self.tick()
        self._tick_timer = self.set_interval(self.interval_s, self.tick)
        if not self.is_headless:
            # An exception out of a signal handler is lost where Python ignores exceptions, as in a `__del__`.
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, self.leave_with, 128 + number)
            leave = partial(asyncio.get_running_loop().call_soon_threadsafe, self.leave_with, HANG_UP_EXIT)
            threading.Thread(target=watch_terminal, args=(leave,), name="cbtop-terminal", daemon=True).start()

    def tick(self) -> None:
        """Take in what arrived and, unless paused, show it."""
        self.feed.poll()
        if (end := self.feed.finished()) is not None:
            self.exit(end.exit_code, return_code=end.exit_code)
        elif self.paused:
            self._look()
        else:
            self.show()

    def _look(self) -> None:
        """Stay with the process shown, and tell what became of it or of others."""
        if told := self.selection.look(self.feed.sources(), is_complete=self.feed.is_complete):
            self.notify(told, timeout=READ_S, markup=False)

    def show(self) -> None:
        """Draw the newest viewmodel."""
        self._look()
        self._follow_records()
        self.source = self._view()
        self._show_surroundings()
        self._show_content()

    def _follow_records(self) -> None:
        self.feed.follow_records(self.SHOWN[self._tabs.active].needs_records)

    def _view(self) -> SourceView | None:
        if self.merge is None:
            return self.feed.view(self.selection.key, self.phase, window=self.window)
        return self.feed.merged(self.merge, self.selection.key, self.phase, window=self.window)

    def _show_surroundings(self) -> None:
        position = self.selection.position(self.feed.sources())
        self._header.show_heading(Heading(self.source, self.paused, position, self.replay()))
        note: Line = (
            (clean(self.feed.status()), "dim"),
            (f" · every {formatting.seconds(self.interval_s)}", "faint"),
        )
        self._tabs.set_note(note)

    def replay(self) -> ReplayView | None:
        """Where in which recording we are; None: what is shown happens now."""
        return None

    def _show_content(self) -> None:
        source = self.source
        if source is None or (not (source.has_data or source.graph) and source.state == "live"):
            self._notice.show_source(None, self.feed.refused)
            self._show_welcome(source)
            return
        self._notice.show_source(source, self.feed.refused)
        view = self._views[self._tabs.active]
        view.source = source
        self._show_view(view)

    def _show_welcome(self, source: SourceView | None) -> None:
        """There is nothing to show yet, of `source` or of anybody."""
        self._switcher.current = "welcome"
        self._welcome.show(source, self.feed.status(), self.feed.refused)

    def _show_view(self, view: View) -> None:
        if self._switcher.current != view.id:
            self._switcher.current = view.id
            self.call_after_refresh(view.focus_target.focus)

    def action_view(self, index: int) -> None:
        """Show the view `index`."""
        self._tabs.set_active(index)
        self._follow_records()
        # A recording has the records of its moment at once, also where it is held.
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
        self.action_view(self._views.index(graph))
        graph.open_node(event.node)

    def action_pause(self) -> None:
        """Freeze the screen, or let it go on. The feed is polled all the same."""
        self.paused = not self.paused
        if self.paused:
            if self.source is not None:  # what is scrolled or unfolded into sight meanwhile is of this moment, too
                self.source = replace(self.source, graph=tuple(self.source.graph))
            self._show_surroundings()
            self._show_content()
        else:
            self.show()

    def action_phase(self) -> None:
        """Show the next phase of the steps; a paused screen shows it as it is now."""
        if self.source is None or not self.source.phases:
            return
        phases = [steps.phase for steps in self.source.phases]
        at = phases.index(self.source.phase) if self.source.phase in phases else -1
        self.phase = phases[(at + 1) % len(phases)]
        self.show()

    def action_recent(self) -> None:
        """Show all that was seen instead of the last seconds, or the other way round."""
        self.window = not self.window
        self.show()

    def action_merge(self) -> None:
        """Show all that run the same model as one: the sum, the slowest, side by side, and then one alone again."""
        modes = (None, *MergeMode)
        mode = modes[(modes.index(self.merge) + 1) % len(modes)]
        if mode is not None and (why := self._why_not_merged(mode)):
            self.notify(clean(why), title="merge", severity="warning", markup=False)
            return
        self.merge = mode
        self.show()

    def _why_not_merged(self, mode: MergeMode) -> str:
        """Why what is shown cannot be merged; empty where it is one of several."""
        found = self.feed.merged(mode, self.selection.key, self.phase, window=self.window)
        if found is None:
            return "there is no process yet that could be merged"
        if self.merge is not None or found.merged is None or len(found.merged.members) > 1:
            return ""
        return f"{found.merged.members[0]} alone runs this model in this program: a merge needs two"

    def action_step_source(self, steps: int) -> None:
        """Show the next source, and stay with it."""
        self.selection.step(steps, self.feed.sources())
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
        self.theme = LIGHT.name if self.theme == DARK.name else DARK.name

    def action_save_history(self) -> None:
        """Write what the daemon remembers into a file. It takes a while: a thread waits for it."""
        if self._save_history is not None:
            self.run_worker(partial(self._save, self._save_history), thread=True, group="history", exclusive=True)

    def _save(self, save: Callable[[], SavedHistory]) -> None:
        try:
            saved = save()
        except (CbtopError, ProtocolError) as error:
            say = partial(self.notify, clean(str(error)), severity="error", markup=False)
        else:
            text = f"{clean(str(saved.path))}, {formatting.size_bytes(saved.size_bytes)}"
            say = partial(self.notify, text, title="the last minutes are in", markup=False)
        self.call_from_thread(say)

    def action_kernels(self) -> None:
        """Ask the process shown for the kernels of its next steps. It takes a while: a thread waits for it."""
        if why := self._why_not_asked():
            self._tell_kernels(why, severity="warning")
        elif self.source is not None:
            self.run_worker(partial(self._ask_kernels, self.source.key), thread=True, group="kernels")

    def _why_not_asked(self) -> str:
        """Why what is shown cannot be asked for its kernels; empty where it may be."""
        source = self.source
        if self.replay() is not None:
            return "this is a recording: only a process that is live can be asked"
        if source is None:
            return "there is no process yet that could be asked"
        if source.merged is not None:
            return "these are several processes, and one alone is asked: press m until one is shown"
        if source.state != SourceStatus.LIVE:
            return f"pid {source.pid} is {source.state}: only a process that is live can be asked"
        if any(worker.group == "kernels" and not worker.is_finished for worker in self.workers):
            return "one process is being asked already"
        return ""

    def _ask_kernels(self, key: str) -> None:
        worker = get_current_worker()
        shown: tuple[str, float | None] = "", None
        try:
            with closing(own_source(key)) as source, KernelRequest(source) as request:
                while (found := request.poll()) is None:
                    if worker.is_cancelled:  # nobody looks any more
                        return
                    if shown != (request.status, request.done):
                        shown = request.status, request.done
                        self.call_from_thread(self._notice.show_progress, *shown)
                    worker.cancelled_event.wait(POLL_S)
        except (CbtopError, ProtocolError, OSError) as error:
            tell = partial(self._tell_kernels, str(error), severity="error")
        else:
            after = ", after Space" if self.paused else ""
            where = f"Graph shows them under their bricks{after}: Enter unfolds one" if found.phases else ""
            tell = partial(self._tell_kernels, *formatting.burst(found), *formatting.burst_notes(found), where)
        self.call_from_thread(self._notice.show_progress, "")
        self.call_from_thread(tell)

    def _tell_kernels(self, *lines: str, severity: SeverityLevel = "information") -> None:
        text = "\n".join(clean(line) for line in lines if line)
        self.notify(text, title="kernels", severity=severity, timeout=READ_S, markup=False)

    def action_measure_roofs(self) -> None:
        """Measure the roofs over the process shown again. It takes a while: a thread waits for it."""
        if why := self._why_not_measured():
            self._tell_roofs(why, severity="warning")
        elif self.source is not None:
            self.run_worker(partial(self._measure_roofs, self.source), thread=True, group="roofs")

    def _why_not_measured(self) -> str:
        """Why the roofs over what is shown cannot be measured; empty where they can."""
        if self.replay() is not None:
            return "this is a recording: its roofs are those of then"
        if self.source is None:
            return "there is no process yet whose roofs could be measured"
        if any(worker.group == "roofs" and not worker.is_finished for worker in self.workers):
            return "they are being measured already"
        return why_not_measured(self.source)

    def _measure_roofs(self, source: SourceView) -> None:
        worker = get_current_worker()
        shown = ""
        try:
            with Calibration(source) as calibration:
                while (found := calibration.poll()) is None:
                    if worker.is_cancelled:  # nobody looks any more
                        return
                    if shown != calibration.status:
                        shown = calibration.status
                        self.call_from_thread(self._notice.show_progress, shown)
                    worker.cancelled_event.wait(POLL_S)
        except (CbtopError, OSError) as error:
            tell = partial(self._tell_roofs, str(error), severity="error")
        else:
            later = "" if source.roofline.ceilings else "programs that start from now on are shown under them"
            tell = partial(self._tell_roofs, *(" ".join(line.split()) for line in found), later)
        self.call_from_thread(self._notice.show_progress, "")
        self.call_from_thread(tell)

    def _tell_roofs(self, *lines: str, severity: SeverityLevel = "information") -> None:
        text = "\n".join(clean(line) for line in lines if line)
        self.notify(text, title="roofs", severity=severity, timeout=READ_S, markup=False)

    def action_tree(self) -> None:
        self.action_view(self.SHOWN.index(Graph))

    def action_export(self) -> None:
        """Ask in which format, and write the view shown into the working directory."""
        view = self._views[self._tabs.active]
        if self.source is not None and self._switcher.current == view.id:
            picture = self.export_screenshot(title=f"cbtop {view.title}")
            self.push_screen(ExportScreen(), partial(self._export, view, self.source, picture))

    def _export(self, view: View, source: SourceView, picture: str, kind: str | None) -> None:
        if kind is None:
            return
        try:
            path = write_export(kind, view, source, self.replay(), picture)
        except (CbtopError, OSError) as error:
            self.notify(clean(str(error)), severity="error", markup=False)
        else:
            self.notify(clean(str(path)), title=f"{view.title} is in", timeout=READ_S, markup=False)

    def action_help(self) -> None:
        shown = self.SHOWN[self._tabs.active]
        others = [view for view in self.SHOWN if view is not shown]
        self.push_screen(HelpScreen(Binding.make_bindings(self.BINDINGS), [shown, *others]))

    async def action_quit(self) -> None:
        self.exit(0)

    def leave_with(self, exit_code: int) -> None:
        """Leave because the terminal is gone, or a signal asks for it."""
        self.exit(exit_code, return_code=exit_code)


def watch_terminal(leave: Callable[[], object]) -> None:
    """Runs in a thread: once stdin is no terminal any more, call `leave`, and end the process if it cannot.

    On a dead terminal Textual's input spins for ever; its output stops, and whoever writes next blocks for ever,
    also the event loop on its way out. There is nothing left to restore then, and nobody to restore it for.
    """
    while os.isatty(0):
        time.sleep(TERMINAL_CHECK_S)
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for descriptor in (1, 2):  # or what is still to be written fails as Python ends, whose exit code is then 120
        os.dup2(nowhere, descriptor)
    with suppress(RuntimeError):  # the loop is closed: the app has left already
        leave()
    time.sleep(LEAVE_WITHIN_S)
    os._exit(HANG_UP_EXIT)
