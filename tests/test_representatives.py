"""Tests of the choice of the rows of a table of parameters that run by default."""

from __future__ import annotations

from itertools import product

import pytest

from tests.representatives import each_value_once, first_by_default


def is_default(row: object) -> bool:
    return not getattr(row, "marks", ())


def test_every_column_value_is_in_a_default_row_and_every_row_is_there() -> None:
    table = [*product("abc", range(5), (None, {"a": 1}))]
    rows = each_value_once(table)
    assert [row.values for row in rows] == table
    assert {mark.name for row in rows for mark in row.marks} == {"slow"}
    chosen = [row.values for row in rows if is_default(row)]
    assert len(chosen) == 5
    for all_values, found in zip(zip(*table, strict=True), zip(*chosen, strict=True), strict=True):
        assert {*map(repr, all_values)} == {*map(repr, found)}


def test_a_row_that_alone_has_a_value_is_chosen_wherever_it_stands() -> None:
    rows = each_value_once([("a", 1), ("a", 1), ("b", 1), ("a", 2)])
    assert [is_default(row) for row in rows] == [True, False, True, True]


def test_only_the_first_rows_of_a_family_run_by_default() -> None:
    family = first_by_default(("one", "other"), [(1, 2), pytest.param(3, 4, id="named"), (5, 6)], 2, ids=str)
    names, rows = family.args
    assert names == ("one", "other")
    assert [row.values for row in rows] == [(1, 2), (3, 4), (5, 6)]
    assert [[mark.name for mark in row.marks] for row in rows] == [[], [], ["slow"]]
    assert rows[1].id == "named"
    assert family.kwargs == {"ids": str}
    (_, rows) = first_by_default("one", [(1, 2), (3, 4)]).args
    assert [row.values for row in rows] == [((1, 2),), ((3, 4),)]
