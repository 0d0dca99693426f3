"""Selects rows of a table of parameters for the default run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def each_value_once(rows: Iterable[Sequence[Any]]) -> list[Any]:
    """Return rows for `parametrize`. Only a few of them run by default, and the others are slow.

    The rows that run by default contain every value of every column. In each round, the row that adds the most new
    values is selected, or the first of several such rows. Values of a column are equal if their `repr` is equal.
    """
    table = [tuple(row) for row in rows]
    wanted = [{(column, repr(value)) for column, value in enumerate(row)} for row in table]
    missing = set().union(*wanted)
    taken = set[int]()
    while missing:
        best = max(range(len(table)), key=lambda at: len(wanted[at] & missing))
        taken.add(best)
        missing -= wanted[best]
    return [pytest.param(*row, marks=() if at in taken else pytest.mark.slow) for at, row in enumerate(table)]


def first_by_default(
    names: str | tuple[str, ...], rows: Iterable[Any], count: int = 1, **options: Any
) -> pytest.MarkDecorator:
    """Return `parametrize` for a family of cases.

    The first `count` rows run by default, all later rows are slow tests.
    """
    is_one = isinstance(names, str) and "," not in names
    table = [
        row if isinstance(row, ParameterSet) else pytest.param(row) if is_one else pytest.param(*row) for row in rows
    ]
    rest = [pytest.param(*row.values, marks=[*row.marks, pytest.mark.slow], id=row.id) for row in table[count:]]
    return pytest.mark.parametrize(names, [*table[:count], *rest], **options)
