"""A table of typed columns in NumPy arrays.

pandas, polars and other libraries accept it through the Arrow PyCapsule interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.markup import table_html
from cbtop.tables.typed_column import TypedColumn

SHOWN_ROWS = 10  # of a table in a notebook


class ColumnTable:
    """Rows in columns of equal length. `len(table)` is the number of rows.

    With the extra `arrow`, `polars.DataFrame(table)`, `pandas.DataFrame.from_arrow(table)`, `pyarrow.table(table)`
    and the SQL of DuckDB take it. Numbers are not copied. A row's text is a position in a list of texts (dictionary
    encoding).
    """

    def __init__(self, columns: Mapping[str, TypedColumn]) -> None:
        lengths = {len(column.values) for column in columns.values()}
        if len(lengths) != 1:
            raise ValueError(f"columns of {sorted(lengths)} rows; one length is expected")
        self._columns = dict(columns)
        (self._length,) = lengths

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"<{self._length:,} {'row' if self._length == 1 else 'rows'} of {', '.join(self._columns)}>"

    def _repr_html_(self) -> str:
        """Return the first rows as HTML. Notebooks call this method to show the table."""
        shown = np.arange(min(SHOWN_ROWS, self._length))
        columns = [one.rows(shown).to_numpy() for one in self._columns.values()]
        rows = zip(*[[_cell(value) for value in column] for column in columns], strict=True)
        more = f"<p>{self._length:,} rows</p>" if self._length > SHOWN_ROWS else ""
        return f"{table_html([self.columns, *rows])}{more}"

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The names of the table's columns."""
        return tuple(self._columns)

    def typed(self, name: str) -> TypedColumn:
        """Return the typed column `name` as it is stored. Raises KeyError with the known names."""
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; the columns are {', '.join(self._columns)}") from None

    def column(self, name: str) -> NDArray[Any]:
        """Return the column `name` as a NumPy array. Raises KeyError with the known names.

        Texts are an array of `str` or None. Integers with unknown values are float64, with NaN where unknown.
        """
        return self.typed(name).to_numpy()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return a capsule with the table for libraries that read Arrow data. Raises UsageError without the extra
        `arrow`.
        """
        # imported here, because pyarrow is in the extra `arrow` and loads slowly
        from cbtop.tables.arrow import arrow_table

        return arrow_table(self._columns, "the Arrow interface of a table").__arrow_c_stream__(requested_schema)


def _cell(value: Any) -> str:
    """Return a value as text. A fraction has six digits, and an unknown value is ""."""
    if value is None or value != value:
        return ""
    return f"{value:.6g}" if isinstance(value, float | np.floating) else str(value)


def joined_columns(parts: Sequence[dict[str, TypedColumn]]) -> dict[str, TypedColumn]:
    """Join the tables `parts` (at least one) below each other.

    Columns of texts must have the same list of texts in all parts. The parts are emptied, so that at most one column
    is in memory twice.
    """
    return {name: TypedColumn.joined([part.pop(name) for part in parts]) for name in [*parts[0]]}
