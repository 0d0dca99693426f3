"""Renders the graph as a Graphviz document, in the colours of cbtop's predecessor."""

from __future__ import annotations

from cbtop.profiler.analysis.graph.nodes import (
    AsyncTask,
    Brick,
    EdgeKind,
    Function,
    GraphNode,
    KernelLaunch,
    Layer,
    Step,
    Transfer,
)
from cbtop.profiler.analysis.graph.recorded_graph import RecordedGraph
from cbtop.profiler.analysis.graph.tree import dropped_text, label

FILL_COLORS: dict[type[GraphNode], str] = {
    Step: "white",  # cbtop's predecessor did not show steps, so this colour is our own
    Layer: "lightblue",
    Brick: "lightgreen",
    KernelLaunch: "lightyellow",
    Function: "lightgray",
    Transfer: "lightsalmon",
    AsyncTask: "lightcyan",
}

EDGE_STYLES = {
    EdgeKind.CALLS: "style=solid",
    EdgeKind.CONTAINS: "style=dashed",
    EdgeKind.LAUNCHES: "style=bold, color=red",
    EdgeKind.SEQUENCE: "style=dotted",
    EdgeKind.DEPENDS_ON: "style=solid, color=blue",
    EdgeKind.TRANSFER: "style=bold, color=orange",
}


def to_dot(graph: RecordedGraph) -> str:
    """Return the graph as text for `dot -Tsvg`. Node 5 of the graph is called n5."""
    lines = ["digraph ExecutionGraph {", "  rankdir=TB;", "  node [shape=box];"]
    if graph.dropped:
        lines.append(f"  label={_quoted(dropped_text(graph))};")
    for number, node in enumerate(graph.nodes):
        fill = FILL_COLORS[type(node)]
        lines.append(f"  n{number} [label={_quoted(label(node))}, style=filled, fillcolor={fill}];")
    lines += [f"  n{edge.source} -> n{edge.destination} [{EDGE_STYLES[edge.kind]}];" for edge in graph.edges()]
    lines.append("}\n")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Return a quoted DOT string that shows exactly `text`, one printable line.

    Graphviz interprets escapes such as `\\N` and HTML entities in labels, so backslash and & are escaped.
    """
    escaped = text.replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
