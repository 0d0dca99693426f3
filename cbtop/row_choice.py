"""Which bricks a table shows and in which order, chosen by a column and a text: for the screen and for reports."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cbtop.statistics import BRICK_COLUMNS, BUDGET_COLUMNS, CHECK_COLUMNS, POINT_COLUMNS
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.model import SourceView

BY_NAME = "brick"
_STATISTICS = {
    place.statistic.title: place.statistic
    for place in (*BRICK_COLUMNS, *BUDGET_COLUMNS, *CHECK_COLUMNS, *POINT_COLUMNS)
    if place.statistic.unit != "word"
}
SORT_COLUMNS = (BY_NAME, *_STATISTICS)  # by their titles on the screen


def bare(name: str) -> str:
    """As names of columns are compared: `P95 µs` is `p95us`."""
    return re.sub(r"[^a-z0-9%]", "", name.casefold().replace("\u03bc", "u").replace("\xb5", "u"))


def _sort_names() -> dict[str, str]:
    names = {BY_NAME: BY_NAME}
    for title, statistic in _STATISTICS.items():
        for name in (title, statistic.key, statistic.word, statistic.report_title):
            names.setdefault(bare(name) or bare(title), title)
    return names


SORT_NAMES = _sort_names()  # the column that each of its names means: `p95`, `p95us`


# Names come from others, and an expression may take exponentially long to see that it is not in one. Each of these is
# a choice for it; a repetition has as many as a name has characters, and is counted as so many binary ones.
MAX_CHOICES, REPETITION, ALTERNATIVE = 16, 8, 2
MAX_SEARCHED = 128  # characters of a name; as it stands, a text is looked for in all of it
_ONE_CHARACTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]", re.DOTALL)
_REFUSED = re.compile(r"\)[*+{]|\(\?(?![:=!<P]|i\))")  # a group repeated; comments, flags and what else may follow (?


def matcher(text: str) -> Callable[[str], bool]:
    """Whether `text` is in a word, in any case: as a regular expression or, where it is none, as it stands.

    What repeats a group, or makes more than MAX_CHOICES, is looked for as it stands too: its search might never end.
    """
    if _ends_soon(text):
        try:
            with warnings.catch_warnings(action="ignore"):  # of what later Pythons may read in another way
                expression = re.compile(text, re.IGNORECASE)
        except (re.error, OverflowError, RecursionError):
            pass
        else:
            return lambda word: expression.search(word, 0, MAX_SEARCHED) is not None
    as_it_stands = re.compile(re.escape(text), re.IGNORECASE)
    return lambda word: as_it_stands.search(word) is not None


def _ends_soon(expression: str) -> bool:
    bare = _ONE_CHARACTER.sub("x", expression)
    if _REFUSED.search(bare):
        return False
    most = choices = depth = 0
    for char in re.sub(r"(?<=[*+}?(])\?", "", bare):  # a lazy choice is one
        depth += (char == "(") - (char == ")")
        if char in "*+{":
            choices += REPETITION
        elif char == "?" or (char == "|" and depth > 0):
            choices += ALTERNATIVE
        elif char == "|":
            choices = 0  # one after the other
        most = max(most, choices)
    return most <= MAX_CHOICES


def words_of(row: BrickRow) -> tuple[str, str]:
    """In which a filter looks."""
    return row.name, row.category.display_name


@dataclass(frozen=True, slots=True)
class RowChoice:
    """`sort` is one of SORT_COLUMNS, figures from the largest on and names from A on; "": as they come."""

    sort: str = ""
    filter: str = ""

    def of(self, source: SourceView) -> SourceView:
        """`source` with these bricks alone in its lists of bricks and points, in this order."""
        matches = matcher(self.filter)
        ranks = source.ranks
        if ranks is not None and self.filter:
            kept = (row for row in ranks.rows if matches(row.brick) or matches(row.category))
            ranks = replace(ranks, rows=tuple(kept))
        roofline = replace(source.roofline, points=self._chosen(source.roofline.points))
        return replace(source, bricks=self._chosen(source.bricks), ranks=ranks, roofline=roofline)

    def _chosen(self, rows: Sequence[BrickRow]) -> tuple[BrickRow, ...]:
        matches = matcher(self.filter)
        kept = [row for row in rows if any(matches(word) for word in words_of(row))]
        if self.sort == BY_NAME:
            kept.sort(key=lambda row: row.name.casefold())
        elif self.sort:
            kept.sort(key=_STATISTICS[self.sort].sort_value, reverse=True)
        return tuple(kept)


AS_THEY_COME = RowChoice()
