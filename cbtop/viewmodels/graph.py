"""The execution graph of one phase, as an ExecutionGraph and as rows in drawing order."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.graph.execution_graph import ExecutionGraph
from cbtop.profiler.graph.from_nodes import graph_of_nodes
from cbtop.profiler.graph.tree import label
from cbtop.profiler.phase_totals import PhaseTotals
from cbtop.protocol.messages import Node
from cbtop.viewmodels.model import GraphRow

Percentiles = NDArray[np.float64]  # one entry a node id, ns


def execution_graph(totals: PhaseTotals) -> tuple[ExecutionGraph, dict[int, int]]:
    """The phase's nodes with their mean times, and each node's id in the graph by its id in the table."""
    return graph_of_nodes(totals.nodes, totals.count, totals.total_ns, totals.elements)


def graph_rows(totals: PhaseTotals, graph: ExecutionGraph, ids: dict[int, int]) -> tuple[GraphRow, ...]:
    """One row a node, a parent before its children."""
    rows: list[GraphRow] = []
    p50_ns, p99_ns = (totals.stats.percentile_of_each_ns(fraction) for fraction in (0.50, 0.99))
    depths: dict[int | None, int] = {totals.step.id if totals.step else None: -1}
    for node in totals.nodes:
        depths[node.id] = depth = depths[node.parent] + 1
        rows.append(_row(node, depth, label(graph.nodes[ids[node.id]]), totals, p50_ns, p99_ns))
    return tuple(rows)


def _row(
    node: Node, depth: int, text: str, totals: PhaseTotals, p50_ns: Percentiles, p99_ns: Percentiles
) -> GraphRow:
    count, total_ns = totals.count[node.id], totals.total_ns[node.id]
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
        total_us=total_ns / 1e3 if count else None,
        avg_us=total_ns / count / 1e3 if count else None,
        p50_us=_us(p50_ns[node.id]),
        p99_us=_us(p99_ns[node.id]),
        elements=round(totals.elements[node.id] / count) if count else None,
        percent=totals.percent(total_ns) if count else None,
        grid=node.grid,
        block=node.block,
        shared_memory_bytes=node.shared_memory_bytes,
    )


def _us(value_ns: float) -> float | None:
    return None if math.isnan(value_ns) else float(value_ns) / 1e3
