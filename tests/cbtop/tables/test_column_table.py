"""Tests of `ColumnTable`: NumPy, Arrow, polars, pandas and DuckDB read the same values from a table."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from cbtop.errors import UsageError
from cbtop.tables.column_table import ColumnTable, joined_columns
from cbtop.tables.typed_column import TypedColumn

VALUES = {
    "step": [1, None, 3],
    "phase": ["decode", None, "préfill"],
    "model": [None, None, None],
    "duration_us": [0.5, 1.5, 2.5],
    "failed": [True, False, True],
}


def columns() -> dict[str, TypedColumn]:
    return {
        "step": TypedColumn.of_numbers([1, None, 3], np.int64),
        "phase": TypedColumn.of_texts(["decode", None, "préfill"], {}),
        "model": TypedColumn.of_texts([None, None, None], {}),
        "duration_us": TypedColumn(np.array([0.5, 1.5, 2.5])),
        "failed": TypedColumn(np.array([True, False, True])),
    }


def test_numpy_has_every_column_without_another_package() -> None:
    table = ColumnTable(columns())
    assert (len(table), table.columns) == (3, tuple(VALUES))
    assert repr(table) == "<3 rows of step, phase, model, duration_us, failed>"
    assert repr(ColumnTable({"calls": TypedColumn.of_numbers([7], np.int64)})) == "<1 row of calls>"
    np.testing.assert_array_equal(table.column("step"), [1.0, np.nan, 3.0])
    assert table.column("phase").tolist() == VALUES["phase"]
    assert table.column("model").tolist() == VALUES["model"]
    assert table.column("duration_us").dtype == np.float64
    assert table.column("failed").dtype == np.bool_


def test_an_integer_without_gaps_stays_an_integer() -> None:
    table = ColumnTable({"step": TypedColumn.of_numbers([1, 2], np.int64)})
    assert table.column("step").dtype == np.int64


def test_an_unknown_column_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(KeyError, match="no column 'time'; the columns are step, phase, model, duration_us, failed"):
        ColumnTable(columns()).column("time")


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"columns of \[1, 2\] rows"):
        ColumnTable({"a": TypedColumn(np.zeros(1)), "b": TypedColumn(np.zeros(2))})


def test_parts_are_joined_with_their_unknown_values() -> None:
    codes: dict[str, int] = {}
    parts = [
        {"a": TypedColumn(np.array([1])), "b": TypedColumn.of_texts(["x"], codes)},
        {"a": TypedColumn.of_numbers([None, 2], np.int64), "b": TypedColumn.of_texts([None, "y"], codes)},
    ]
    table = ColumnTable(joined_columns(parts))
    np.testing.assert_array_equal(table.column("a"), [1.0, np.nan, 2.0])
    assert table.column("b").tolist() == ["x", None, "y"]
    assert parts == [{}, {}]


def test_without_pyarrow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        UsageError, match=r"^the Arrow interface of a table needs pyarrow; pip install 'cbtop\[arrow\]'$"
    ):
        ColumnTable(columns()).__arrow_c_stream__()


def test_arrow_has_the_values_their_types_and_no_copy_of_numbers() -> None:
    arrow = pytest.importorskip("pyarrow")
    made = columns()
    found = arrow.table(ColumnTable(made))
    found.validate(full=True)
    assert found.to_pydict() == VALUES
    assert [str(kind) for kind in found.schema.types] == [
        "int64",
        "dictionary<values=string, indices=int32, ordered=0>",
        "dictionary<values=string, indices=int32, ordered=0>",
        "double",
        "bool",
    ]
    (chunk,) = found.column("duration_us").chunks
    assert chunk.buffers()[1].address == made["duration_us"].values.ctypes.data


def test_arrow_takes_a_table_without_rows() -> None:
    arrow = pytest.importorskip("pyarrow")
    none = {name: column.rows(np.zeros(0, np.int64)) for name, column in columns().items()}
    assert arrow.table(ColumnTable(none)).to_pydict() == {name: [] for name in VALUES}


def test_polars_takes_a_table() -> None:
    pytest.importorskip("pyarrow")
    polars = pytest.importorskip("polars", reason="polars is not installed: pip install polars")
    assert polars.DataFrame(ColumnTable(columns())).to_dict(as_series=False) == VALUES


def test_pandas_takes_a_table() -> None:
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas", "3", reason="pandas 3 is not installed: pip install 'pandas>=3'")
    found = pandas.DataFrame.from_arrow(ColumnTable(columns()))
    assert found["duration_us"].tolist() == VALUES["duration_us"]
    assert found["phase"].dropna().tolist() == ["decode", "préfill"]


def test_duckdb_reads_a_table_by_its_name() -> None:
    pytest.importorskip("pyarrow")
    duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed: pip install duckdb")
    calls = ColumnTable(columns())
    # DuckDB finds the table `calls` among the local variables of Python.
    rows = duckdb.sql("select * from calls").fetchall()
    assert rows == list(zip(*VALUES.values(), strict=True))
    assert len(calls) == len(rows)


def test_a_notebook_shows_the_first_rows_and_their_number() -> None:
    names = [f"<{number}>" for number in range(11)] + [None]
    table = ColumnTable(
        {
            "name": TypedColumn.of_texts(names, {}),
            "us": TypedColumn.of_numbers([1 / 3, None, *[1e9] * 10], np.float64),
            "calls": TypedColumn.of_numbers([7] * 12, np.int64),
        }
    )
    shown = table._repr_html_()
    assert shown.count("<tr>") == 1 + 10
    assert "&lt;9&gt;</td>" in shown
    assert "&lt;10&gt;" not in shown
    assert ">0.333333</td>" in shown
    assert ">7</td>" in shown
    assert ">nan</td>" not in shown
    assert shown.endswith("<p>12 rows</p>")
    assert "<p>" not in ColumnTable({"calls": TypedColumn.of_numbers([7], np.int64)})._repr_html_()
