"""Tests of the totals of a phase, which are computed for all nodes at once.

They equal the totals that are computed node by node.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from cbtop.profiler.analysis.brick_stats import brick_stats, name_and_category
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.node_columns import COLUMNS, SPARSE_COLUMNS
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.profiler.analysis.time_breakdown import books_of
from cbtop.protocol.attributes import Work
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickCategory, NodeKind

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


def phase_of(layer_ns: int, module_ns: int, plain_steps: int = 0) -> PhaseTotals:
    """Return ten steps of 10 µs in a model with one layer, in which one module runs a product of 2 µs.

    The layer takes `layer_ns`, and the module in it `module_ns`. `plain_steps` more steps of 10 µs are not recorded.
    """
    table, stats = NodeTable(), NodeStats()
    table.add(Node(1, None, NodeKind.STEP, "forward", own="Net"))
    table.add(Node(2, 1, NodeKind.LAYER, "0", own="Block"))
    table.add(Node(3, 2, NodeKind.BRICK, "Scan", category=BrickCategory.OTHER, own="Scan"))
    table.add(Node(4, 3, NodeKind.BRICK, "Linear", category=BrickCategory.OTHER))
    columns = {name: np.zeros(5, np.int64) for name in COLUMNS}
    columns["count"][1:] = 10
    columns["total_ns"][1:] = columns["closed_ns"][1:] = (100_000, 10 * layer_ns, 10 * module_ns, 20_000)
    none = np.zeros(0, np.int64)
    columns["count"][1] += plain_steps
    columns["total_ns"][1] += 10_000 * plain_steps
    plain = {
        (SPARSE_COLUMNS.index("plain"), 1): plain_steps,
        (SPARSE_COLUMNS.index("plain_ns"), 1): 10_000 * plain_steps,
    }
    stats.take_over(
        np.arange(5), np.array([columns[name] for name in COLUMNS]), none, none, plain if plain_steps else {}
    )
    return PhaseTotals.of(table, stats, "forward")


def rows_and_gaps(totals: PhaseTotals) -> tuple[dict[str, int], dict[str, int]]:
    books = books_of(totals, totals)
    assert books is not None
    assert books.close
    rows = {stats.name: stats.closed.exclusive_ns for stats in brick_stats(totals)}
    assert sum(rows.values()) == books.bricks_ns
    gaps = {**books.gaps_ns, "unattributed": books.unattributed_ns}
    return rows, {name: ns for name, ns in gaps.items() if ns}


def test_own_operations_of_a_module_a_layer_and_a_model_are_rows() -> None:
    rows, gaps = rows_and_gaps(phase_of(layer_ns=8_000, module_ns=5_000))
    assert rows == {"Linear": 20_000, "Scan": 30_000, "Block": 30_000, "Net": 20_000}
    assert not gaps


def test_the_own_operations_of_a_model_count_recorded_steps_only() -> None:
    (net,) = [one for one in brick_stats(phase_of(8_000, 5_000, plain_steps=90)) if one.name == "Net"]
    assert (net.calls.count, net.calls.total_ns, net.mean_exclusive_ns) == (10, 100_000, 2_000)


def test_own_operations_below_one_percent_count_for_what_is_around() -> None:
    rows, gaps = rows_and_gaps(phase_of(layer_ns=9_990, module_ns=2_090))
    assert rows == {"Linear": 20_000, "Block": 79_900}  # "Block" includes 900 ns that the module takes for itself
    assert gaps == {"unattributed": 100}
    rows, gaps = rows_and_gaps(phase_of(layer_ns=2_090, module_ns=2_050))
    assert rows == {"Linear": 20_000, "Net": 79_100}
    assert gaps == {"inside layers": 900}


def test_a_comparison_sees_all_own_operations() -> None:
    totals = phase_of(layer_ns=9_990, module_ns=2_090)
    assert totals.step is not None
    whole = PhaseTotals.below(totals.step, totals.table, totals.stats, hides_small=False)
    assert {stats.name for stats in brick_stats(whole)} == {"Linear", "Scan", "Block", "Net"}


def test_the_backward_of_a_layers_own_operations_is_a_row_of_its_own() -> None:
    table, stats = NodeTable(), NodeStats()
    table.add(Node(1, None, NodeKind.STEP, "train"))
    table.add(Node(2, 1, NodeKind.LAYER, "0", own="Block"))
    table.add(Node(3, 1, NodeKind.LAYER, "0", "backward", own="Block backward"))
    columns = {name: np.zeros(4, np.int64) for name in COLUMNS}
    columns["count"][1:] = 1
    columns["total_ns"][1:] = columns["closed_ns"][1:] = (1_000, 300, 700)
    none = np.zeros(0, np.int64)
    stats.take_over(np.arange(4), np.array([columns[name] for name in COLUMNS]), none, none, {})
    rows, gaps = rows_and_gaps(PhaseTotals.of(table, stats, "train"))
    assert rows == {"Block": 300, "Block backward": 700}
    assert not gaps
