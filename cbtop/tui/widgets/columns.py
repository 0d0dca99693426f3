"""Columns of a table: which fit, how wide each becomes, and a row drawn across them."""

# When the terminal narrows, whole columns leave by priority: a column is never squeezed under its width.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from cbtop.tui.widgets.lines import Line, Span, fit, fit_line, plain

RowT = TypeVar("RowT")

COLUMN_GAP = 2


@dataclass(frozen=True, slots=True)
class Column(Generic[RowT]):
    """One column: how to draw its cell at a width, and how much it matters."""

    title: str
    width: int
    priority: int  # 0 stays longest
    cell: Callable[[RowT, int], Line]
    doc: str
    align: str = "right"
    stretch: int = 0  # the share of spare width this column takes, against the others'
    max_width: int = 0  # where stretching ends; 0: nowhere
    sort_key: Callable[[RowT], float | str] | None = None  # None: not a column to sort by
    is_drawn: bool = False  # a picture of what is said elsewhere: nothing to copy or export
    of_few: bool = False  # of few calls, so it scatters: sorted by it, rows keep their places for longer


@dataclass(frozen=True, slots=True)
class Placed(Generic[RowT]):
    """A column with the width it got."""

    column: Column[RowT]
    width: int


def place(columns: Sequence[Column[RowT]], width: int) -> tuple[Placed[RowT], ...]:
    """The columns that fit into `width`, in their own order, the spare cells dealt to those that stretch."""
    chosen: list[Column[RowT]] = []
    used = -COLUMN_GAP
    for column in sorted(columns, key=lambda column: column.priority):
        need = column.width + COLUMN_GAP
        if used + need > width and chosen:
            break
        chosen.append(column)
        used += need
    chosen.sort(key=columns.index)
    widths = _stretch(chosen, width - used)
    return tuple(Placed(column, size) for column, size in zip(chosen, widths, strict=True))


def _stretch(columns: Sequence[Column[RowT]], spare: int) -> list[int]:
    widths = [column.width for column in columns]
    while spare > 0:
        growing = [
            index
            for index, column in enumerate(columns)
            if column.stretch and (not column.max_width or widths[index] < column.max_width)
        ]
        if not growing:
            break
        for index in growing:
            grant = min(spare, columns[index].stretch)
            widths[index] += grant
            spare -= grant
    return widths


def column_at(placed: Sequence[Placed[RowT]], x: int) -> Column[RowT] | None:
    """The column over which the cell `x` of a head line lies."""
    end = 0
    for one in placed:
        end += one.width + COLUMN_GAP
        if x < end:
            return one.column
    return None


UNCUT = 200  # cells, in which every figure has room


@dataclass(frozen=True, slots=True)
class Cells:
    """A table as text: its head, and its rows."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, columns: Sequence[Column[RowT]], rows: Sequence[RowT]) -> Cells:
        """All that the columns say of the rows, also those that there is no room for on the screen."""
        said = [column for column in columns if not column.is_drawn]
        cells = (tuple(plain(column.cell(row, UNCUT)).strip() for column in said) for row in rows)
        return cls(tuple(column.title for column in said), tuple(cells))

    def markdown(self) -> str:
        """As a table in Markdown, numbers on the right."""
        lines = [self.head, ("---",) * len(self.head), *self.rows]
        return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def head_line(placed: Sequence[Placed[RowT]], sorted_by: str, descending: bool) -> Line:
    """The titles, the sorted column's with an arrow, in the gap behind it where the title fills the column.

    Of one that there is no room for the first column of text that is wide enough says it: `brick, by p95▼`.
    """
    spans: list[Span] = []
    arrow = "▼" if descending else "▲"
    is_told = not sorted_by or any(one.column.title == sorted_by for one in placed)
    texts = [] if is_told else [one for one in placed if one.column.align == "left"]
    said = f", by {sorted_by}{arrow}", f" by {sorted_by}{arrow}", f" {sorted_by}{arrow}"
    widest = max(texts, key=lambda one: one.width, default=None)
    telling = next((one for one in texts if len(one.column.title + said[-1]) <= one.width), widest)
    for index, place in enumerate(placed):
        title, role, width = place.column.title, "dim", place.width
        gap = COLUMN_GAP if index < len(placed) - 1 else 0
        if title == sorted_by:
            role = "accent"
            if gap and len(title) == width:
                width, gap = width + 1, gap - 1
            title += arrow
        if place is telling:
            spans.append((fit(title, min(len(title), width)), role))
            width = max(0, width - len(title))
            title, role = next((one for one in said if len(one) <= width), said[-1]), "accent"
        spans.append((fit(title, width, place.column.align), role))
        if gap:
            spans.append((" " * gap, ""))
    return tuple(spans)


def row_line(placed: Sequence[Placed[RowT]], row: RowT) -> Line:
    """One row across its columns."""
    spans: list[Span] = []
    for index, place in enumerate(placed):
        spans += fit_line(place.column.cell(row, place.width), place.width, place.column.align)
        if index < len(placed) - 1:
            spans.append((" " * COLUMN_GAP, ""))
    return tuple(spans)
