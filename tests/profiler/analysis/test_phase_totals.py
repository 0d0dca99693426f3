"""Tests of the totals of a phase: computed for all nodes at once, they equal the values computed node by node."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cbtop.profiler.analysis.brick_stats import brick_stats, name_and_category
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.node_columns import COLUMNS, SPARSE_COLUMNS
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.attributes import Work
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind

KINDS = (*[NodeKind.BRICK] * 4, NodeKind.LAYER, NodeKind.KERNEL, NodeKind.STEP, NodeKind.FUNCTION, NodeKind.ADOPTED)
WORK = (Work(8, 2, 4, 1), Work(0, 3, 16, 0))


def any_phase(seed: int) -> PhaseTotals:
    """Return the totals of random nested nodes of every kind in two phases. Some nodes have no time."""
    chance = random.Random(seed)
    table, stats = NodeTable(), NodeStats()
    for number in (1, 2):
        table.add(Node(number, None, NodeKind.STEP, ("decode", "prefill")[number - 1]))
    for number in range(3, 60):
        kind, outer = chance.choice(KINDS), chance.randint(1, number - 1)
        outer = outer if table.depth[outer] < 12 else 1
        table.add(Node(number, outer, kind, chance.choice("abc"), work=chance.choice(WORK), budget_us_per_token=2.0))
    ids = np.arange(60)
    columns = {name: np.array([chance.choice((0, 1, 7, 90)) for _ in ids]) for name in COLUMNS}
    columns["count"][1:3] = 5
    loose = {(SPARSE_COLUMNS.index("loose_ns"), node): 3 for node in chance.sample(range(1, 60), 5)}
    none = np.zeros(0, np.int64)
    stats.take_over(ids, np.array([columns[name] for name in COLUMNS]), none, none, loose)
    return PhaseTotals.of(table, stats, chance.choice(("decode", None)))


def exclusive_ns(totals: PhaseTotals, node: Node, of: dict[int, int], loose: dict[int, int]) -> int:
    """Return the time of `node` without the time of the nodes inside it that have their own row."""

    def shown(outer: int) -> list[Node]:
        found: list[Node] = []
        for child in totals.table.children[outer]:
            if child.kind is NodeKind.ADOPTED:
                continue
            if child.kind is NodeKind.BRICK:
                is_shown = of[child.id] != 0
            else:
                is_shown = node.kind is not NodeKind.BRICK or child.kind is NodeKind.STEP
            found += [child] if is_shown else shown(child.id)
        return found

    return of[node.id] - sum(of[child.id] - loose.get(child.id, 0) for child in shown(node.id))


def outer_nodes(totals: PhaseTotals, node: Node) -> list[Node]:
    found = []
    while node.parent is not None:
        node = totals.table[node.parent]
        found.append(node)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_exclusive_times_are_those_of_each_node_by_itself(seed: int) -> None:
    totals = any_phase(seed)
    loose = {node.id: totals.stats.rare("loose_ns", (node.id,)) for node in totals.nodes}
    for node in (*totals.nodes, *([totals.step] if totals.step else [])):
        assert totals.exclusive_ns[node.id] == exclusive_ns(totals, node, totals.total_ns, loose)
        assert totals.closed_exclusive_ns[node.id] == exclusive_ns(totals, node, totals.closed_ns, {})


@pytest.mark.parametrize("seed", range(30))
def test_bricks_are_the_sums_of_their_places(seed: int) -> None:
    totals = any_phase(seed)
    for node in totals.nodes:
        within = [node, *outer_nodes(totals, node)]
        adopted = [at for at, one in enumerate(within) if one.kind is NodeKind.ADOPTED]
        own = within[: adopted[0]] if adopted else within
        timed = [one for one in own if one.kind is NodeKind.BRICK]
        assert totals.adopted[node.id] == bool(adopted)
        assert totals.held[node.id] == any(totals.total_ns[one.id] or totals.closed_ns[one.id] for one in timed)
    found = brick_stats(totals)
    ran = [node for node in totals.nodes if node.kind is NodeKind.BRICK and totals.count[node.id]]
    assert {(one.name, one.category) for one in found} == {name_and_category(node) for node in ran}
    for stats in found:
        places = [node for node in ran if name_and_category(node) == (stats.name, stats.category)]
        outermost = [node for node in places if not any(outer in places for outer in outer_nodes(totals, node))]
        closed = {node.id: int(totals.closed_exclusive_ns[node.id]) for node in places}
        assert stats.calls.count == sum(totals.count[node.id] for node in places)
        assert stats.exclusive_ns == sum(max(closed[n.id], int(totals.exclusive_ns[n.id])) for n in places)
        assert stats.adopted_ns == sum(closed[node.id] for node in places if totals.adopted[node.id])
        assert stats.closed.exclusive_ns + stats.adopted_ns == sum(closed.values())
        assert stats.closed.once_ns == sum(totals.closed_ns[node.id] for node in outermost)
        assert stats.budget_us_per_token == 2.0 * len(outermost)
        for unit in ("flops", "bytes"):
            by_place = [getattr(n.work, unit)(totals.count[n.id], totals.elements[n.id]) for n in places]
            assert getattr(stats, unit) == sum(by_place)
