"""Which bricks a table shows and in which order, chosen by a column and a text: for the screen and for reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
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


def pattern_of(text: str) -> re.Pattern[str]:
    """What `text` is looked for as: a regular expression or, where it is none, as it stands; in any case."""
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error:
        return re.compile(re.escape(text), re.IGNORECASE)


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
        matches = pattern_of(self.filter).search
        ranks = source.ranks
        if ranks is not None and self.filter:
            kept = (row for row in ranks.rows if matches(row.brick) or matches(row.category))
            ranks = replace(ranks, rows=tuple(kept))
        roofline = replace(source.roofline, points=self._chosen(source.roofline.points))
        return replace(source, bricks=self._chosen(source.bricks), ranks=ranks, roofline=roofline)

    def _chosen(self, rows: Sequence[BrickRow]) -> tuple[BrickRow, ...]:
        matches = pattern_of(self.filter).search
        kept = [row for row in rows if any(matches(word) for word in words_of(row))]
        if self.sort == BY_NAME:
            kept.sort(key=lambda row: row.name.casefold())
        elif self.sort:
            kept.sort(key=_STATISTICS[self.sort].sort_value, reverse=True)
        return tuple(kept)


AS_THEY_COME = RowChoice()
