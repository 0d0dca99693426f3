"""The view of the output of the program that was started with the screen. The user can scroll it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import chop_cells
from textual.app import ComposeResult
from textual.widget import Widget

from cbtop.tui.views.base import View
from cbtop.tui.widgets.lines import Line, clean
from cbtop.tui.widgets.pager import Page, Pager
from cbtop.viewmodels.source import SourceView


class OutputPage(Page):
    """The lines of the program's output, wrapped to the width of the page."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._written: Sequence[str] = ()
        self._rows: tuple[int, Sequence[str], list[Line]] = (0, (), [])

    def show(self, written: Sequence[str]) -> None:
        self._written = written
        self.refresh(layout=True)
        self.redraw()

    def text(self, width: int) -> Sequence[Line]:
        if self._rows[:2] != (width, self._written):
            rows = (row for line in self._written for row in chop_cells(clean(line), max(1, width)) or [""])
            nothing: Line = (("nothing was written yet", "dim"),)
            self._rows = width, self._written, [((row, ""),) for row in rows] or [nothing]
        return self._rows[2]


class Output(View):
    """The view of the program's newest output. It shows the end of the output until the user scrolls up."""

    title = "Output"
    doc = (
        "What the program writes to stdout and stderr, which are a terminal of its own; colours are left out. The "
        "newest lines are kept, and printed where this screen was when it closes."
    )

    def compose(self) -> ComposeResult:
        with Pager(id="output-pager") as self._pager:
            self._page = OutputPage(id="output-page")
            yield self._page

    @property
    def focus_target(self) -> Widget:
        return self._pager

    def show_source(self, source: SourceView) -> None:
        """Do nothing, because this view shows only the output of a program."""

    def show_written(self, written: Sequence[str]) -> None:
        """Show these lines of output. If the end of the output was visible, scroll to the new end."""
        follows = self._pager.is_vertical_scroll_end
        self._page.show(written)
        if follows:
            self._pager.scroll_end(animate=False)
