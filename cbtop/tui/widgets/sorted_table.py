"""A table the reader can sort and filter, whose order keeps still while the numbers move."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from cbtop.row_choice import BY_NAME, pattern_of
from cbtop.tui.widgets.columns import Column, Placed, RowT, head_line
from cbtop.tui.widgets.lines import Line, clean
from cbtop.tui.widgets.table import Table

# Two rows change places when one was ahead of the other by this part in each of so many redraws: five seconds at the
# default rate. Of noisy values that stay where they are the mean of ten seconds passes neither bar.
STEADY_MARGIN = 0.15
STEADY_REDRAWS = 10

Values = Mapping[object, float | str]


def steady_order(previous: Sequence[object], redraws: Sequence[Values], *, descending: bool) -> list[object]:
    """The keys of the newest redraw sorted, yet as in `previous` while none was ahead of one before it in all."""
    values = redraws[-1]
    fresh = sorted(values, key=lambda key: _sortable(values[key]), reverse=descending)
    kept = [key for key in previous if key in values]
    known = set(kept)
    for position, key in enumerate(fresh):
        if key not in known:
            kept.insert(position, key)
    rank = {key: position for position, key in enumerate(fresh)}
    for index in range(len(kept)):
        here = kept[index]
        ahead = [
            key for key in kept[index + 1 :] if rank[key] < rank[here] and _is_ahead(key, here, redraws, descending)
        ]
        if ahead:
            best = min(ahead, key=rank.__getitem__)
            kept.remove(best)
            kept.insert(index, best)
    return kept


def _sortable(value: float | str) -> tuple[float, str]:
    return (0.0, value.casefold()) if isinstance(value, str) else (value, "")


def _is_ahead(one: object, other: object, redraws: Sequence[Values], descending: bool) -> bool:
    """Whether `one` was clearly ahead of `other` whenever both were measured."""
    pairs = [(values[one], values[other]) for values in redraws if one in values and other in values]
    return all(_differ(a, b, descending) for a, b in pairs[:-1] if _is_measured(a) and _is_measured(b)) and _differ(
        *pairs[-1], descending
    )


def _is_measured(value: float | str) -> bool:
    return isinstance(value, str) or value >= 0  # below 0 is what comes after all that was measured


def _differ(one: float | str, other: float | str, descending: bool) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one != other
    return (one - other if descending else other - one) > STEADY_MARGIN * max(abs(one), abs(other))


class SortedTable(Table[RowT]):
    """`s` walks through the columns to sort by, `S` turns the order round; `set_filter` narrows by `words`."""

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
        self._words = words  # in which a filter looks
        self.sort_by = sort_by
        self.descending = True
        self.chosen: tuple[str, bool] | None = None  # by a key or a click: the column's title, and whether descending
        self._wanted = sort_by, True  # which it is sorted by whenever it has that column
        self.filter_text = ""
        self._nothing_at_all = empty
        self._all: tuple[RowT, ...] = ()
        self._of: object = None
        self._order: list[object] = []
        self._redraws: deque[Values] = deque(maxlen=STEADY_REDRAWS)

    def show_columns(self, columns: Sequence[Column[RowT]]) -> None:
        """Show `columns` from now on; sorted by the one that is wanted or, while that is not there, by another."""
        self.columns = tuple(columns)
        self._sort_as_wanted()

    def want(self, title: str, *, descending: bool | None = None) -> None:
        """Sort by that column whenever it is there; by default figures from the largest on, names from A on."""
        self._wanted = title, title != BY_NAME if descending is None else descending
        if self._sort_as_wanted():
            self.show_rows(self._all, of=self._of)

    def _sort_as_wanted(self) -> bool:
        """Whether the order is another one now."""
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
        """Put `rows` in place of those shown; where they are `of` something else than those were, sorted exactly."""
        if of != self._of:
            self._of = of
            self._forget_order()
        self._all = tuple(rows)
        sort_key = self._sort_column.sort_key
        assert sort_key is not None, f"{self.sort_by} is not a column to sort by"
        self._redraws.append({self.key(row): sort_key(row) for row in self._all})
        self._order = steady_order(self._order, self._redraws, descending=self.descending)
        self._show_matching()

    def _show_matching(self) -> None:
        by_key: dict[object, RowT] = {self.key(row): row for row in self._all}
        nothing_such = f"{clean(self.filter_text)!r} is in none of {len(self._all)}; esc shows all"
        self.empty = nothing_such if self.filter_text and self._all else self._nothing_at_all
        matches = pattern_of(self.filter_text).search
        ordered = [by_key[key] for key in self._order]
        super().show_rows([row for row in ordered if any(matches(word) for word in self._words(row))])

    def set_filter(self, text: str) -> None:
        """Show only the rows of whose words one matches `text`, in any case; all of them for an empty one."""
        self.filter_text = text
        self._show_matching()

    @property
    def found(self) -> str:
        """`3 of 16`: the rows that the filter leaves."""
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
        self._choose(descending=self._sort_column.align == "right")  # numbers largest first, names from A on

    def choose_column(self, column: Column[RowT]) -> None:
        if column.title == self.sort_by:
            self.action_reverse()
        elif column.sort_key is not None:
            self._sort_by(column.title)

    def action_match(self, rows: int) -> None:
        """Go to the next row that the filter leaves; behind the last comes the first."""
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
        self._order = []
        self._redraws.clear()
        self.release_row()
