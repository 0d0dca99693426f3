"""Tests of a node table. The table accepts nodes in order.

It rejects nodes that are inconsistent or create a cycle.
"""

from __future__ import annotations

import numpy as np
import pytest

from cbtop.profiler.analysis.graph import node_table
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind


def node(number: int, parent: int | None, kind: NodeKind = NodeKind.BRICK) -> Node:
    return Node(number, parent, kind, f"n{number}")


def test_what_is_below_a_node_comes_in_drawing_order() -> None:
    table = NodeTable()
    for number, parent in ((1, None), (2, 1), (3, None), (4, 1), (5, 2)):
        table.add(node(number, parent))
    assert [n.id for n in table.descendants(None)] == [1, 2, 5, 4, 3]
    assert [n.id for n in table.descendants(1)] == [2, 5, 4]


def test_every_node_knows_its_step() -> None:
    table = NodeTable()
    for one in (node(1, None, NodeKind.STEP), node(2, 1, NodeKind.LAYER), node(3, 2), node(4, None)):
        table.add(one)
    assert table.step_of.tolist() == [-1, 1, 1, 1, -1]


def test_every_node_knows_the_first_of_its_name_in_its_phase() -> None:
    table = NodeTable()
    table.add(node(1, None, NodeKind.STEP))
    table.add(node(2, None, NodeKind.STEP))
    for number, parent, name in ((3, 1, "a"), (4, 1, "b"), (5, 1, "a"), (6, 2, "a"), (7, 4, "a"), (8, None, "a")):
        table.add(Node(number, parent, NodeKind.BRICK, name))
    assert table.first_of.tolist() == [0, 1, 2, 3, 4, 3, 6, 3, 8]


def test_backends_are_those_of_bricks_not_of_what_recorded_their_kernels() -> None:
    table = NodeTable()
    table.add(Node(1, None, NodeKind.BRICK, "b", backend="torch on cuda"))
    table.add(Node(2, 1, NodeKind.KERNEL, "k", backend="cuda, by CUPTI"))
    assert table.backends == {"torch on cuda"}


def test_what_lies_inside_a_node_is_found_once_until_a_node_is_new() -> None:
    table = NodeTable()
    for number, parent in ((1, None), (2, 1), (3, None), (4, 1), (5, 2)):
        table.add(node(number, parent))
    inside = table.inside(None)
    assert [one.id for one in inside.nodes] == inside.ids.tolist() == [1, 2, 5, 4, 3]
    assert [ids.tolist() for ids in inside.by_depth] == [[1, 3], [2, 4], [5]]
    assert table.inside(None) is inside
    assert table.column("parent_of") is table.column("parent_of")
    table.add(node(6, 5))
    assert table.inside(5).ids.tolist() == [6]
    assert table.inside(6).ids.tolist() == []
    assert table.inside(None).ids.tolist() == [1, 2, 5, 6, 4, 3]
    assert table.column("parent_of").tolist() == [0, 0, 1, 0, 1, 2, 5]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (node(3, None), "2 was due"),
        (node(1, None), "2 was due"),
        (node(2, 2), "not defined"),
        (node(2, -1), "not defined"),
    ],
)
def test_gaps_repeats_and_cycles_are_refused(bad: Node, complaint: str) -> None:
    table = NodeTable()
    table.add(node(1, None))
    with pytest.raises(ValueError, match=complaint):
        table.add(bad)


def test_depth_and_number_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_table, "MAX_DEPTH", 2)
    monkeypatch.setattr(node_table, "MAX_NODES", 3)
    table = NodeTable()
    table.add(node(1, None))
    table.add(node(2, 1))
    with pytest.raises(ValueError, match="3 deep"):
        table.add(node(3, 2))
    table.add(node(3, None))
    with pytest.raises(ValueError, match="at most 3"):
        table.add(node(4, None))


def test_a_result_is_computed_anew_for_other_nodes_or_if_a_node_is_new() -> None:
    table, made = NodeTable(), []
    for number in (1, 2, 3):
        table.add(node(number, None))

    def made_of(*nodes: int) -> int:
        def make() -> int:
            made.append(nodes)
            return sum(nodes)

        return table.made_of("sum", None, np.array(nodes), make)

    assert [made_of(1, 2), made_of(1, 2), made_of(1, 3), made_of(1, 2)] == [3, 3, 4, 3]
    assert made == [(1, 2), (1, 3), (1, 2)]
    table.add(node(4, None))
    assert made_of(1, 2) == 3
    assert made == [(1, 2), (1, 3), (1, 2), (1, 2)]
