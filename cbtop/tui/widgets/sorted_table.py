"""A table that the user can sort and filter. Its rows rarely change places while numbers change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from cbtop.text.row_filter import BY_NAME, matcher
from cbtop.tui.widgets.columns import Column, Placed, RowT, head_line
from cbtop.tui.widgets.lines import Line, clean
from cbtop.tui.widgets.steady_order import SteadyOrder, redraws_apart
from cbtop.tui.widgets.table import Table


class SortedTable(Table[RowT]):
    """A table that can be sorted and filtered. `set_filter` searches the texts that `words` returns.

    The key `s` selects the next sort column, and `S` reverses the order.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s,full_stop", "sort(1)", "sort"),
        Binding("comma", "sort(-1)", "sort by the previous column", show=False),
        Binding("S", "reverse", "reverse"),
        Binding("n", "match(1)", "next match", show=False),
        Binding("N", "match(-1)", "previous match", show=False),
    ]

    def __init__(
        self,
        columns: Sequence[Column[RowT]],
        key: Callable[[RowT], object],
        *,
        words: Callable[[RowT], Sequence[str]],
        sort_by: str,
        empty: str = "",
        id: str | None = None,
    ) -> None:
        super().__init__(columns, key, empty=empty, id=id)
        self._words = words  # a function that returns the searchable texts of a row
        self.sort_by = sort_by
        self.descending = True
        # (sort column, whether descending), if the user has chosen an order
        self.chosen: tuple[str, bool] | None = None
        # (preferred sort column, whether descending). The table is sorted by this column while the table has the
        # column.
        self._wanted = sort_by, True
        self.filter_text = ""
        self.nothing_at_all = empty  # text that is shown if the table is empty without a filter
        self._all: tuple[RowT, ...] = ()
        self._of: object = None
        self._order = SteadyOrder()

    def show_columns(self, columns: Sequence[Column[RowT]]) -> None:
        """Replace the columns of the table.

        Sort by the preferred column, or by another one if the preferred column is missing.
        """
        self.columns = tuple(columns)
        self._sort_as_wanted()

    def want(self, title: str, *, descending: bool | None = None) -> None:
        """Set the preferred sort column.

        By default, numbers are sorted from the largest down, and names from A to Z.
        """
        self._wanted = title, title != BY_NAME if descending is None else descending
        if self._sort_as_wanted():
            self.show_rows(self._all, of=self._of)

    def _sort_as_wanted(self) -> bool:
        """Sort the table by the preferred column. Return whether the order has changed."""
        titles = [column.title for column in self.columns if column.sort_key is not None]
        before = self.sort_by, self.descending
        if self._wanted[0] in titles:
            self.sort_by, self.descending = self._wanted
        elif self.sort_by not in titles:
            self.sort_by = titles[-1]
        if before == (self.sort_by, self.descending):
            return False
        self._forget_order()
        return True

    def show_rows(self, rows: Sequence[RowT], *, of: object = None) -> None:
        """Replace the rows.

        If `of` is not the same as in the last call, they are sorted exactly. Otherwise two rows swap only after a
        lasting difference.
        """
        if of != self._of:
            self._of = of
            self._forget_order()
        self._all = tuple(rows)
        sort_key = self._sort_column.sort_key
        assert sort_key is not None, f"{self.sort_by} is not a column to sort by"
        values = {self.key(row): sort_key(row) for row in self._all}
        self._order.take(values, descending=self.descending, apart=redraws_apart(self._sort_column))
        self._show_matching()

    def _show_matching(self) -> None:
        by_key: dict[object, RowT] = {self.key(row): row for row in self._all}
        nothing_such = f"{clean(self.filter_text)!r} is in none of {len(self._all)}; esc shows all"
        self.empty = nothing_such if self.filter_text and self._all else self.nothing_at_all
        matches = matcher(self.filter_text)
        ordered = [by_key[key] for key in self._order.keys]
        super().show_rows([row for row in ordered if any(matches(word) for word in self._words(row))])

    def set_filter(self, text: str) -> None:
        """Show only rows with a text that matches `text`, ignoring case. If `text` is empty, show all rows."""
        self.filter_text = text
        self._show_matching()

    @property
    def found(self) -> str:
        """The number of matching rows as text, such as `3 of 16`."""
        return f"{len(self.rows)} of {len(self._all)}"

    def draw_head(self, placed: Sequence[Placed[RowT]]) -> Line:
        return head_line(placed, self.sort_by, self.descending)

    @property
    def _sort_column(self) -> Column[RowT]:
        return next(column for column in self.columns if column.title == self.sort_by)

    def action_sort(self, columns: int) -> None:
        titles = [column.title for column in self.visible_columns if column.sort_key is not None]
        at = titles.index(self.sort_by) if self.sort_by in titles else -1
        self._sort_by(titles[(at + columns) % len(titles)])

    def _sort_by(self, title: str) -> None:
        self.sort_by = title
        # By default, numbers are sorted from the largest down, and names from A to Z.
        self._choose(descending=self._sort_column.align == "right")

    def choose_column(self, column: Column[RowT]) -> None:
        if column.title == self.sort_by:
            self.action_reverse()
        elif column.sort_key is not None:
            self._sort_by(column.title)

    def action_match(self, rows: int) -> None:
        """Go to the next row that matches the filter. After the last row comes the first."""
        if self.rows:
            self.move_to((self.cursor + rows) % len(self.rows))

    def action_reverse(self) -> None:
        self._choose(descending=not self.descending)

    def _choose(self, *, descending: bool) -> None:
        self.descending = descending
        self.chosen = self._wanted = self.sort_by, descending
        self._forget_order()
        self.show_rows(self._all, of=self._of)

    def _forget_order(self) -> None:
        self._order = SteadyOrder()
        self.release_row()
