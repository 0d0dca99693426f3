"""Statistics by brick and by category, for the profiled process, the screen and the reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.budget import ByteBudget
from cbtop.profiler.analysis.calls import Calls
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.histograms import Column
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickCategory, NodeKind

_NO_NODES = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class ClosedTime:
    """The time in ns of a brick in ended steps.

    `once_ns`: a brick inside a brick of the same name does not count again. `exclusive_ns`: without inner bricks, and
    without adopted work (done for it by other threads or tasks). `calls_ns`: the sum of whole calls, with adopted
    work.
    """

    once_ns: int
    exclusive_ns: int
    calls_ns: int


@dataclass(frozen=True, slots=True)
class BrickStats:
    """All calls of the bricks with one name and category, or of all modules of one class.

    `calls.elements` is the sum of the numbers that the caller passed. Tokens are counted once per step. Flops and
    bytes follow from the declared work, and are None without it.

    `exclusive_ns` excludes the bricks inside this one. `exclusive_of_ns` is the whole time of the calls that
    `exclusive_ns` is about. `calls.total_ns` adds up whole calls, so a call inside a brick of the same name counts
    twice. `closed` has the times in ended steps.
    """

    name: str
    category: BrickCategory
    backend: str
    calls: Calls
    exclusive_ns: int
    exclusive_of_ns: int
    closed: ClosedTime
    flops: float | None
    bytes: float | None
    budget_us_per_token: float | None  # time budget per token, for all places of the brick together
    # The required rate; None if it differs between the brick's places.
    budget_gb_per_sec: float | None
    # The bytes of a collective's data. `bytes` is then the traffic on the links.
    size_bytes: float | None = None
    uncounted: int = 0  # number of calls whose number of elements is unknown
    # The exclusive time of work that other threads or tasks did for ended steps. It is not part of the steps' wall
    # time.
    adopted_ns: int = 0
    dtypes: tuple[str, ...] = ()  # the number types that the brick multiplies, as in `Work`

    @property
    def count(self) -> int:
        """Number of calls."""
        return self.calls.count

    @property
    def total_ns(self) -> int:
        """The time of all calls, including inner bricks."""
        return self.calls.total_ns

    @property
    def total_elements(self) -> int:
        """Sum of the elements of all calls."""
        return self.calls.elements

    @property
    def mean_exclusive_ns(self) -> float | None:
        """The mean exclusive time per call. None if `exclusive_ns` is about no call.

        Exclusive time is known only for calls in ended steps. In a time range, only steps that ended in the range
        count.
        """
        if not self.calls.total_ns:
            return 0.0
        return _rate(self.exclusive_ns, self.exclusive_of_ns, self.calls.mean_ns)

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
    """The sums over all bricks of one category. `exclusive_ns` counts no time twice."""

    category: BrickCategory
    count: int
    total_ns: int
    exclusive_ns: int
    mean_exclusive_ns: float | None  # per call
    closed: ClosedTime
    elements: int
    adopted_ns: int = 0  # see BrickStats

    @classmethod
    def zero(cls, category: BrickCategory) -> CategoryStats:
        """Return the statistics of a category that did not run."""
        return cls(category, 0, 0, 0, None, ClosedTime(0, 0, 0), 0)

    @property
    def total_elements(self) -> int:
        """Sum of the elements of all calls."""
        return self.elements

    def percentage(self, total_ns: float) -> float | None:
        """Return the exclusive time in percent of `total_ns`, or None if `total_ns` is not positive."""
        return 100 * self.exclusive_ns / total_ns if total_ns > 0 else None


@dataclass(frozen=True, slots=True)
class _Brick:
    """One brick: its nodes (same name and category) that ran, and their common attributes."""

    name: str
    category: BrickCategory
    backend: str
    nodes: Column
    alike: tuple[Column, ...]  # `nodes`, grouped by equal work and budget
    outermost: Column  # the `nodes` that are not inside another node of this brick
    alike_outermost: tuple[Column, ...]
    budget_gb_per_sec: float | None  # the required rate; None if it differs between nodes
    dtypes: tuple[str, ...]


class _Bricks:
    """Adds up values of nodes for all bricks at once, in half the time of separate NumPy calls for each brick."""

    def __init__(self, bricks: Sequence[_Brick]) -> None:
        self.bricks = bricks
        self.nodes, self._begins = _behind_each_other([brick.nodes for brick in bricks])
        self._outer, self._outer_begins = _behind_each_other([brick.outermost for brick in bricks])
        self._alike, self._alike_begins = _behind_each_other([one for brick in bricks for one in brick.alike])
        self._alike_of = [len(brick.alike) for brick in bricks]

    def sums(self, by_node: Column) -> list[int]:
        """Return the sum of `by_node` for each brick. `by_node` has one entry for each of `nodes`, the nodes of all
        bricks in order.
        """
        found: list[int] = np.add.reduceat(by_node, self._begins).tolist()
        return found

    def outermost_sums(self, column: Column) -> list[int]:
        """Return the sum of `column` over each brick's outermost nodes. `column` has an entry for every node of the
        table.
        """
        found: list[int] = np.add.reduceat(column[self._outer], self._outer_begins).tolist()
        return found

    def alike_sums(self, column: Column) -> list[list[int]]:
        """Return for each brick the sums of `column` over its groups of nodes with equal work (`alike`).

        `column` has an entry for every node of the table.
        """
        summed = iter(np.add.reduceat(column[self._alike], self._alike_begins).tolist())
        return [list(islice(summed, groups)) for groups in self._alike_of]


def _behind_each_other(groups: Sequence[Column]) -> tuple[Column, Column]:
    """Concatenate `groups`. No group may be empty. Returns the array and the index at which each group begins."""
    return np.concatenate([_NO_NODES, *groups]), np.cumsum([0, *(len(group) for group in groups)])[:-1]


def brick_stats(totals: PhaseTotals) -> list[BrickStats]:
    """Return the bricks that ran, sorted by exclusive time, largest first."""
    ran = _bricks(totals)
    if not ran.bricks:
        return []
    nodes, is_adopted, closed_ns = ran.nodes, totals.adopted[ran.nodes], totals.columns["closed_ns"]
    closed_exclusive_ns = totals.closed_exclusive_ns[nodes]
    rows = zip(
        ran.bricks,
        totals.stats.calls_of([brick.nodes for brick in ran.bricks]),
        # A running call has not added its own time yet, but ended calls inside it are already subtracted. So the
        # exclusive time may be too small. The larger of the two times is right.
        ran.sums(np.maximum(closed_exclusive_ns, totals.exclusive_ns[nodes])),
        ran.sums(closed_exclusive_ns),
        ran.sums(np.where(is_adopted, closed_exclusive_ns, 0)),
        ran.sums(closed_ns[nodes]),
        ran.sums(totals.columns["count"][nodes]),
        ran.sums(totals.columns["total_ns"][nodes]),
        ran.outermost_sums(closed_ns),
        ran.alike_sums(totals.columns["count"]),
        ran.alike_sums(totals.columns["elements"]),
        strict=True,
    )
    found = [
        _stats(
            brick,
            # The calls of a model include plain steps. Their bricks are unknown, so sums are of recorded steps only.
            calls if calls.count == recorded else replace(calls, count=recorded, total_ns=recorded_ns),
            totals,
            exclusive_ns=exclusive_ns,
            adopted_ns=adopted_ns,
            closed=ClosedTime(once_ns, closed_exclusive - adopted_ns, calls_ns),
            alike=list(zip(brick.alike, counts, elements, strict=True)),
        )
        for (
            brick,
            calls,
            exclusive_ns,
            closed_exclusive,
            adopted_ns,
            calls_ns,
            recorded,
            recorded_ns,
            once_ns,
            counts,
            elements,
        ) in rows
        if calls
    ]
    return sorted(found, key=lambda stats: -stats.exclusive_ns)


def brick_nodes(totals: PhaseTotals) -> dict[tuple[str, BrickCategory], Column]:
    """Return the nodes of each brick that ran. Bricks are in the order of their first nodes."""
    return {(brick.name, brick.category): brick.nodes for brick in _bricks(totals).bricks}


def _bricks(totals: PhaseTotals) -> _Bricks:
    table, ids = totals.table, totals.inside.ids
    if totals.step is not None and totals.own_rows[totals.step.id]:
        ids = np.append(ids, totals.step.id)
    is_row = (table.column("kind_of")[ids] == NodeKind.BRICK) | totals.own_rows[ids]
    ran = ids[is_row & (totals.columns["count"][ids] > 0)]
    return table.made_of("bricks", totals.step.id if totals.step else None, ran, lambda: _by_brick(table, ran))


def _by_brick(table: NodeTable, ran: Column) -> _Bricks:
    groups: dict[tuple[str, BrickCategory], list[Column]] = {}
    for nodes in _alike(ran, table.column("first_of")):
        groups.setdefault(name_and_category(table[int(nodes[0])]), []).append(nodes)
    is_outermost = outermost(
        np.concatenate([_NO_NODES, *(part for parts in groups.values() for part in parts)]), table
    )
    # `groups` has an array of nodes for each phase in which a brick ran.
    return _Bricks([_brick(table, *brick, np.concatenate(parts), is_outermost) for brick, parts in groups.items()])


def _brick(
    table: NodeTable, name: str, category: BrickCategory, nodes: Column, is_outermost: NDArray[np.bool_]
) -> _Brick:
    like_of, outer = table.column("like_of"), nodes[is_outermost[nodes]]
    alike = tuple(_alike(nodes, like_of))
    rates = {table[int(group[0])].budget_gb_per_sec for group in alike}
    works = [table[int(group[0])].work for group in alike]
    return _Brick(
        name=name,
        category=category,
        backend=table[int(nodes[0])].backend,
        nodes=nodes,
        alike=alike,
        outermost=outer,
        alike_outermost=tuple(_alike(outer, like_of)),
        budget_gb_per_sec=rates.pop() if len(rates) == 1 else None,
        dtypes=tuple(sorted({work.dtype for work in works if work.flops(1, 1) != 0})),
    )


def name_and_category(node: Node) -> tuple[str, BrickCategory]:
    """Return the name and category under which the calls of `node` are added up.

    For a layer or step, this is the name of its own operations.
    """
    return node.own or node.name, BrickCategory.OTHER if node.category is None else node.category


def _mean_exclusive_ns(bricks: Sequence[BrickStats]) -> float | None:
    """Return the mean exclusive time per call over all `bricks`."""
    known = [(mean_ns, one.calls.count) for one in bricks if (mean_ns := one.mean_exclusive_ns) is not None]
    calls = sum(count for _, count in known)
    return sum(mean_ns * count for mean_ns, count in known) / calls if calls else None


def category_stats(bricks: Sequence[BrickStats]) -> list[CategoryStats]:
    """Return one entry per category that ran, in the order of BrickCategory."""
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
                    mean_exclusive_ns=_mean_exclusive_ns(members),
                    closed=ClosedTime(
                        once_ns=sum(stats.closed.once_ns for stats in members),
                        exclusive_ns=sum(stats.closed.exclusive_ns for stats in members),
                        calls_ns=sum(stats.closed.calls_ns for stats in members),
                    ),
                    elements=sum(stats.calls.elements for stats in members),
                    adopted_ns=sum(stats.adopted_ns for stats in members),
                )
            )
    return found


def _alike(nodes: Column, first_of: Column) -> list[Column]:
    """Group `nodes` by their entry in `first_of`, in the order of the first nodes."""
    firsts, begins, which = np.unique(first_of[nodes], return_index=True, return_inverse=True)
    if len(firsts) <= 1:
        return [nodes] if len(nodes) else []
    parts = np.split(nodes[np.argsort(which, kind="stable")], np.cumsum(np.bincount(which))[:-1])
    return [parts[at] for at in np.argsort(begins).tolist()]


_UNITS = ("flops", "bytes", "size_bytes")


def _work_of(brick: _Brick, totals: PhaseTotals, alike: Sequence[tuple[Column, int, int]]) -> Iterator[float | None]:
    """Yield the sums of flops, bytes and size_bytes over all calls of a brick. A sum is None if a call did not
    declare it.

    `alike` has groups of nodes with equal work, and their calls and elements.
    """
    odd_nodes = totals.stats.sparse["amounts"].keys() | totals.stats.sparse["uncounted"].keys()
    odd: list[int] = []
    if odd_nodes:
        is_odd = np.isin(brick.nodes, list(odd_nodes))
        odd = brick.nodes[is_odd].tolist()
        count, elements = totals.columns["count"], totals.columns["elements"]
        groups = _alike(brick.nodes[~is_odd], totals.table.column("like_of"))
        alike = [(group, int(count[group].sum()), int(elements[group].sum())) for group in groups]
    sums = [(totals.table[int(group[0])].work, calls, elements_of) for group, calls, elements_of in alike]
    for unit in _UNITS:
        found = [_work(totals.table[node], totals, unit) for node in odd]
        for work, calls, elements_of in sums:
            line: Callable[[float, float], float | None] = getattr(work, unit)
            found.append(line(calls, elements_of))
        yield _sum(found)


def _work(node: Node, totals: PhaseTotals, unit: str) -> float | None:
    """Return the work of all calls of `node`: the sum of the recorded amounts. Without these, it is computed from the
    elements.
    """
    if unit != "size_bytes" and totals.stats.rare("amounts", (node.id,)):
        given = totals.stats.rare(f"{unit}_given", (node.id,))
        return None if given != totals.count[node.id] else totals.stats.rare(unit, (node.id,))
    if getattr(node.work, f"{unit}_per_element") and totals.stats.rare("uncounted", (node.id,)):
        return None
    line: Callable[[float, float], float | None] = getattr(node.work, unit)
    return line(totals.count[node.id], totals.elements[node.id])


def _budget_of(groups: Sequence[Column], totals: PhaseTotals) -> float | None:
    """Return the budget of all `groups` together in µs per token. None if a node has no budget."""
    budgets: list[float | None] = []
    for alike in groups:
        first = totals.table[int(alike[0])]
        if first.budget_gb_per_sec is not None:
            budgets += [_budget_of_bytes(totals.table[node], totals) for node in alike.tolist()]
        elif first.budget_us_per_token is None:
            return None
        else:
            budgets.append(len(alike) * first.budget_us_per_token)
    return _sum(budgets)


def _budget_of_bytes(node: Node, totals: PhaseTotals) -> float | None:
    """Return how many µs per token `node` may take to move its bytes at the required rate."""
    assert node.budget_gb_per_sec is not None
    moved, closed_us_per_token = _work(node, totals, "bytes"), totals.us_per_token(totals.closed_ns[node.id])
    if not moved or not closed_us_per_token:
        return None
    # The time per token is of ended steps, so use only their bytes.
    bytes_per_token = moved / totals.total_ns[node.id] * closed_us_per_token * 1e3
    return ByteBudget(node.budget_gb_per_sec).to_token_budget(bytes_per_token).us_per_token


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _stats(
    brick: _Brick,
    calls: Calls,
    totals: PhaseTotals,
    *,
    exclusive_ns: int,
    adopted_ns: int,
    closed: ClosedTime,
    alike: Sequence[tuple[Column, int, int]],
) -> BrickStats:
    flops, moved_bytes, size_bytes = _work_of(brick, totals, alike)
    return BrickStats(
        name=brick.name,
        category=brick.category,
        backend=brick.backend,
        calls=calls,
        exclusive_ns=exclusive_ns,
        exclusive_of_ns=calls.total_ns,
        closed=closed,
        flops=flops,
        bytes=moved_bytes,
        size_bytes=size_bytes,
        budget_gb_per_sec=brick.budget_gb_per_sec,
        budget_us_per_token=_budget_of(brick.alike_outermost, totals),
        uncounted=totals.stats.rare("uncounted", map(int, brick.nodes)),
        adopted_ns=adopted_ns,
        dtypes=brick.dtypes,
    )


def outermost(bricks: Column, table: NodeTable) -> NDArray[np.bool_]:
    """Return a mask by node id: the `bricks` that are not inside a brick of the same name and category.

    `bricks` are the ids of all bricks that ran.
    """
    parent_of, first_of = table.column("parent_of"), table.column("first_of")
    ran = np.zeros(len(parent_of), np.bool_)
    ran[bricks] = True
    found, outer = ran.copy(), parent_of[bricks]
    while outer.any():
        found[bricks[ran[outer] & (first_of[outer] == first_of[bricks])]] = False
        outer = parent_of[outer]
    return found


def _rate(amount: float | None, time_ns: int, factor: float = 1.0) -> float | None:
    return None if amount is None or not time_ns else factor * amount / time_ns
