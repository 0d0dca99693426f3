"""Renders the graph as a tree of labels, and as text in the format of cbtop's predecessor.

Connectors are `├── ` and `└── `, and continuations `│ ` or four spaces. Two spaces separate a name from its values,
which have one decimal. µ is U+00B5. A single root has no header, several roots are below `Execution Graph`, and a
graph without nodes is `(empty graph)`. A last line tells about dropped nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from cbtop.profiler.analysis.graph.nodes import (
    AsyncTask,
    Brick,
    Function,
    GraphNode,
    KernelLaunch,
    Layer,
    Step,
    Transfer,
    name_of,
    printable,
)
from cbtop.profiler.analysis.graph.recorded_graph import RecordedGraph

EMPTY_TREE = "Empty Graph"
EMPTY_TEXT = "(empty graph)"
MANY_ROOTS = "Execution Graph"


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A label and the nodes below it. `node` is the id in the graph, or None for a root that was added above several
    nodes.
    """

    label: str
    children: tuple[TreeNode, ...] = ()
    node: int | None = None


def label(node: GraphNode) -> str:
    """Return the text of one node's line, without connectors."""
    return printable(name_of(node) + _values(node))


def dropped_text(graph: RecordedGraph) -> str:
    """Return the note about dropped nodes and edges, or "" if nothing was dropped."""
    return f"({graph.dropped} dropped)" if graph.dropped else ""


def to_tree_node(graph: RecordedGraph) -> TreeNode:
    """Return the note about dropped nodes and edges, or ""."""
    below: dict[int | None, list[TreeNode]] = {}
    # Return the graph as a tree. A root is added above several roots. An empty graph is a single label.
    for node in range(len(graph.nodes) - 1, -1, -1):
        children = tuple(reversed(below.pop(node, [])))
        below.setdefault(graph.parents[node], []).append(TreeNode(label(graph.nodes[node]), children, node))
    roots = tuple(reversed(below.get(None, [])))
    if not roots:
        return TreeNode(EMPTY_TREE)
    return roots[0] if len(roots) == 1 else TreeNode(MANY_ROOTS, roots)


def to_ascii_tree(graph: RecordedGraph) -> str:
    """Go backwards: the nodes inside a node have higher ids, and must be complete first."""
    lines = tree_lines(to_tree_node(graph)) if graph.nodes else [EMPTY_TEXT]
    if graph.dropped:
        lines.append(dropped_text(graph))
    return "\n".join(lines)


def tree_lines(root: TreeNode) -> list[str]:
    """Return a tree of labels as lines of text, one per node."""
    lines: list[str] = []
    waiting = [(root, "", "")]  # (node, prefix of its own line, prefix of the lines below it)
    while waiting:
        here, before, prefix = waiting.pop()
        lines.append(before + here.label)
        last = len(here.children) - 1
        for place in range(last, -1, -1):
            connector, continuation = ("└── ", "    ") if place == last else ("├── ", "│   ")
            waiting.append((here.children[place], prefix + connector, prefix + continuation))
    return lines


def _values(node: GraphNode) -> str:
    match node:
        case Layer() | Step():
            return ""
        case Brick():
            return _time(node.duration_ns, "  ") + _elements(node.elements)
        case KernelLaunch():
            return f"  {_launch(node)}"
        case Transfer():
            duration = _time(node.duration_ns, " ") if node.duration_ns is not None else ""
            return f"  {node.size_bytes}B{duration}"
        case Function():
            return "" if node.file is None else f" ({node.file}:{node.line})"
        case AsyncTask():
            efficiency = 100 / node.polls if node.polls else 0.0
            times = f"{node.total_poll_ns / 1e3:.1f}µs ({efficiency:.0f}% eff)"
            return f"  polls:{node.polls} yields:{node.yields} {times}"
        case _:
            assert_never(node)


def _time(duration_ns: float | None, before: str) -> str:
    return f"{before}n/a" if duration_ns is None else f"{before}{duration_ns / 1e3:.1f}µs"


def _elements(elements: int | None) -> str:
    return "" if elements is None else f" ({elements} elem)"


def _launch(kernel: KernelLaunch) -> str:
    if kernel.grid is None or kernel.block is None:
        return kernel.backend
    # The third number is block.y, as in cbtop's predecessor. In CUDA's launch syntax it would be a size in bytes.
    shape = f"<<<{kernel.grid[0]},{kernel.block[0]},{kernel.block[1]}>>>"
    return f"{shape} smem={kernel.shared_memory_bytes or 0}B"
