"""What every view is: a title, a text for the help, and a source to draw."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from textual.containers import Vertical
from textual.reactive import var
from textual.widget import Widget

from cbtop.tui.widgets.columns import Cells
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.table import Table
from cbtop.viewmodels.model import SourceView


class View(Vertical):
    """One screenful. It draws the viewmodel it is given and knows nothing of where that comes from."""

    title: ClassVar[str]
    doc: ClassVar[str]  # for the help: one paragraph
    columns_doc: ClassVar[tuple[tuple[str, str], ...]] = ()  # for the help: what each column says
    details_doc: ClassVar[tuple[tuple[str, str], ...]] = ()  # and what opens with its details
    section: ClassVar[str] = "all"  # what a text report calls it
    wants_data: ClassVar[bool] = True  # whether it has nothing to show of a process that has recorded nothing yet
    needs_records: ClassVar[bool] = False  # each record, not only what they add up to

    # A reactive would repaint every line: the drawings know which changed. To compare it would make all of it.
    source: var[SourceView | None] = var(None, always_update=True)

    def watch_source(self, source: SourceView | None) -> None:
        if source is not None and self.is_mounted:
            self.show_source(source)

    def on_mount(self) -> None:
        if self.source is not None:
            self.show_source(self.source)

    @abstractmethod
    def show_source(self, source: SourceView) -> None:
        """Put the numbers of `source` on the screen."""

    def let_go(self) -> None:
        """Show what is of now again where a key has held something: the screen went elsewhere in time."""

    def cells(self) -> Cells | None:
        """Its table as text; None where it has none."""
        table = self.focus_target
        return table.cells if isinstance(table, Table) else None

    @property
    def focus_target(self) -> Widget:
        """What gets the keys while this view is shown."""
        return self


class SourceDrawing(Drawing):
    """A drawing made from one source and nothing else; subclasses draw `_source`, None until the first came."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._source: SourceView | None = None

    def show_source(self, source: SourceView) -> None:
        """Draw `source` from now on."""
        self._source = source
        self.redraw()
