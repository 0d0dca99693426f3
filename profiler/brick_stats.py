"""Statistics by brick and by category: what a profiled process, the screen and the reports all show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cbtop.profiler.budget import ByteBudget
from cbtop.profiler.phase_totals import PhaseTotals
from cbtop.profiler.stats import Calls
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickCategory, NodeKind


@dataclass(frozen=True, slots=True)
class ClosedTime:
    """The part of a time that lies in steps that have ended.

    `once_ns` counts a brick that runs inside another of its name once: it is what all of them together take.
    """

    once_ns: int
    exclusive_ns: int


@dataclass(frozen=True, slots=True)
class BrickStats:
    """All calls of the bricks with one name and category.

    Elements, tokens, flops and bytes are four different things: elements are what the caller counted, tokens are
    counted once a step, flops and bytes are derived from the declared work (None where none was declared).
    `exclusive_ns` leaves out the bricks that ran inside this one; `calls.total_ns` adds up whole calls, so one inside
    another of its name counts in both. `closed` leaves out what was adopted.
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
    budget_gb_per_sec: float | None  # the rate that this follows from, where each of them has the same
    uncounted: int = 0  # calls that gave no count of elements
    adopted_ns: int = 0  # exclusive time in ended steps that was spent elsewhere, beside their wall time

    @property
    def elements_per_sec(self) -> float | None:
        return None if self.uncounted else _rate(self.calls.elements, self.calls.total_ns, 1e9)

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
    adopted_ns: int = 0  # as of a brick


def brick_stats(totals: PhaseTotals) -> list[BrickStats]:
    """The bricks that ran, the largest exclusive time first."""
    groups: dict[tuple[str, BrickCategory], list[Node]] = {}
    for node in totals.nodes:
        if node.kind is NodeKind.BRICK and totals.count[node.id]:
            groups.setdefault(name_and_category(node), []).append(node)
    calls = totals.stats.calls_of([[node.id for node in nodes] for nodes in groups.values()])
    found = [_stats(nodes, c, totals) for nodes, c in zip(groups.values(), calls, strict=True) if c]
    return sorted(found, key=lambda stats: -stats.exclusive_ns)


def name_and_category(node: Node) -> tuple[str, BrickCategory]:
    """What the bricks have in common that are counted together."""
    return node.name, BrickCategory.OTHER if node.category is None else node.category


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
                        once_ns=sum(stats.closed.once_ns for stats in members),
                        exclusive_ns=sum(stats.closed.exclusive_ns for stats in members),
                    ),
                    elements=sum(stats.calls.elements for stats in members),
                    adopted_ns=sum(stats.adopted_ns for stats in members),
                )
            )
    return found


def _flops(nodes: Iterable[Node], totals: PhaseTotals) -> float | None:
    """The FLOP of all calls of `nodes` together; None when one of them did not declare them."""
    return _sum([_work(node, totals, "flops", node.work.flops_per_element) for node in nodes])


def _bytes(nodes: Iterable[Node], totals: PhaseTotals) -> float | None:
    """The bytes of all calls of `nodes` together; None when one of them did not declare them."""
    return _sum([_work(node, totals, "bytes", node.work.bytes_per_element) for node in nodes])


def _work(node: Node, totals: PhaseTotals, unit: str, per_element: float | None) -> float | None:
    """The `flops` or `bytes` of all calls of `node`: as each call gave them, or a straight line in their elements."""
    if totals.stats.rare("amounts", (node.id,)):
        given = totals.stats.rare(f"{unit}_given", (node.id,))
        return None if given != totals.count[node.id] else totals.stats.rare(unit, (node.id,))
    if per_element and totals.stats.rare("uncounted", (node.id,)):
        return None
    line: Callable[[float, float], float | None] = getattr(node.work, unit)
    return line(totals.count[node.id], totals.elements[node.id])


def _budget_us_per_token(node: Node, totals: PhaseTotals) -> float | None:
    """What `node` may take a token; a budget in bytes a second becomes one with the bytes it moved for a token."""
    if node.budget_gb_per_sec is None:
        return node.budget_us_per_token
    moved, closed_us_per_token = _bytes([node], totals), totals.us_per_token(totals.closed_ns[node.id])
    if not moved or not closed_us_per_token:
        return None
    # Of the bytes, those that moved in ended steps: the time a token takes is theirs too.
    bytes_per_token = moved / totals.total_ns[node.id] * closed_us_per_token * 1e3
    return ByteBudget(node.budget_gb_per_sec).to_token_budget(bytes_per_token).us_per_token


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _stats(nodes: list[Node], calls: Calls, totals: PhaseTotals) -> BrickStats:
    closed_ns = {node.id: totals.exclusive_ns(node, totals.closed_ns) for node in nodes}
    # Of a call that still runs, what has ended inside it is not taken off the calls before.
    exclusive_ns = sum(max(closed_ns[node.id], totals.exclusive_ns(node, totals.total_ns)) for node in nodes)
    adopted_ns = sum(closed_ns[node.id] for node in nodes if node.id in totals.adopted)
    rates = {node.budget_gb_per_sec for node in nodes}
    name, category = name_and_category(nodes[0])
    outermost = _outermost(nodes, totals)
    return BrickStats(
        name=name,
        category=category,
        backend=nodes[0].backend,
        calls=calls,
        exclusive_ns=exclusive_ns,
        closed=ClosedTime(
            once_ns=sum(totals.closed_ns[node.id] for node in outermost),
            exclusive_ns=sum(closed_ns.values()) - adopted_ns,
        ),
        flops=_flops(nodes, totals),
        bytes=_bytes(nodes, totals),
        budget_gb_per_sec=rates.pop() if len(rates) == 1 else None,
        budget_us_per_token=_sum([_budget_us_per_token(node, totals) for node in outermost]),
        uncounted=totals.stats.rare("uncounted", [node.id for node in nodes]),
        adopted_ns=adopted_ns,
    )


def _outermost(nodes: list[Node], totals: PhaseTotals) -> list[Node]:
    """Those of `nodes` that lie in no other of them."""
    ids = {node.id for node in nodes}

    def is_inside(node: Node) -> bool:
        outer = node.parent
        while outer is not None and outer not in ids:
            outer = totals.table[outer].parent
        return outer is not None

    return [node for node in nodes if not is_inside(node)]


def _rate(amount: float | None, time_ns: int, factor: float = 1.0) -> float | None:
    return None if amount is None or not time_ns else factor * amount / time_ns
