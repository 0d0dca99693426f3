"""Selects rows of a table of parameters for the default run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def each_value_once(rows: Iterable[Sequence[Any]]) -> list[Any]:
    """Return rows for `parametrize`: only a few of them run by default, the others are slow.

    The selected rows contain every value of every column. Each time, the first row with the most missing values is
    selected. Values of a column are equal if their `repr` is equal.
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
