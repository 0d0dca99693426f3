"""Renders the graph as a Rich tree, to print in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbtop.profiler.analysis.graph.recorded_graph import RecordedGraph
from cbtop.profiler.analysis.graph.tree import dropped_text, to_tree_node

if TYPE_CHECKING:
    from rich.tree import Tree


def to_rich_tree(graph: RecordedGraph) -> Tree:
    """Return the tree of `to_tree_node` with Rich's branches. If nodes were dropped, the last branch says so."""
    from rich.text import Text  # importing Rich takes 50 ms, which would delay a profiled process
    from rich.tree import Tree

    root = to_tree_node(graph)
    tree = Tree(Text(root.label))  # in a Text, Rich does not take [brackets] in names for markup
    waiting = [(root, tree)]
    while waiting:
        here, branch = waiting.pop()
        waiting += [(child, branch.add(Text(child.label))) for child in here.children]
    if graph.dropped:
        tree.add(Text(dropped_text(graph)))
    return tree
