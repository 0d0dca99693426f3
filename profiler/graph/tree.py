"""The graph as a tree of labels, and as text: the predecessor's format, to the character.

Connectors `├── ` and `└── `, continuation `│   ` or four spaces, two spaces between a name and its values, µ is
U+00B5, one decimal. One root stands bare; several stand under `Execution Graph`; none is `(empty graph)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from cbtop.profiler.graph.execution_graph import (
    AsyncTask,
    Brick,
    ExecutionGraph,
    Function,
    GraphNode,
    Kernel,
    Layer,
    Step,
    Transfer,
)

EMPTY_TREE = "Empty Graph"
EMPTY_TEXT = "(empty graph)"
MANY_ROOTS = "Execution Graph"


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A label and what is below it; `node` is the id in the graph, None for a root we made up."""

    label: str
    children: tuple[TreeNode, ...] = ()
    node: int | None = None


def label(node: GraphNode) -> str:
    """What one node prints, connectors left out."""
    match node:
        case Layer():
            return f"Layer {node.index}"
        case Step():
            return node.name
        case Brick():
            return node.name + _time(node.duration_ns, "  ") + _elements(node.elements)
        case Kernel():
            return f"{node.name}  {_launch(node)}"
        case Transfer():
            size = f"{node.size_bytes}B"
            duration = _time(node.duration_ns, " ") if node.duration_ns is not None else ""
            return f"{node.direction}: {node.source} → {node.destination}  {size}{duration}"
        case Function():
            return node.name if node.file is None else f"{node.name} ({node.file}:{node.line})"
        case AsyncTask():
            efficiency = 100 / node.polls if node.polls else 0.0
            times = f"{node.total_poll_ns / 1e3:.1f}µs ({efficiency:.0f}% eff)"
            return f"{node.name}  polls:{node.polls} yields:{node.yields} {times}"
        case _:
            assert_never(node)


def to_tree_node(graph: ExecutionGraph) -> TreeNode:
    """The graph under one root; several roots get a synthetic one, an empty graph is a lone label."""
    children = graph.children()
    roots = tuple(_subtree(graph, root, children) for root in graph.roots)
    if not roots:
        return TreeNode(EMPTY_TREE)
    return roots[0] if len(roots) == 1 else TreeNode(MANY_ROOTS, roots)


def to_ascii_tree(graph: ExecutionGraph) -> str:
    """The graph as text, lines joined by newlines and none at the end."""
    if not graph.nodes:
        return EMPTY_TEXT
    root = to_tree_node(graph)
    return "\n".join([root.label, *_lines(root, "")])


def _subtree(graph: ExecutionGraph, node: int, children: dict[int, list[int]]) -> TreeNode:
    below = tuple(_subtree(graph, child, children) for child in children[node])
    return TreeNode(label(graph.nodes[node]), below, node)


def _lines(tree: TreeNode, prefix: str) -> Iterator[str]:
    for child in tree.children:
        last = child is tree.children[-1]
        yield f"{prefix}{'└── ' if last else '├── '}{child.label}"
        yield from _lines(child, prefix + ("    " if last else "│   "))


def _time(duration_ns: float | None, before: str) -> str:
    return f"{before}n/a" if duration_ns is None else f"{before}{duration_ns / 1e3:.1f}µs"


def _elements(elements: int | None) -> str:
    return "" if elements is None else f" ({elements} elem)"


def _launch(kernel: Kernel) -> str:
    if kernel.grid is None or kernel.block is None:
        return kernel.backend
    # The third number is block.y, as the predecessor printed it; it is not CUDA's own launch syntax.
    shape = f"<<<{kernel.grid[0]},{kernel.block[0]},{kernel.block[1]}>>>"
    return f"{shape} smem={kernel.shared_memory_bytes}B"
