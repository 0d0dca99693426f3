"""The dashboard for a program that cbtop has started. It has the usual views, and a view of the program's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from textual.binding import Binding, BindingType
from textual.events import Resize

from cbtop.tui.app import CbtopApp
from cbtop.tui.feeds import AppFeed, HistoryFile
from cbtop.tui.time_travel import AskBack
from cbtop.tui.views import VIEWS
from cbtop.tui.views.output import Output
from cbtop.viewmodels.source import SourceView

# The first Ctrl-C interrupts the started program. The app cannot be suspended, because it must read the program's
# output.
_NOT_OURS = ("quit", "suspend_process")


class AppProgram(Protocol):
    """The program that the app has started. It runs on a pseudo-terminal of its own."""

    @property
    def is_running(self) -> bool: ...

    def written(self) -> Sequence[str]:
        """Return the newest lines of the program's output.

        Without new output, return the same object as in the last call.
        """

    def interrupt(self) -> None:
        """Interrupt the program, as Ctrl-C on the program's terminal does."""

    def resize(self, columns: int, rows: int) -> None:
        """Set the size of the pseudo-terminal on which the program runs."""


class RunApp(CbtopApp, inherit_bindings=False):
    """The dashboard for a started program. If the user leaves it, the program continues on the terminal."""

    SHOWN = (*VIEWS, Output)
    BINDINGS: ClassVar[list[BindingType]] = [
        *(each for each in CbtopApp.BINDINGS if not (isinstance(each, Binding) and each.action in _NOT_OURS)),
        Binding(str(len(SHOWN)), f"view({len(SHOWN) - 1})", Output.title, show=False),
        Binding("ctrl+c", "interrupt", "interrupt the program; when it has ended, quit", priority=True, show=False),
        Binding("q", "quit", "quit"),
        Binding("ctrl+q", "quit", "quit", show=False, priority=True),
    ]

    def __init__(
        self,
        feed: AppFeed,
        program: AppProgram,
        *,
        interval_s: float = 0.5,
        save_history: Callable[[], HistoryFile] | None = None,
        look_back: AskBack | None = None,
        section: str = "all",
    ) -> None:
        super().__init__(feed, interval_s=interval_s, save_history=save_history, look_back=look_back, section=section)
        self._program = program
        self._written: Sequence[str] = ()

    def show(self) -> None:
        super().show()
        written = self._program.written()
        if written is not self._written:
            self._written = written
            self.query_one(Output).show_written(written)

    def _show_surroundings(self) -> None:
        super()._show_surroundings()
        if not self._program.is_running:
            self._notice.show_end(self.feed.status())

    def on_resize(self, event: Resize) -> None:
        self._program.resize(event.size.width, event.size.height)

    def _show_welcome(self, source: SourceView | None) -> None:
        """Show the program's output, because no process has data yet."""
        self._show_view(self.query_one(Output))

    async def action_interrupt(self) -> None:
        if self._program.is_running:
            self._program.interrupt()
        else:
            await self.action_quit()
