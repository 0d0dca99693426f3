"""Filter and sort the bricks of a table, for screens and reports."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cbtop.text.statistics import BRICK_COLUMNS, BUDGET_COLUMNS, CHECK_COLUMNS, HOST_COLUMNS, POINT_COLUMNS
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.training import pass_of

BY_NAME = "brick"
_STATISTICS = {
    place.statistic.title: place.statistic
    for place in (*BRICK_COLUMNS, *HOST_COLUMNS, *BUDGET_COLUMNS, *CHECK_COLUMNS, *POINT_COLUMNS)
    if place.statistic.unit != "word"
}
SORT_COLUMNS = (BY_NAME, *_STATISTICS)  # titles of the columns that can sort the bricks on the screen


def bare(name: str) -> str:
    """Return `name` in a simplified form for comparisons of column names: `P95 µs` becomes `p95us`."""
    return re.sub(r"[^a-z0-9%]", "", name.casefold().replace("\u03bc", "u").replace("\xb5", "u"))


def _sort_names() -> dict[str, str]:
    names = {BY_NAME: BY_NAME}
    for title, statistic in _STATISTICS.items():
        for name in (title, statistic.key, statistic.key.removesuffix("_us"), statistic.word, statistic.report_title):
            names.setdefault(bare(name) or bare(title), title)
    return names


SORT_NAMES = _sort_names()  # maps each accepted name, such as `p95` or `p95us`, to the title of its column


# Names of bricks are untrusted, and a regular expression may take exponential time on one. So its number of binary
# choices is limited to MAX_CHOICES. A repetition counts as REPETITION choices, and `?` or `|` as ALTERNATIVE.
MAX_CHOICES, REPETITION, ALTERNATIVE = 16, 8, 2
# A regular expression is applied to this many characters of a name. Plain text is searched in the whole name.
MAX_SEARCHED = 128
_ONE_CHARACTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]", re.DOTALL)
# matches groups that are repeated, and unusual forms of `(?` such as comments and flags
_REFUSED = re.compile(r"\)[*+{]|\(\?(?![:=!<P]|i\))")


def matcher(text: str) -> Callable[[str], bool]:
    """Return a function that searches a word for `text`, ignoring case.

    `text` is searched as a regular expression if it is a valid one. Expressions that repeat a group, or have more
    than MAX_CHOICES choices, might take too long, and are searched as plain text.
    """
    if _ends_soon(text):
        try:
            # Ignore warnings that the syntax of regular expressions may change in the future.
            with warnings.catch_warnings(action="ignore"):
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
    # The ? of lazy quantifiers such as *? adds no choice.
    for char in re.sub(r"(?<=[*+}?(])\?", "", bare):
        depth += (char == "(") - (char == ")")
        if char in "*+{":
            choices += REPETITION
        elif char == "?" or (char == "|" and depth > 0):
            choices += ALTERNATIVE
        elif char == "|":
            choices = 0  # The choices of each alternative are counted separately.
        most = max(most, choices)
    return most <= MAX_CHOICES


def words_of(row: BrickRow) -> tuple[str, str]:
    """Return the texts of a table row that the filter compares with its pattern."""
    return row.name, row.category.display_name


@dataclass(frozen=True, slots=True)
class RowChoice:
    """The filter and the order of bricks in a table.

    `sort` is one of SORT_COLUMNS, or "" to keep the order. Figures are sorted from large to small, and names from A
    to Z.
    """

    sort: str = ""
    filter: str = ""

    def of(self, source: SourceView) -> SourceView:
        """Return `source` with its bricks filtered and sorted, in its list of bricks and on its roofline."""
        matches = matcher(self.filter)
        ranks = source.ranks
        if ranks is not None and self.filter:
            kept = (row for row in ranks.rows if matches(row.brick) or matches(row.category))
            ranks = replace(ranks, rows=tuple(kept))
        roofline = replace(source.roofline, points=self._chosen(source.roofline.points))
        bricks, training = self._chosen(source.bricks), source.training
        if training is not None and self.filter:
            names = {pass_of(row.name)[0] for row in bricks}
            training = replace(training, bricks=tuple(row for row in training.bricks if row.name in names))
        return replace(source, bricks=bricks, ranks=ranks, roofline=roofline, training=training)

    def _chosen(self, rows: Sequence[BrickRow]) -> tuple[BrickRow, ...]:
        matches = matcher(self.filter)
        kept = [row for row in rows if any(matches(word) for word in words_of(row))]
        if self.sort == BY_NAME:
            kept.sort(key=lambda row: row.name.casefold())
        elif self.sort:
            kept.sort(key=_STATISTICS[self.sort].sort_value, reverse=True)
        return tuple(kept)


AS_THEY_COME = RowChoice()
