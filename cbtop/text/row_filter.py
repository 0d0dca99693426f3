"""The choice of bricks in a table and their order, by a filter and a sort column, for screen and reports."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cbtop.text.statistics import BRICK_COLUMNS, BUDGET_COLUMNS, CHECK_COLUMNS, HOST_COLUMNS, POINT_COLUMNS
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.source import SourceView

BY_NAME = "brick"
_STATISTICS = {
    place.statistic.title: place.statistic
    for place in (*BRICK_COLUMNS, *HOST_COLUMNS, *BUDGET_COLUMNS, *CHECK_COLUMNS, *POINT_COLUMNS)
    if place.statistic.unit != "word"
}
SORT_COLUMNS = (BY_NAME, *_STATISTICS)  # by their titles on the screen


def bare(name: str) -> str:
    """Return the form in which column names are compared: `P95 µs` is `p95us`."""
    return re.sub(r"[^a-z0-9%]", "", name.casefold().replace("\u03bc", "u").replace("\xb5", "u"))


def _sort_names() -> dict[str, str]:
    names = {BY_NAME: BY_NAME}
    for title, statistic in _STATISTICS.items():
        for name in (title, statistic.key, statistic.word, statistic.report_title):
            names.setdefault(bare(name) or bare(title), title)
    return names


SORT_NAMES = _sort_names()  # the column for each accepted name: `p95`, `p95us`


# Names are untrusted, and a regular expression may take exponential time on them. Each of these characters counts as
# a choice; a repetition has as many as a name has characters, so it counts as this many binary ones.
MAX_CHOICES, REPETITION, ALTERNATIVE = 16, 8, 2
MAX_SEARCHED = 128  # characters of a name; plain text is searched in the whole name
_ONE_CHARACTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]", re.DOTALL)
_REFUSED = re.compile(r"\)[*+{]|\(\?(?![:=!<P]|i\))")  # repeated groups; comments, flags and other uses of (?


def matcher(text: str) -> Callable[[str], bool]:
    """Return a function that searches a word for `text`, ignoring case, as a regular expression if it is valid.

    Expressions that repeat a group or have more than MAX_CHOICES are also taken literally, because their search might
    never end.
    """
    if _ends_soon(text):
        try:
            with warnings.catch_warnings(action="ignore"):  # about future changes of the syntax
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
    for char in re.sub(r"(?<=[*+}?(])\?", "", bare):  # a lazy quantifier counts as one choice
        depth += (char == "(") - (char == ")")
        if char in "*+{":
            choices += REPETITION
        elif char == "?" or (char == "|" and depth > 0):
            choices += ALTERNATIVE
        elif char == "|":
            choices = 0  # choices add up only within one alternative
        most = max(most, choices)
    return most <= MAX_CHOICES


def words_of(row: BrickRow) -> tuple[str, str]:
    """Return the texts searched by a filter."""
    return row.name, row.category.display_name


@dataclass(frozen=True, slots=True)
class RowChoice:
    """`sort` is one of SORT_COLUMNS: largest figures first, names from A on; "": no sorting."""

    sort: str = ""
    filter: str = ""

    def of(self, source: SourceView) -> SourceView:
        """Return `source` with only these bricks in its lists of bricks and points, in this order."""
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
