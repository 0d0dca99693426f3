"""Renders the graph as a JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict

from cbtop.profiler.analysis.graph.recorded_graph import RecordedGraph


def to_json(graph: RecordedGraph) -> str:
    """Return `{"nodes": […], "edges": […], "dropped": 0}` as ASCII text.

    A node has its id, its parent's id, its kind and the fields of its class. Times are in ns, sizes in bytes, and
    unknown values null. Raises ValueError for a time that is not finite, which JSON cannot express.
    """
    nodes = [
        {"id": number, "parent": parent, "kind": type(node).__name__} | asdict(node)
        for number, (node, parent) in enumerate(zip(graph.nodes, graph.parents, strict=True))
    ]
    document = {"nodes": nodes, "edges": [asdict(edge) for edge in graph.edges()], "dropped": graph.dropped}
    return json.dumps(document, allow_nan=False)
