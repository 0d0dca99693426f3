"""The base of all views: a title, a help text, and a source to draw."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from textual.containers import Vertical
from textual.reactive import var
from textual.widget import Widget

from cbtop.tui.widgets.columns import Cells
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.table import Table
from cbtop.viewmodels.source import SourceView


class View(Vertical):
    """One screenful. It draws the view model it is given and does not know where that comes from."""

    title: ClassVar[str]
    doc: ClassVar[str]  # one paragraph for the help
    columns_doc: ClassVar[tuple[tuple[str, str], ...]] = ()  # for the help: the meaning of each column
    details_doc: ClassVar[tuple[tuple[str, str], ...]] = ()  # for the help: the meaning of details
    section: ClassVar[str] = "all"  # its name in a text report
    wants_data: ClassVar[bool] = True  # whether it needs a process with recorded data
    needs_records: ClassVar[bool] = False  # needs every record, not only statistics

    # Not a reactive, which would repaint every line; drawings know what changed. Comparing would make all parts.
    source: var[SourceView | None] = var(None, always_update=True)

    def watch_source(self, source: SourceView | None) -> None:
        if source is not None and self.is_mounted:
            self.show_source(source)

    def on_mount(self) -> None:
        if self.source is not None:
            self.show_source(self.source)

    @abstractmethod
    def show_source(self, source: SourceView) -> None:
        """Show the data of `source`."""

    def let_go(self) -> None:
        """Drop what a key has held, because the screen moved in time."""

    def cells(self) -> Cells | None:
        """Return its table as text, or None if it has none."""
        table = self.focus_target
        return table.cells if isinstance(table, Table) else None

    @property
    def focus_target(self) -> Widget:
        """The widget that gets the keys while this view is shown."""
        return self


class SourceDrawing(Drawing):
    """A drawing made from one source only. Subclasses draw `_source`, which is None until the first arrives."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._source: SourceView | None = None

    def show_source(self, source: SourceView) -> None:
        """Draw `source` from now on."""
        self._source = source
        self.redraw()
