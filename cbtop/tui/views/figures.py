"""Make table columns from the table of statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cbtop import units
from cbtop.text.statistics import ScreenColumn
from cbtop.tui.widgets.columns import Column, RowT
from cbtop.tui.widgets.lines import Line, clean


def figure(text: str, role: str = "") -> Line:
    """Return a figure of a row as a cell in the colour `role`.

    The cell is faint if the figure was not measured, or if rows of this kind have no such figure.
    """
    return ((text, "faint" if text in (units.NOT_MEASURED, units.NONE_THERE) else role),)


def figure_columns(
    places: Sequence[ScreenColumn],
    *,
    row_of: Callable[[RowT], object] = lambda row: row,
    cells: Mapping[str, Callable[[RowT], Line]] | None = None,
    roles: Mapping[str, str] | None = None,
) -> tuple[Column[RowT], ...]:
    """Return a table column for each of the screen columns `places`.

    `row_of` returns the object that has the statistics of a row. `cells` maps a statistic's key to a function that
    draws the cells of the column. `roles` maps the keys of other statistics to the colour roles of their columns.
    """

    def column(place: ScreenColumn) -> Column[RowT]:
        statistic = place.statistic
        role = (roles or {}).get(statistic.key, "")

        def cell(row: RowT, width: int) -> Line:
            text = statistic.bare(row_of(row))
            if len(text) > width:  # If the figure does not fit in the column's unit, write it in a larger unit.
                text = statistic.in_full(row_of(row))
            return figure(clean(text), role)

        def sort_value(row: RowT) -> float:
            return statistic.sort_value(row_of(row))

        other = (cells or {}).get(statistic.key)
        is_word = statistic.unit == "word"
        return Column(
            statistic.title,
            place.width,
            place.priority,
            cell if other is None else lambda row, _: other(row),
            statistic.help,
            align="left" if is_word else "right",
            sort_key=None if is_word else sort_value,
            of_few=statistic.of_few_calls,
        )

    return tuple(column(place) for place in places)
