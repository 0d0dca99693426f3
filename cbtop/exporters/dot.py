"""Export the execution graph of a process as a Graphviz document."""

from __future__ import annotations

from collections import Counter
from typing import TextIO

from cbtop.exporters.base import RecordedProcess
from cbtop.profiler.analysis.graph.dot import to_dot
from cbtop.profiler.analysis.graph.from_nodes import graph_of_nodes


def write_dot(recorded: RecordedProcess, out: TextIO) -> None:
    """Write each node of the execution graph once, with the mean duration of the node's records.

    Steps that were timed only as a whole are left out.
    """
    count, total_ns, elements = Counter[int](), Counter[int](), Counter[int]()
    uncounted: set[int] = set()  # ids of nodes with at least one call that has no number of elements
    for record in (record for record in recorded.records if not record.plain):
        count[record.node] += 1
        total_ns[record.node] += record.end_ns - record.start_ns
        elements[record.node] += record.elements or 0
        if record.elements is None:
            uncounted.add(record.node)
    for node in uncounted:
        del elements[node]
    graph, _ = graph_of_nodes(recorded.nodes.nodes, count, total_ns, elements, recorded.dependencies)
    out.write(to_dot(graph))
