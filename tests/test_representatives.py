"""Tests of which rows of a table of parameters run by default."""

from __future__ import annotations

from itertools import product

from tests.representatives import each_value_once


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
