"""Statistics by brick and by category: what a profiled process, the screen and the reports all show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cbtop.profiler.phase_totals import PhaseTotals
from cbtop.profiler.stats import Calls
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickCategory, NodeKind


@dataclass(frozen=True, slots=True)
class ClosedTime:
    """The part of a time that lies in steps that have ended."""

    total_ns: int
    exclusive_ns: int


@dataclass(frozen=True, slots=True)
class BrickStats:
    """All calls of the bricks with one name.

    Elements, tokens, flops and bytes are four different things: elements are what the caller counted, tokens are
    counted once a step, flops and bytes are derived from the declared work (None where none was declared).
    `exclusive_ns` leaves out the bricks that ran inside this one.
    """

    name: str
    category: BrickCategory
    backend: str
    calls: Calls
    exclusive_ns: int
    closed: ClosedTime
    flops: float | None
    bytes: float | None
    budget_us_per_token: float | None  # of all the places it runs in together

    @property
    def elements_per_sec(self) -> float | None:
        return _rate(self.calls.elements, self.calls.total_ns, 1e9)

    @property
    def gflops(self) -> float | None:
        return _rate(self.flops, self.calls.total_ns)

    @property
    def gb_per_sec(self) -> float | None:
        return _rate(self.bytes, self.calls.total_ns)


@dataclass(frozen=True, slots=True)
class CategoryStats:
    """The bricks of one category together; `exclusive_ns` counts no nanosecond twice."""

    category: BrickCategory
    count: int
    total_ns: int
    exclusive_ns: int
    closed: ClosedTime
    elements: int


def brick_stats(totals: PhaseTotals) -> list[BrickStats]:
    """The bricks that ran, the largest exclusive time first."""
    groups: dict[str, list[Node]] = {}
    for node in totals.nodes:
        if node.kind is NodeKind.BRICK and totals.count[node.id]:
            groups.setdefault(node.name, []).append(node)
    calls = totals.stats.calls_of([[node.id for node in nodes] for nodes in groups.values()])
    found = [_stats(*group, c, totals) for group, c in zip(groups.items(), calls, strict=True) if c]
    return sorted(found, key=lambda stats: -stats.exclusive_ns)


def category_stats(bricks: Sequence[BrickStats]) -> list[CategoryStats]:
    """One entry a category that ran, in their own order."""
    found = []
    for category in BrickCategory:
        members = [stats for stats in bricks if stats.category is category]
        if members:
            found.append(
                CategoryStats(
                    category,
                    count=sum(stats.calls.count for stats in members),
                    total_ns=sum(stats.calls.total_ns for stats in members),
                    exclusive_ns=sum(stats.exclusive_ns for stats in members),
                    closed=ClosedTime(
                        total_ns=sum(stats.closed.total_ns for stats in members),
                        exclusive_ns=sum(stats.closed.exclusive_ns for stats in members),
                    ),
                    elements=sum(stats.calls.elements for stats in members),
                )
            )
    return found


def work(nodes: Iterable[Node], totals: PhaseTotals, unit: str) -> float | None:
    """The `flops` or `bytes` all calls of `nodes` did together; None when one of them did not declare them."""
    done = 0.0
    for node in nodes:
        per_call, per_element = getattr(node, f"{unit}_per_call"), getattr(node, f"{unit}_per_element")
        if per_call is None or per_element is None:
            return None
        done += totals.count[node.id] * per_call + totals.elements[node.id] * per_element
    return done


def _stats(name: str, nodes: list[Node], calls: Calls, totals: PhaseTotals) -> BrickStats:
    budgets = [node.budget_us_per_token for node in nodes]
    return BrickStats(
        name=name,
        category=nodes[0].category if nodes[0].category is not None else BrickCategory.OTHER,
        backend=nodes[0].backend,
        calls=calls,
        exclusive_ns=sum(totals.exclusive_ns(node, totals.total_ns) for node in nodes),
        closed=ClosedTime(
            total_ns=sum(totals.closed_ns[node.id] for node in nodes),
            exclusive_ns=sum(totals.exclusive_ns(node, totals.closed_ns) for node in nodes),
        ),
        flops=work(nodes, totals, "flops"),
        bytes=work(nodes, totals, "bytes"),
        budget_us_per_token=sum(b for b in budgets if b is not None) if None not in budgets else None,
    )


def _rate(amount: float | None, time_ns: int, factor: float = 1.0) -> float | None:
    return None if amount is None or not time_ns else factor * amount / time_ns
