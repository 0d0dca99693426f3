"""The columns of the table of bricks: names and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import median

from cbtop import units
from cbtop.comparison.comparison import Comparison
from cbtop.text import roof_text
from cbtop.text.statistics import BRICK_COLUMNS, BUDGET_COLUMNS, CHECK_COLUMNS, HOST_COLUMNS, statistic
from cbtop.tui.views.baseline import change_role, change_text
from cbtop.tui.views.figures import figure, figure_columns
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.bars import bar
from cbtop.tui.widgets.braille import DOTS_ACROSS, sparkline
from cbtop.tui.widgets.columns import Column
from cbtop.tui.widgets.lines import Line, clean, clip
from cbtop.tui.widgets.upright import usual_top
from cbtop.viewmodels.bricks import TREND_S, BrickRow
from cbtop.viewmodels.merged import RankRow, RanksView

NEAR_BUDGET_PERCENT = 90.0
TREND_WIDTH = 10
DRAWN_TRENDS = 64  # Number of drawn trends that are cached. A trend changes once a second but is drawn more often.


def _name(row: BrickRow, width: int) -> Line:
    look = CATEGORY_LOOKS[row.category]
    return ((f"{look.glyph} ", look.role), (clip(clean(row.name), width - 2), "strong"))


def _category(row: BrickRow, width: int) -> Line:
    return ((row.category.display_name, CATEGORY_LOOKS[row.category].role),)


def _rank(row: BrickRow, width: int) -> Line:
    return ((clean(row.rank or ""), "accent"),)


def _checks(row: BrickRow) -> Line:
    if row.checks_failed:
        return ((f"{row.checks_failed} fail", "bad"),)
    return ((f"{row.checks_passed} ok", "good"),) if row.checks_passed else (("–", "faint"),)


def _budget(row: BrickRow) -> Line:
    used = row.budget_used_percent
    if used is None:
        return (("–", "faint"),)
    role = "bad" if used > 100 else "warn" if used > NEAR_BUDGET_PERCENT else "good"
    mark = "!" if used > 100 else ""
    return ((f"{mark}{used:.0f} %", role),)


def _trend(row: BrickRow, width: int) -> Line:
    return _drawn_trend(row.trend_us, width, CATEGORY_LOOKS[row.category].role)


@lru_cache(maxsize=DRAWN_TRENDS)
def _drawn_trend(trend_us: tuple[float | None, ...], width: int, role: str) -> Line:
    """Draw a trend in `width` cells.

    If several seconds share a dot, the dot has the highest value of these seconds.
    """
    if not any(trend_us):
        return ((units.NOT_MEASURED, "faint"),)
    each = -(-TREND_S // (width * DOTS_ACROSS))
    us = trend_us[len(trend_us) % each :]
    highest = [
        max((value for value in us[at : at + each] if value is not None), default=None)
        for at in range(0, len(us), each)
    ]
    known = [value for value in trend_us if value is not None]
    return sparkline(highest, width, usual_top(known, median(known)), role)


def limit_cell(row: BrickRow) -> Line:
    """Return how far a brick is from its roof as a table cell, such as `memory 79 %`. A grey `~` is added if the roof
    is uncertain.
    """
    text = roof_text.limit(row)
    if row.roof is None:
        return figure(text)
    return ((text, "dim" if row.roof_unsure else "bad" if row.above_roof else ""),)


def rank_columns(columns: Sequence[Column[BrickRow]], ranks: RanksView) -> tuple[Column[BrickRow], ...]:
    """Return the columns for the name and the share of a brick from `columns`, followed by one column per rank."""
    rows = {(row.brick, row.category): row for row in ranks.rows}

    def of(row: BrickRow) -> RankRow | None:
        return rows.get((row.name, row.category.display_name))

    def of_rank(at: int) -> Column[BrickRow]:
        def us(row: BrickRow) -> float | None:
            found = of(row)
            return found.us[at] if found else None

        def cell(row: BrickRow, width: int) -> Line:
            found = of(row)
            return figure(units.number(us(row)), "strong warn" if found and found.slowest == at else "")

        def sort_value(row: BrickRow) -> float:
            found = us(row)
            return -1.0 if found is None else found

        doc = f"its exclusive µs a {ranks.unit} in this rank; the slowest is marked"
        name = clip(clean(ranks.ranks[at].name), 11)
        return Column(name, max(8, len(name)), 2 + at, cell, doc, sort_key=sort_value)

    kept = [column for column in columns if column.title in ("brick", statistic("percent").title)]
    return (*kept, *(of_rank(at) for at in range(len(ranks.ranks))))


def change_column(found: Comparison | None) -> Column[BrickRow]:
    """Return the column for the change of each brick's typical time since the baseline."""
    changes = found.bricks if found else {}

    def cell(row: BrickRow, width: int) -> Line:
        change = changes.get(row.key)
        return figure(change_text(change), change_role(change))

    def sort_value(row: BrickRow) -> float:
        change = changes.get(row.key)
        return -1e9 if change is None or change.percent is None else change.percent

    doc = (
        "typical exclusive µs/token of the last seconds beside the baseline's (`b`), each call as long as the median "
        "one of its layer, with as many calls as the baseline, where chance alone does not explain it: "
        "`noise` where it may; n/a where they do not compare, for which the overview has the reason (derived)"
    )
    return Column("Δ", 9, 3, cell, doc, sort_key=sort_value)


