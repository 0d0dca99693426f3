"""The base class of all views. A view has a title and a help text, and draws a source."""

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
from cbtop.viewmodels.verdict import Subject


class View(Vertical):
    """A view fills the screen between the tabs and the footer. It draws view models, from live data or from a
    recording.
    """

    title: ClassVar[str]
    doc: ClassVar[str]  # a paragraph about the view for the help
    columns_doc: ClassVar[tuple[tuple[str, str], ...]] = ()  # the columns of the view for the help: (name, meaning)
    details_doc: ClassVar[tuple[tuple[str, str], ...]] = ()  # the details of the view for the help: (name, meaning)
    section: ClassVar[str] = "all"  # name of the section in a text report that corresponds to the view
    wants_data: ClassVar[bool] = True  # whether the view is only useful for a process with recorded data
    needs_records: ClassVar[bool] = False  # whether the view needs every single record, and not only statistics

    # Not a Textual reactive, for two reasons. A reactive would repaint all lines, although drawings know which have
    # changed. And it would compare sources, which makes all their lazy parts.
    source: var[SourceView | None] = var(None, always_update=True)

    def watch_source(self, source: SourceView | None) -> None:
        if source is not None and self.is_mounted:
            self.show_source(source)

    def on_mount(self) -> None:
        if self.source is not None:
            self.show_source(self.source)

    @abstractmethod
    def show_source(self, source: SourceView) -> None:
        """Show the data of this source from now on."""

    def let_go(self) -> None:
        """Drop data that the user has frozen by a key, because the screen moves in time."""

    def point_at(self, subject: Subject) -> None:
        """Move the cursor of the view to `subject`, if the view has a row for it."""

    def cells(self) -> Cells | None:
        """Return the view's table as text, or None if the view has no table."""
        table = self.focus_target
        return table.cells if isinstance(table, Table) else None

    @property
    def focus_target(self) -> Widget:
        """The widget that gets the keys while this view is shown."""
        return self


class SourceDrawing(Drawing):
    """A widget that draws one source. Subclasses draw `_source`, which is None until the first source arrives."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._source: SourceView | None = None

    def show_source(self, source: SourceView) -> None:
        """Draw `source` from now on, and no longer the previous source."""
        self._source = source
        self.redraw()
