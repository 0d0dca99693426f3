"""Categories: Norm, Attention, FFN and Other, added up from the brick rows."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop.protocol.vocabulary import BrickCategory
from cbtop.viewmodels.model import BrickRow, CategoryRow


def category_rows(bricks: Sequence[BrickRow], tokens: int | None) -> tuple[CategoryRow, ...]:
    """One row a category that ran, in their own order."""
    rows = []
    for category in BrickCategory:
        members = [row for row in bricks if row.category is category]
        if members:
            rows.append(_row(category, members, tokens))
    return tuple(rows)


def _row(category: BrickCategory, members: list[BrickRow], tokens: int | None) -> CategoryRow:
    count = sum(row.count for row in members)
    exclusive_us = sum(row.exclusive_us for row in members)
    shares = [row.percent for row in members if row.percent is not None]
    return CategoryRow(
        name=category.display_name,
        category=category,
        count=count,
        total_us=sum(row.total_us for row in members),
        exclusive_us=exclusive_us,
        avg_us=exclusive_us / count,
        us_per_token=exclusive_us / tokens if tokens else None,
        percent=sum(shares) if shares else None,
    )
