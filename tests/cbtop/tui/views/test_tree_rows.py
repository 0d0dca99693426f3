"""Tests of the tree of nodes.

The tree lists the children of unfolded nodes, in execution order or sorted among siblings.
"""

from __future__ import annotations

from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickCategory, NodeKind
from cbtop.tui.views.tree_rows import FoldedTree

PLACES = (
    Node(1, None, NodeKind.STEP, "decode"),
    Node(2, 1, NodeKind.LAYER, "0"),
    Node(3, 2, NodeKind.BRICK, "RmsNorm", category=BrickCategory.NORM),
    Node(4, 2, NodeKind.BRICK, "GateProjection", category=BrickCategory.FFN),
    Node(5, 1, NodeKind.LAYER, "1"),
    Node(6, 5, NodeKind.BRICK, "RmsNorm", category=BrickCategory.NORM),
)


def tree(*unfolded: int) -> FoldedTree:
    made = FoldedTree()
    made.places, made.unfolded = PLACES, frozenset(unfolded)
    return made


def test_only_nodes_inside_unfolded_ones_are_rows() -> None:
    assert [row.id for row in tree().rows()] == [1]
    assert [row.id for row in tree(2).rows()] == [1]  # Node 2 is unfolded, but its parent, the step, is folded.
    rows = tree(1, 2).rows()
    assert [(row.id, row.connectors) for row in rows] == [
        (1, ""),
        (2, "├── "),
        (3, "│   ├── "),
        (4, "│   └── "),
        (5, "└── "),
    ]
    assert [(row.at, row.line, row.parent) for row in rows[-1:]] == [(4, 4, 1)]


def test_all_rows_are_those_of_an_unfolded_tree() -> None:
    folded = tree()
    assert [row.id for row in folded.all_rows()] == [1, 2, 3, 4, 5, 6]
    folded.toggle_all()
    assert folded.rows() == folded.all_rows()
    folded.toggle_all()
    assert [row.id for row in folded.rows()] == [1]


def test_siblings_are_sorted_and_stay_with_their_children() -> None:
    sorted_tree = tree(1, 2, 5)
    sorted_tree.sort(sorted_tree.all_rows(), lambda row: -float(row.id))
    assert [row.id for row in sorted_tree.rows()] == [1, 5, 6, 2, 4, 3]
    sorted_tree.sort_by_execution()
    assert [row.id for row in sorted_tree.rows()] == [1, 2, 3, 4, 5, 6]


def test_more_layers_than_the_first_are_unfolded_only_if_their_rows_fit() -> None:
    first = tree()
    first.unfold_first_layers(max_rows=0)
    assert first.unfolded == {2}
    first.unfold_first_layers(max_rows=6)
    assert first.unfolded == {2, 5}


def test_the_ancestors_of_a_node_are_all_nodes_around_it() -> None:
    assert tree().ancestors(4) == {1, 2}
    assert tree().ancestors(1) == tree().ancestors(99) == frozenset()


def test_a_search_finds_names_categories_and_layers() -> None:
    assert tree().matches("rmsnorm") == [2, 5]
    assert tree().matches("layer 1") == [4]
    assert tree().matches("ffn") == [3]
