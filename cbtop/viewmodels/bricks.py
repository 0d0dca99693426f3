"""Bricks: one row a name, from its statistics and its checks."""

from __future__ import annotations

from collections.abc import Sequence

from cbtop.profiler.brick_stats import BrickStats
from cbtop.profiler.phase_totals import PhaseTotals
from cbtop.viewmodels.model import BrickRow, CheckRow


def brick_rows(bricks: Sequence[BrickStats], totals: PhaseTotals, checks: Sequence[CheckRow]) -> tuple[BrickRow, ...]:
    """One row a brick that ran, in the order given."""
    return tuple(
        _row(stats, totals, [check.passed for check in checks if check.brick == stats.name]) for stats in bricks
    )


def _row(stats: BrickStats, totals: PhaseTotals, checks: Sequence[bool]) -> BrickRow:
    calls = stats.calls
    return BrickRow(
        name=stats.name,
        category=stats.category,
        count=calls.count,
        failed=calls.failed,
        total_us=calls.total_ns / 1e3,
        exclusive_us=stats.exclusive_ns / 1e3,
        avg_us=calls.mean_ns / 1e3,
        min_us=_us(calls.min_ns),
        max_us=_us(calls.max_ns),
        cv=calls.cv,
        p50_us=_us(calls.p50_ns),
        p95_us=_us(calls.p95_ns),
        p99_us=_us(calls.p99_ns),
        p999_us=_us(calls.p999_ns),
        us_per_token=totals.us_per_token(stats.closed_ns),
        elements=calls.elements,
        flops=stats.flops,
        bytes=stats.bytes,
        gflops=stats.gflops,
        gb_per_sec=stats.gb_per_sec,
        percent=totals.percent(stats.closed_exclusive_ns),
        budget_us_per_token=stats.budget_us_per_token,
        checks_passed=sum(checks),
        checks_failed=len(checks) - sum(checks),
        backend=stats.backend,
        budget_gb_per_sec=stats.budget_gb_per_sec,
    )


def _us(value_ns: float | None) -> float | None:
    return None if value_ns is None else value_ns / 1e3
