"""A table the reader can sort and filter, whose order keeps still while the numbers move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from cbtop.tui.widgets.columns import Column, Placed, RowT, head_line
from cbtop.tui.widgets.lines import Line, clean
from cbtop.tui.widgets.table import Table

STEADY_MARGIN = 0.05  # a row passes its neighbour when it is ahead by this part, not on every flicker


def steady_order(
    previous: Sequence[object],
    values: Mapping[object, float | str],
    *,
    descending: bool,
    margin: float = STEADY_MARGIN,
) -> list[object]:
    """The keys of `values` sorted, yet as in `previous` while no row is clearly ahead of one before it."""
    fresh = sorted(values, key=lambda key: _sortable(values[key]), reverse=descending)
    kept = [key for key in previous if key in values]
    known = set(kept)
    for position, key in enumerate(fresh):
        if key not in known:
            kept.insert(position, key)
    rank = {key: position for position, key in enumerate(fresh)}
    for index in range(len(kept)):
        best = min(kept[index:], key=rank.__getitem__)
        if _differ(values[best], values[kept[index]], margin):
            kept.remove(best)
            kept.insert(index, best)
    return kept


def _sortable(value: float | str) -> tuple[float, str]:
    return (0.0, value.casefold()) if isinstance(value, str) else (value, "")


def _differ(one: float | str, other: float | str, margin: float) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one != other
    return abs(one - other) > margin * max(abs(one), abs(other))


class SortedTable(Table[RowT]):
    """`s` walks through the columns to sort by, `S` turns the order round; `set_filter` narrows by name."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", "reverse"),
    ]

    def __init__(
        self,
        columns: Sequence[Column[RowT]],
        key: Callable[[RowT], tuple[str, object]],
        *,
        sort_by: str,
        empty: str = "",
        id: str | None = None,
    ) -> None:
        super().__init__(columns, key, empty=empty, id=id)
        self._name_and_more = key
        self.sort_by = sort_by
        self.descending = True
        self.filter_text = ""
        self._nothing_at_all = empty
        self._all: tuple[RowT, ...] = ()
        self._order: list[object] = []

    def show_columns(self, columns: Sequence[Column[RowT]]) -> None:
        """Show `columns` from now on; sorted by the last of them that can be, where it was by one that is gone."""
        self.columns = tuple(columns)
        if all(column.title != self.sort_by for column in columns):
            self.sort_by = next(column.title for column in reversed(columns) if column.sort_key is not None)
            self._order = []

    def show_rows(self, rows: Sequence[RowT]) -> None:
        self._all = tuple(rows)
        sort_key = self._sort_column.sort_key
        assert sort_key is not None, f"{self.sort_by} is not a column to sort by"
        by_key: dict[object, RowT] = {self.key(row): row for row in self._all}
        values = {key: sort_key(row) for key, row in by_key.items()}
        self._order = steady_order(self._order, values, descending=self.descending)
        wanted = self.filter_text.casefold()
        nothing_such = f"none of {len(self._all)} has {clean(self.filter_text)!r} in its name; esc shows all"
        self.empty = nothing_such if wanted and self._all else self._nothing_at_all
        ordered = [by_key[key] for key in self._order]
        super().show_rows([row for row in ordered if wanted in self._name_and_more(row)[0].casefold()])

    def set_filter(self, text: str) -> None:
        """Show only the rows whose name contains `text`, in any case; all of them for an empty one."""
        self.filter_text = text
        self.show_rows(self._all)

    @property
    def total(self) -> int:
        """Rows there are without the filter."""
        return len(self._all)

    def draw_head(self, placed: Sequence[Placed[RowT]]) -> Line:
        return head_line(placed, self.sort_by, self.descending)

    @property
    def _sort_column(self) -> Column[RowT]:
        return next(column for column in self.columns if column.title == self.sort_by)

    def action_sort(self) -> None:
        titles = [column.title for column in self.visible_columns if column.sort_key is not None]
        at = titles.index(self.sort_by) if self.sort_by in titles else -1
        self.sort_by = titles[(at + 1) % len(titles)]
        self.descending = self._sort_column.align == "right"  # numbers largest first, names from A on
        self._sort_anew()

    def action_reverse(self) -> None:
        self.descending = not self.descending
        self._sort_anew()

    def _sort_anew(self) -> None:
        self._order = []
        self.show_rows(self._all)
