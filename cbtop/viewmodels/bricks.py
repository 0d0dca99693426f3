"""Bricks: one row a name, summed over layers and occurrences."""

from __future__ import annotations

from collections.abc import Iterable

from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickCategory, NodeKind
from cbtop.viewmodels.model import BrickRow, CheckRow
from cbtop.viewmodels.phase import PhaseTotals


def brick_rows(totals: PhaseTotals, checks: tuple[CheckRow, ...]) -> tuple[BrickRow, ...]:
    """The bricks that ran, the largest exclusive time first."""
    groups: dict[str, list[Node]] = {}
    for node in totals.nodes:
        if node.kind is NodeKind.BRICK and totals.count[node.id]:
            groups.setdefault(node.name, []).append(node)
    rows = [_row(name, nodes, totals, checks) for name, nodes in groups.items()]
    return tuple(sorted(rows, key=lambda row: -row.exclusive_us))


def work(nodes: Iterable[Node], totals: PhaseTotals, unit: str) -> float | None:
    """The `flops` or `bytes` all calls of `nodes` did together; None when one of them did not declare them."""
    done = 0.0
    for node in nodes:
        per_call, per_element = getattr(node, f"{unit}_per_call"), getattr(node, f"{unit}_per_element")
        if per_call is None or per_element is None:
            return None
        done += totals.count[node.id] * per_call + totals.elements[node.id] * per_element
    return done


def _row(name: str, nodes: list[Node], totals: PhaseTotals, checks: tuple[CheckRow, ...]) -> BrickRow:
    count = sum(totals.count[node.id] for node in nodes)
    total_ns = sum(totals.total_ns[node.id] for node in nodes)
    exclusive_ns = sum(totals.exclusive_ns[node.id] + _kernels_ns(node, totals) for node in nodes)
    flops, moved = work(nodes, totals, "flops"), work(nodes, totals, "bytes")
    budgets = [node.budget_us_per_token for node in nodes]
    p50, p95, p99 = (totals.percentile_us(nodes, fraction) for fraction in (0.50, 0.95, 0.99))
    own_checks = [check.passed for check in checks if check.brick == name]
    return BrickRow(
        name=name,
        category=nodes[0].category if nodes[0].category is not None else BrickCategory.OTHER,
        count=count,
        failed=sum(totals.failed[node.id] for node in nodes),
        total_us=total_ns / 1e3,
        exclusive_us=exclusive_ns / 1e3,
        avg_us=total_ns / count / 1e3,
        min_us=min(totals.min_ns[node.id] for node in nodes) / 1e3,
        max_us=max(totals.max_ns[node.id] for node in nodes) / 1e3,
        p50_us=p50,
        p95_us=p95,
        p99_us=p99,
        us_per_token=total_ns / totals.tokens / 1e3 if totals.tokens else None,
        elements=sum(totals.elements[node.id] for node in nodes),
        flops=flops,
        bytes=moved,
        gflops=None if flops is None or not total_ns else flops / total_ns,
        gb_per_sec=None if moved is None or not total_ns else moved / total_ns,
        percent=totals.percent(exclusive_ns),
        budget_us_per_token=sum(b for b in budgets if b is not None) if None not in budgets else None,
        checks_passed=sum(own_checks),
        checks_failed=len(own_checks) - sum(own_checks),
        backend=nodes[0].backend,
    )


def _kernels_ns(brick: Node, totals: PhaseTotals) -> int:
    """The timed kernels of a brick are its own work: only bricks inside a brick are somebody else's."""
    return sum(
        totals.total_ns[node.id] for node in totals.nodes if node.parent == brick.id and node.kind is NodeKind.KERNEL
    )
