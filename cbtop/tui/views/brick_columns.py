"""The columns of the bricks table."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop import formatting
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.bars import bar
from cbtop.tui.widgets.columns import Column
from cbtop.tui.widgets.lines import Line, clean, clip
from cbtop.viewmodels.model import BrickRow, RanksView

NEAR_BUDGET_PERCENT = 90.0


def _name(row: BrickRow, width: int) -> Line:
    look = CATEGORY_LOOKS[row.category]
    return ((f"{look.glyph} ", look.role), (clip(clean(row.name), width - 2), "strong"))


def _category(row: BrickRow, width: int) -> Line:
    return ((row.category.display_name, CATEGORY_LOOKS[row.category].role),)


def _rank(row: BrickRow, width: int) -> Line:
    return ((clean(row.rank or ""), "accent"),)


def _checks(row: BrickRow, width: int) -> Line:
    if row.checks_failed:
        return ((f"✗{row.checks_failed}", "bad"),)
    return ((f"✓{row.checks_passed}", "good"),) if row.checks_passed else (("–", "faint"),)


def _budget(row: BrickRow, width: int) -> Line:
    used = row.budget_used_percent
    if used is None:
        return (("–", "faint"),)
    role = "bad" if used > 100 else "warn" if used > NEAR_BUDGET_PERCENT else "good"
    mark = "!" if used > 100 else ""
    return ((f"{mark}{used:.0f} %", role),)


def _figure(text: str, role: str = "") -> Line:
    return ((text, "faint" if text == formatting.NOT_MEASURED else role),)


def _or_less(value: float | None) -> float:
    return -1.0 if value is None else value


def rank_columns(columns: Sequence[Column[BrickRow]], ranks: RanksView) -> tuple[Column[BrickRow], ...]:
    """Of `columns` those that say which brick and how much of the whole, and one a rank."""
    rows = {row.brick: row for row in ranks.rows}

    def of_rank(at: int) -> Column[BrickRow]:
        def us(row: BrickRow) -> float | None:
            return rows[row.name].us[at] if row.name in rows else None

        def cell(row: BrickRow, width: int) -> Line:
            slowest = row.name in rows and rows[row.name].slowest == at
            return _figure(formatting.number(us(row)), "strong warn" if slowest else "")

        doc = f"its own µs a {ranks.unit} in this rank; the slowest is marked"
        name = clip(clean(ranks.ranks[at].name), 11)
        return Column(name, max(8, len(name)), 2 + at, cell, doc, sort_key=lambda row: _or_less(us(row)))

    kept = [column for column in columns if column.title in ("brick", "wall %")]
    return (*kept, *(of_rank(at) for at in range(len(ranks.ranks))))


def brick_columns(
    largest_percent: float, *, budgets: bool, checks: bool, of_ranks: bool = False
) -> tuple[Column[BrickRow], ...]:
    """The columns worth showing: those for budgets, checks and ranks only where a brick has one."""

    def share(row: BrickRow, width: int) -> Line:
        fraction = None if row.percent is None else row.percent / max(largest_percent, 1e-9)
        return bar(fraction, width, CATEGORY_LOOKS[row.category].role)

    columns: list[Column[BrickRow]] = [
        Column(
            "brick",
            18,
            0,
            _name,
            "name, in front the glyph of its category",
            align="left",
            stretch=1,
            max_width=30,
            sort_key=lambda row: row.name,
        ),
        Column("category", 9, 8, _category, "the group a report rolls it up into", align="left"),
        Column(
            "share",
            8,
            3,
            share,
            "the same as wall %, drawn; the largest fills the column",
            align="left",
            stretch=2,
            max_width=48,
        ),
        Column(
            "wall %",
            7,
            1,
            lambda row, _: _figure(formatting.percent_number(row.percent), "strong"),
            "exclusive time as a part of the step's wall time",
            sort_key=lambda row: row.exclusive_us,
        ),
        Column(
            "µs/tok",
            8,
            2,
            lambda row, _: _figure(formatting.number(row.us_per_token)),
            "µs for one token, all layers together, with the bricks that ran inside it",
            sort_key=lambda row: _or_less(row.us_per_token),
        ),
        Column(
            "avg µs",
            8,
            7,
            lambda row, _: _figure(formatting.number(row.avg_us)),
            "mean time of one call",
            sort_key=lambda row: row.avg_us,
        ),
        Column(
            "p50 µs",
            8,
            4,
            lambda row, _: _figure(formatting.number(row.p50_us)),
            "half of the calls took at most this",
            sort_key=lambda row: _or_less(row.p50_us),
        ),
        Column(
            "p95 µs",
            8,
            9,
            lambda row, _: _figure(formatting.number(row.p95_us)),
            "95 of 100 calls took at most this",
            sort_key=lambda row: _or_less(row.p95_us),
        ),
        Column(
            "p99 µs",
            8,
            5,
            lambda row, _: _figure(formatting.number(row.p99_us)),
            "99 of 100 calls took at most this",
            sort_key=lambda row: _or_less(row.p99_us),
        ),
        Column(
            "count",
            9,
            11,
            lambda row, _: _figure(formatting.count(row.count)),
            "calls recorded",
            sort_key=lambda row: row.count,
        ),
        Column(
            "GB/s",
            6,
            6,
            lambda row, _: _figure(formatting.number(row.gb_per_sec)),
            "bytes of its shapes over measured time (derived)",
            sort_key=lambda row: _or_less(row.gb_per_sec),
        ),
        Column(
            "GFLOP/s",
            8,
            10,
            lambda row, _: _figure(formatting.number(row.gflops)),
            "flops of its shapes over measured time (derived)",
            sort_key=lambda row: _or_less(row.gflops),
        ),
    ]
    if of_ranks:
        columns.insert(1, Column("of", 10, 1, _rank, "the rank whose figures these are: the slowest"))
    if budgets:
        columns.append(
            Column(
                "budget",
                7,
                6,
                _budget,
                "µs/token used of the budget set for it",
                sort_key=lambda row: _or_less(row.budget_used_percent),
            )
        )
    if checks:
        columns.append(
            Column(
                "checks",
                7,
                6,
                _checks,
                "✓ checks against the reference passed, ✗ failed",
                sort_key=lambda row: row.checks_failed,
            )
        )
    return tuple(columns)
