"""Make the rows of the categories Norm, Attention, FFN, Other and Communication, each the sum of its bricks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cbtop.protocol.vocabulary import BrickCategory

if TYPE_CHECKING:
    from cbtop.profiler.analysis.brick_stats import CategoryStats
    from cbtop.profiler.analysis.phase_totals import PhaseTotals


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """The row of a category: the sum of its bricks."""

    name: str
    category: BrickCategory
    count: int
    # Sum of the exclusive times of the category's bricks. Time of nested bricks counts once.
    total_exclusive_us: float
    avg_exclusive_us: float | None
    exclusive_us_per_token: float | None
    percent: float | None


def category_rows(categories: Iterable[CategoryStats], totals: PhaseTotals) -> tuple[CategoryRow, ...]:
    """Return one row for each category that ran, in the order of `bricks`."""
    return tuple(
        CategoryRow(
            name=stats.category.display_name,
            category=stats.category,
            count=stats.count,
            total_exclusive_us=stats.exclusive_ns / 1e3,
            avg_exclusive_us=None if stats.mean_exclusive_ns is None else stats.mean_exclusive_ns / 1e3,
            exclusive_us_per_token=totals.us_per_token(stats.closed.exclusive_ns),
            percent=totals.percent(stats.closed.exclusive_ns, stats.adopted_ns),
        )
        for stats in categories
    )
