"""The execution graph of one phase, as an ExecutionGraph and as rows in drawing order."""

from __future__ import annotations

from cbtop.profiler.graph.execution_graph import ExecutionGraph
from cbtop.profiler.graph.from_nodes import graph_of_nodes
from cbtop.profiler.graph.tree import label
from cbtop.protocol.messages import Node
from cbtop.viewmodels.model import GraphRow
from cbtop.viewmodels.phase import PhaseTotals


def execution_graph(totals: PhaseTotals) -> tuple[ExecutionGraph, dict[int, int]]:
    """The phase's nodes with their mean times, and each node's id in the graph by its id in the table."""
    return graph_of_nodes(totals.nodes, totals.count, totals.total_ns, totals.elements)


def graph_rows(totals: PhaseTotals, graph: ExecutionGraph, ids: dict[int, int]) -> tuple[GraphRow, ...]:
    """One row a node, a parent before its children."""
    rows: list[GraphRow] = []
    depths: dict[int | None, int] = {totals.step.id if totals.step else None: -1}
    for node in totals.nodes:
        depths[node.id] = depth = depths[node.parent] + 1
        rows.append(_row(node, depth, label(graph.nodes[ids[node.id]]), totals))
    return tuple(rows)


def _row(node: Node, depth: int, text: str, totals: PhaseTotals) -> GraphRow:
    mean_ns, count = _mean_ns(node, totals), totals.count[node.id]
    return GraphRow(
        id=node.id,
        parent=node.parent if depth else None,
        depth=depth,
        kind=node.kind,
        name=node.name,
        label=text,
        category=node.category,
        backend=node.backend,
        count=count or None,
        total_us=totals.total_ns[node.id] / 1e3 if count else None,
        avg_us=None if mean_ns is None else mean_ns / 1e3,
        p50_us=totals.percentile_us([node], 0.50),
        p99_us=totals.percentile_us([node], 0.99),
        elements=_mean_elements(node, totals),
        percent=totals.percent(totals.total_ns[node.id]) if count else None,
        grid=node.grid,
        block=node.block,
        shared_memory_bytes=node.shared_memory_bytes,
    )


def _mean_ns(node: Node, totals: PhaseTotals) -> float | None:
    count = totals.count[node.id]
    return totals.total_ns[node.id] / count if count else None


def _mean_elements(node: Node, totals: PhaseTotals) -> int | None:
    count = totals.count[node.id]
    return round(totals.elements[node.id] / count) if count else None