LIMIT_TITLE, LIMIT_WIDTH = "% of roof", 15
_KNOWN_LIMIT_PRIORITY = 4  # The limit has this priority if it is known for any brick.
_RANK = Column("of", 10, 1, _rank, "the rank whose figures these are: the slowest")
_CATEGORY = Column("category", 9, 10, _category, "the group a report rolls it up into", align="left")
_TREND = Column(
    "trend",
    TREND_WIDTH,
    7,
    _trend,
    "inclusive µs/token (without steps: µs a call) in each of the last 60 s (derived), the newest on the right, on a "
    "scale of its own: the median is at most half as high, what is over four times the median is cut",
    stretch=1,
    max_width=TREND_S // DOTS_ACROSS,
    is_drawn=True,
)
_LIMIT: Column[BrickRow] = Column(
    LIMIT_TITLE,
    LIMIT_WIDTH,
    8,
    lambda row, _: limit_cell(row),
    "what bounds it, and the percentage of its roof that it reaches (derived): memory or compute if it is near that "
    "roof; `latency` if it is far below every roof: latency or overhead; `launch` if the device waited for the host; "
    "`shared` if steps run at once. A grey ~ if roofs are unsure, ⚠ above the roof",
    align="left",
    sort_key=statistic("percent_of_roof").sort_value,
)


def _name_column(longest_name: int) -> Column[BrickRow]:
    return Column(
        "brick",
        18,
        0,
        _name,
        "name, in front the glyph of its category",
        align="left",
        # If the longest name is long, give most of the spare width to the names.
        stretch=1 if longest_name <= 20 else 6,
        max_width=max(30, min(36, longest_name + 2)),
        sort_key=lambda row: row.name,
    )


def _share_column(largest_percent: float) -> Column[BrickRow]:
    """Return the column with bars for the share of wall time. A bar of `largest_percent` fills the column."""

    def share(row: BrickRow, width: int) -> Line:
        fraction = None if row.percent is None else row.percent / max(largest_percent, 1e-9)
        return bar(fraction, width, CATEGORY_LOOKS[row.category].role)

    return Column(
        "share",
        8,
        3,
        share,
        "the same as wall %, drawn; the largest fills the column",
        align="left",
        stretch=2,
        max_width=48,
        is_drawn=True,
    )


def brick_columns(
    largest_percent: float,
    *,
    budgets: bool,
    checks: bool,
    launches: bool = False,
    of_ranks: bool = False,
    limits: bool = False,
    longest_name: int = 0,
) -> tuple[Column[BrickRow], ...]:
    """Return the columns of the table of bricks. Columns for budgets, checks, launches and ranks are optional.

    If `limits` are known, they are also shown in a narrow table.
    """
    return (
        _name_column(longest_name),
        *((_RANK,) if of_ranks else ()),
        _CATEGORY,
        _share_column(largest_percent),
        *figure_columns(BRICK_COLUMNS, roles={"percent": "strong"}),
        _TREND,
        replace(_LIMIT, priority=_KNOWN_LIMIT_PRIORITY) if limits else _LIMIT,
        *(figure_columns(HOST_COLUMNS) if launches else ()),
        *(figure_columns(BUDGET_COLUMNS, cells={"budget_used_percent": _budget}) if budgets else ()),
        *(figure_columns(CHECK_COLUMNS, cells={"checks_failed": _checks}) if checks else ()),
    )
