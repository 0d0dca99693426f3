"""Which rows of a table of parameters the default run has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def each_value_once(rows: Iterable[Sequence[Any]]) -> list[Any]:
    """The rows for `parametrize`: by default as few as hold every value of every column, with `slow` all.

    Taken is, each time, the first row that holds the most values that no row taken so far does. Values of a column
    are the same where their `repr` is.
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
