"""A table with a cursor. The cursor stays on its row while numbers change."""

# The cursor belongs to the key of a row, not to its index, because rows may move, appear and disappear. Textual's
# DataTable is not used. If all of 60 x 6 cells change, this table takes 0.2x of its CPU time (17 ms, 2 shared cores,
# Textual 8.2.8; `python -m benchmarks widgets`). It scrolls its own rows, and draws only visible ones. Textual
# scrolls static text (pager.py).

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Generic

from textual.binding import Binding, BindingType
from textual.events import Click, MouseScrollDown, MouseScrollUp
from textual.message import Message

from cbtop.tui.widgets.columns import Cells, Column, Placed, RowT, column_at, head_line, place, row_line
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import Line, fit_line, restyle, wrap_line

_WHEEL_ROWS = 3
# number of cells that are not for columns: the cursor's mark on the left, a blank and the scroll mark on the right
_MARGIN = 3


class Table(Drawing, Generic[RowT], can_focus=True):
    """Rows of a table below a head line. Only visible rows are drawn, so a thousand rows take as long as twenty."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "move(1)", "down", show=False),
        Binding("k,up", "move(-1)", "up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("g,home", "first", "first row", show=False),
        Binding("G,end", "last", "last row", show=False),
        Binding("y", "copy", "copy the row as Markdown", show=False),
    ]

    class Moved(Message):
        """Sent when the cursor has moved to a different row."""

    def __init__(
        self,
        columns: Sequence[Column[RowT]],
        key: Callable[[RowT], object],
        *,
        empty: str = "",
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self.columns = tuple(columns)
        self.key = key
        self.empty = empty  # text that is shown if the table has no rows
        self.rows: tuple[RowT, ...] = ()
        self.cursor = 0
        self._cursor_key: object = None
        self._is_placed = False
        self._top = 0

    def show_rows(self, rows: Sequence[RowT]) -> None:
        """Replace the rows of the table. The cursor stays on its row. If the row is gone, the cursor stays near its
        position.
        """
        self.rows = tuple(rows)
        keys = [self.key(row) for row in self.rows]
        if self._cursor_key in keys:
            self.cursor = keys.index(self._cursor_key)
        else:
            self.cursor = max(0, min(self.cursor, len(keys) - 1))
        self._hold_row()
        self.redraw()

    @property
    def current(self) -> RowT | None:
        """The row of the table under the cursor."""
        return self.rows[self.cursor] if self.rows else None

    def _hold_row(self) -> None:
        """Remember the key of the row under the cursor, so that the cursor stays on this row.

        Without rows, keep the old key, because the old row may return.
        """
        if self.rows:
            self._cursor_key = self.key(self.rows[self.cursor])

    def release_row(self) -> None:
        """Prepare the table for different content. If the user has not moved the cursor, it goes to the first row."""
        if not self._is_placed:
            self.cursor, self._cursor_key = 0, None

    @property
    def _placed(self) -> tuple[Placed[RowT], ...]:
        return place(self.columns, self.size.width - _MARGIN)

    @property
    def visible_columns(self) -> list[Column[RowT]]:
        """The columns that fit into the table's width."""
        return [placed.column for placed in self._placed]

    @property
    def visible_rows(self) -> int:
        return max(1, self.size.height - 1)

    def said(self, width: int) -> list[Line]:
        """Return the lines that the table shows if it has no rows."""
        return wrap_line(((" ", ""),), ((self.empty, "dim"),), width)

    def draw(self, width: int, height: int) -> list[Line]:
        inner = width - 1  # The last cell of a line is reserved for the scroll mark.
        placed = self._placed
        lines = [((" ", ""), *self.draw_head(placed))]
        if not self.rows:
            return [*lines, *self.said(width)]
        visible = max(1, height - 1)
        self._top = _scrolled(self._top, self.cursor, visible, len(self.rows))
        for index in range(self._top, min(self._top + visible, len(self.rows))):
            lines.append(self._row(placed, index, inner))
        return _with_scroll_mark(lines, self._top, visible, len(self.rows), inner)

    def draw_head(self, placed: Sequence[Placed[RowT]]) -> Line:
        return head_line(placed, "", descending=True)

    def _row(self, placed: Sequence[Placed[RowT]], index: int, width: int) -> Line:
        line = row_line(placed, self.rows[index])
        if index != self.cursor:
            return ((" ", ""), *line)
        return restyle(fit_line((("▎", "accent"), *line), width), "cursor")

    def move_to(self, index: int) -> None:
        """Move the cursor to the row with this index, or to the nearest row."""
        index = max(0, min(index, len(self.rows) - 1))
        if index == self.cursor or not self.rows:
            return
        self.cursor, self._is_placed = index, True
        self._hold_row()
        self.redraw()
        self.post_message(self.Moved())

    def action_move(self, rows: int) -> None:
        self.move_to(self.cursor + rows)

    def action_page(self, pages: int) -> None:
        self.move_to(self.cursor + pages * self.visible_rows)

    def action_first(self) -> None:
        self.move_to(0)

    def action_last(self) -> None:
        self.move_to(len(self.rows) - 1)

    def action_copy(self) -> None:
        """Copy the row under the cursor and the head line to the clipboard of the user's terminal."""
        if (row := self.current) is not None:
            self.app.copy_to_clipboard(Cells.of(self.columns, [row]).markdown())
            self.app.notify("the row is copied as Markdown, where the terminal allows it (OSC 52)", markup=False)

    @property
    def cells(self) -> Cells:
        """Return the whole table as text, with all rows and columns."""
        return Cells.of(self.columns, self.rows)

    def on_click(self, event: Click) -> None:
        """Move the cursor to the clicked row. A double click also has the effect of Enter.

        A click on the head calls `choose_column`.
        """
        if event.y == 0:
            if (column := column_at(self._placed, event.x - 1)) is not None:
                self.choose_column(column)
        elif self._top + event.y - 1 < len(self.rows):
            self.move_to(self._top + event.y - 1)
            if event.chain == 2:
                self.app.simulate_key("enter")

    def choose_column(self, column: Column[RowT]) -> None:
        """Handle a click on the head of a column. Subclasses with sorting override this."""

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        event.stop()
        self.move_to(self.cursor + _WHEEL_ROWS)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        event.stop()
        self.move_to(self.cursor - _WHEEL_ROWS)


def _scrolled(top: int, cursor: int, visible: int, total: int) -> int:
    """Return the index of the first visible row.

    The cursor is then visible, and no line is empty while rows above are hidden.
    """
    top = max(cursor - visible + 1, min(top, cursor))
    return max(0, min(top, total - visible))


def _with_scroll_mark(lines: list[Line], top: int, visible: int, total: int, width: int) -> list[Line]:
    if total <= visible:
        return lines
    size = max(1, round(visible * visible / total))
    start = round(top / (total - visible) * (visible - size))
    marked = lines[:1]
    for offset, line in enumerate(lines[1:]):
        here = start <= offset < start + size
        marked.append((*fit_line(line, width), ("┃" if here else "│", "dim" if here else "faint")))
    return marked
