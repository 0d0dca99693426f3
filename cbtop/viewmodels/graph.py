"""The execution graph of one phase, as an ExecutionGraph and as rows in drawing order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cbtop.profiler.graph.execution_graph import ExecutionGraph
from cbtop.profiler.graph.from_nodes import graph_of_nodes
from cbtop.profiler.graph.tree import EMPTY_TEXT, MANY_ROOTS, TreeNode, label, tree_lines
from cbtop.profiler.phase_totals import PhaseTotals
from cbtop.profiler.stats import Calls
from cbtop.protocol.messages import Dependency, Node
from cbtop.viewmodels.model import GraphRow


def execution_graph(totals: PhaseTotals, dependencies: Iterable[Dependency]) -> tuple[ExecutionGraph, dict[int, int]]:
    """The phase's nodes with their mean times, and each node's id in the graph by its id in the table."""
    return graph_of_nodes(totals.nodes, totals.count, totals.total_ns, totals.elements, dependencies)


def graph_rows(totals: PhaseTotals, graph: ExecutionGraph, ids: dict[int, int]) -> tuple[GraphRow, ...]:
    """One row a node, a parent before its children."""
    rows: list[GraphRow] = []
    depths: dict[int | None, int] = {totals.step.id if totals.step else None: -1}
    for node, calls in zip(totals.nodes, totals.stats.calls_of([[node.id] for node in totals.nodes]), strict=True):
        depths[node.id] = depth = depths[node.parent] + 1
        rows.append(_row(node, depth, label(graph.nodes[ids[node.id]]), totals, calls))
    return tuple(rows)


def tree_text(rows: Sequence[GraphRow]) -> str:
    """The rows as the ASCII tree, to the character as the predecessor drew it."""
    below: dict[int | None, list[TreeNode]] = {}
    for row in reversed(rows):
        children = tuple(reversed(below.pop(row.id, [])))
        below.setdefault(row.parent, []).append(TreeNode(row.label, children, row.id))
    roots = tuple(reversed(below.get(None, [])))
    if not roots:
        return EMPTY_TEXT
    return "\n".join(tree_lines(roots[0] if len(roots) == 1 else TreeNode(MANY_ROOTS, roots)))


def _row(node: Node, depth: int, text: str, totals: PhaseTotals, calls: Calls | None) -> GraphRow:
    return GraphRow(
        id=node.id,
        parent=node.parent if depth else None,
        depth=depth,
        kind=node.kind,
        name=node.name,
        label=text,
        category=node.category,
        backend=node.backend,
        count=calls.count if calls else None,
        total_us=calls.total_ns / 1e3 if calls else None,
        avg_us=calls.mean_ns / 1e3 if calls else None,
        p50_us=calls.p50_ns / 1e3 if calls and calls.p50_ns is not None else None,
        p99_us=calls.p99_ns / 1e3 if calls and calls.p99_ns is not None else None,
        elements=round(calls.elements / calls.count) if calls else None,
        percent=totals.percent(totals.closed_ns[node.id]) if calls else None,
        node_label=node.label,
        kernel=node.kernel,
    )
