"""Categories: Norm, Attention, FFN and Other, each the sum of its bricks."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop.profiler.brick_stats import BrickStats, category_stats
from cbtop.profiler.phase_totals import PhaseTotals
from cbtop.viewmodels.model import CategoryRow


def category_rows(bricks: Sequence[BrickStats], totals: PhaseTotals) -> tuple[CategoryRow, ...]:
    """One row a category that ran, in their own order."""
    return tuple(
        CategoryRow(
            name=stats.category.display_name,
            category=stats.category,
            count=stats.count,
            total_us=stats.total_ns / 1e3,
            exclusive_us=stats.exclusive_ns / 1e3,
            avg_us=stats.exclusive_ns / stats.count / 1e3,
            us_per_token=totals.us_per_token(stats.closed_exclusive_ns),
            percent=totals.percent(stats.closed_exclusive_ns),
        )
        for stats in category_stats(bricks)
    )
