"""The columns of a table: which columns fit, how wide each column is, and how the rows are drawn."""

# If the terminal is too narrow for a table, whole columns are dropped by priority. A column never becomes narrower
# than its width.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from cbtop.tui.widgets.lines import Line, Span, fit, fit_line, plain

RowT = TypeVar("RowT")

COLUMN_GAP = 2


@dataclass(frozen=True, slots=True)
class Column(Generic[RowT]):
    """A column of a table: a function that draws its cells, and its priority if there is too little room."""

    title: str
    width: int
    priority: int  # If there is too little room, columns with a higher number are dropped first.
    cell: Callable[[RowT, int], Line]
    doc: str
    align: str = "right"
    stretch: int = 0  # spare width is distributed over the columns in proportion to this weight
    max_width: int = 0  # maximum width of the column in cells after spare width was added; 0 means no maximum
    # Returns the sort key of a row. If the function is None, the table cannot be sorted by this column.
    sort_key: Callable[[RowT], float | str] | None = None
    # Whether the column only draws values of other columns. Such a column is not copied or exported.
    is_drawn: bool = False
    # Whether the figures scatter because they are of few calls. Rows sorted by this column change places less often.
    of_few: bool = False


@dataclass(frozen=True, slots=True)
class Placed(Generic[RowT]):
    """A column with its final width in cells."""

    column: Column[RowT]
    width: int


def place(columns: Sequence[Column[RowT]], width: int) -> tuple[Placed[RowT], ...]:
    """Return the columns that fit into `width`, in order. Spare cells are distributed by `stretch`."""
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
    """Return the column at the cell `x` of a head line, or None."""
    end = 0
    for one in placed:
        end += one.width + COLUMN_GAP
        if x < end:
            return one.column
    return None


UNCUT = 200  # In a table of this width in cells, every figure fits.


@dataclass(frozen=True, slots=True)
class Cells:
    """A table as plain text, for copying and exporting: the titles of its columns, and its rows."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, columns: Sequence[Column[RowT]], rows: Sequence[RowT]) -> Cells:
        """Return the cells of `rows`, including columns that do not fit on the screen, but without drawn columns."""
        said = [column for column in columns if not column.is_drawn]
        cells = (tuple(plain(column.cell(row, UNCUT)).strip() for column in said) for row in rows)
        return cls(tuple(column.title for column in said), tuple(cells))

    def markdown(self) -> str:
        """Return the table as Markdown text."""
        lines = [self.head, ("---",) * len(self.head), *self.rows]
        return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def head_line(placed: Sequence[Placed[RowT]], sorted_by: str, descending: bool) -> Line:
    """Return the head line of a table, with an arrow at the sort column.

    It follows the title. If the title fills its column, the arrow is in the gap after the column. The title of the
    last column moves into the gap before it. If the sort column is not visible, the first wide enough text column
    names it: `brick, by p95▼`.
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
            elif len(title) == width and spans:
                width, spans[-1] = width + 1, (" " * (COLUMN_GAP - 1), "")
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
    """Return one line of a table with the cells of a row in all `placed` columns."""
    spans: list[Span] = []
    for index, place in enumerate(placed):
        spans += fit_line(place.column.cell(row, place.width), place.width, place.column.align)
        if index < len(placed) - 1:
            spans.append((" " * COLUMN_GAP, ""))
    return tuple(spans)
