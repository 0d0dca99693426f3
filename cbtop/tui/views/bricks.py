"""The view of bricks: a table sorted by exclusive time, the time breakdown of a step, and the details of
one brick.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.events import Resize
from textual.widget import Widget
from textual.widgets import Input

from cbtop.text import recording_text, roof_text
from cbtop.text.row_filter import words_of
from cbtop.text.statistics import BRICK_PANEL
from cbtop.tui.views.all_bricks import LEAST_LINES as ALL_BRICKS_LINES
from cbtop.tui.views.all_bricks import AllBricks
from cbtop.tui.views.base import View
from cbtop.tui.views.books import TimeBreakdownPanel
from cbtop.tui.views.brick_columns import brick_columns, change_column, rank_columns
from cbtop.tui.views.brick_detail import ALL_LINES, LEAST_LINES, BrickDetail
from cbtop.tui.views.training import passes_of, training_columns, training_rows
from cbtop.tui.widgets.filter import Filter
from cbtop.tui.widgets.lines import clean
from cbtop.tui.widgets.sorted_table import SortedTable
from cbtop.tui.widgets.table import Table
from cbtop.viewmodels.bricks import BrickRow, has_launches
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import Subject

BESIDE = 160  # In a view of at least this width in cells, the details are to the right of the table.
_BOOKS_LINES = 3
_LEAST_TABLE = 3  # The table has at least this many lines, including its head.


class Bricks(View):
    """The view that shows how the time of a step is divided among its bricks."""

    title = "Bricks"
    section = "bricks"
    doc = (
        "Every brick of the phase shown, summed over the layers, by exclusive time: without the time "
        "of bricks inside it. The line at the bottom adds up a step: its wall time is its bricks, the named "
        "gaps between them, and the rest of the step. "
        "In training steps a row has the forward and backward passes of a brick, and ⏎ shows the details of the next "
        "pass. "
        "On a wide terminal the calls of all bricks stand on one scale of time under the table."
    )
    columns_doc = tuple(
        (column.title, column.doc)
        for column in (
            *brick_columns(100.0, budgets=True, checks=True, launches=True),
            change_column(None),
            *training_columns((), None)[1:],
        )
    )
    details_doc = tuple((row.word or row.title, row.help) for rows in BRICK_PANEL.values() for row in rows)

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "toggle_detail", "details"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("escape", "back", "back", show=False),
    ]

    _opens = False  # whether the next layout must show the details
    _pass = 0  # index of the pass (forward, backward …) that the details of a brick show

    def compose(self) -> ComposeResult:
        self._table: SortedTable[BrickRow] = SortedTable(
            brick_columns(100.0, budgets=False, checks=False),
            lambda row: row.key,
            words=words_of,
            sort_by="wall %",
            id="bricks-table",
        )
        self._detail = BrickDetail(id="brick-detail")
        self._filter = Filter("part of a brick's name or category, or a regular expression", id="bricks-filter")
        self._books = TimeBreakdownPanel(id="books")
        self._all = AllBricks(id="bricks-all")
        self._left = Container(self._table, self._all, id="bricks-left")
        self._panes = Container(self._left, self._detail, id="bricks-panes")
        yield self._panes
        yield self._filter
        yield self._books

    @property
    def focus_target(self) -> Widget:
        return self._table

    def show_source(self, source: SourceView) -> None:
        columns = brick_columns(
            max((row.percent or 0.0 for row in source.bricks), default=100.0),
            budgets=any(row.budget_us_per_token is not None for row in source.bricks),
            checks=bool(source.checks) or any(row.checks_passed or row.checks_failed for row in source.bricks),
            launches=has_launches(source.bricks),
            of_ranks=any(row.rank is not None for row in source.bricks),
            limits=roof_text.has_limits(source.bricks),
            longest_name=max((len(row.name) for row in source.bricks), default=0),
        )
        if source.baseline is not None and source.merged is None:
            columns = (*columns, change_column(source.baseline))
        rows = source.bricks
        if source.ranks is not None:
            columns = rank_columns(columns, source.ranks)
        elif source.training is not None and source.training.bricks:
            columns, rows = training_columns(columns, source.training), training_rows(rows)
        self._table.show_columns(columns)
        self._table.nothing_at_all = clean(recording_text.no_bricks(source))
        self._table.show_rows(rows, of=source.rows_of)
        self._filter.show_found(self._table.found)
        self._books.show_source(source)
        self._all.show_source(source)
        self._lay_out()
        self._show_detail()

    def let_go(self) -> None:
        self._detail.let_go()

    def on_resize(self, event: Resize) -> None:
        self._lay_out()
        self.call_after_refresh(self._show_detail)

    def _lay_out(self) -> None:
        """Set the heights of the table and the details. The details fill the lines that the table leaves free.

        If the details do not fit, the Enter key enlarges them. If they are already complete, the Enter key hides
        them.
        """
        width, height = self.size
        if not (width and height):
            return
        lines = height - _BOOKS_LINES - self._filter.display
        # A table without rows shows a reason, which also takes lines.
        table = 1 + (len(self._table.rows) or len(self._table.said(width)))
        is_beside = width >= BESIDE
        has_all = is_beside or lines - table >= ALL_LINES
        if self._opens:
            self._opens = False
            self.set_class(not has_all, "-detail")
        is_turned = self.has_class("-detail")
        is_enlarged = is_turned and not has_all
        is_open = is_enlarged or (has_all and not is_turned) or (not has_all and lines - table >= LEAST_LINES)
        if is_enlarged:
            table = max(_LEAST_TABLE, min(table, lines - ALL_LINES))
        self._panes.set_class(is_beside, "-beside")
        self.set_class(is_enlarged, "-enlarged")
        self._detail.display = is_open
        self._left.styles.height = "1fr" if is_beside or not is_open else table
        self._all.display = is_beside and lines - table >= ALL_BRICKS_LINES
        self._table.styles.height = table if self._all.display else "1fr"

    def _show_detail(self) -> None:
        if self._detail.display and self.source is not None:
            passes = self._passes()
            self._detail.show_brick(passes[min(self._pass, len(passes) - 1)] if passes else None, self.source)

    def _passes(self) -> list[BrickRow]:
        """Return the brick under the cursor as one row.

        In training steps, return a row for each pass (forward, backward) of the brick.
        """
        brick, source = self._table.current, self.source
        if brick is None or source is None:
            return []
        is_of_passes = source.training is not None and source.ranks is None
        return passes_of(brick, source.bricks) if is_of_passes else [brick]

    def on_table_moved(self, event: Table.Moved) -> None:
        self._pass = 0
        self._show_detail()

    def action_toggle_detail(self) -> None:
        """Show or hide the details. If a brick has several passes (forward, backward), show the next pass before
        hiding the details.
        """
        if self._detail.display and self._pass + 1 < len(self._passes()):
            self._pass += 1
            self._show_detail()
            return
        self._pass = 0
        self.set_class(not self.has_class("-detail"), "-detail")
        self._lay_out()
        self.call_after_refresh(self._show_detail)

    def point_at(self, subject: Subject) -> None:
        """Move the cursor to a brick and show its details. If a filter hides the brick, the filter is cleared."""
        names = [row.name for row in self._table.rows]
        if subject.name not in names:
            self.look_for("")
            self._table.set_filter("")
            names = [row.name for row in self._table.rows]
        if subject.name in names:
            self._table.move_to(names.index(subject.name))
        self._opens, self._pass = True, 0
        self._lay_out()
        self.call_after_refresh(self._show_detail)

    def look_for(self, text: str) -> None:
        """Show only bricks with `text` in their name or category, as if the user had typed it into the filter."""
        self._filter.hold(text)

    def action_filter(self) -> None:
        self._filter.open()

    def action_back(self) -> None:
        """Close the filter box if it is open. Otherwise close the details. If neither is open, clear the filter."""
        if self._filter.is_open or not self.has_class("-detail"):
            self._filter.close()
        else:
            self.remove_class("-detail")
        self._lay_out()
        self._table.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._table.set_filter(event.value)
        self._filter.show_found(self._table.found)
        self._lay_out()
        self._show_detail()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._filter.display = bool(event.value)
        self._table.focus()
