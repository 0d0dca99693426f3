"""Draws the graph as inline SVG: a row of blocks for each depth, as wide as their time."""

from __future__ import annotations

from cbtop.profiler.analysis.graph.nodes import Brick, GraphNode, KernelLaunch, Layer, Step, Transfer, name_of
from cbtop.profiler.analysis.graph.recorded_graph import RecordedGraph
from cbtop.profiler.analysis.graph.tree import label, to_ascii_tree
from cbtop.profiler.analysis.markup import GRAY, plain

WIDTH, ROW, CHARACTER = 1000, 18, 6.4  # in pixels; the drawing is scaled to the page
LEAST_WIDTH = 0.5  # in pixels; a narrower block is left out, with all that it contains
BLOCK_COLORS: dict[type[GraphNode], str] = {
    Step: "#656d76",
    Layer: "#4f7cff",
    Brick: "#4c9f70",
    KernelLaunch: "#c98a2b",
    Transfer: "#d1704f",
}


def to_svg(graph: RecordedGraph) -> str:
    """Return the graph as an SVG element, or "" if no node of the graph has a time.

    A block contains the blocks below it. If a node has no time of its own, its time is the sum of the nodes inside
    it.
    """
    times_ns = _times_ns(graph)
    roots_ns = sum(time_ns for node, time_ns in enumerate(times_ns) if graph.parents[node] is None)
    if not roots_ns:
        return ""
    scale, depth = WIDTH / roots_ns, 0
    blocks: list[str] = []
    # for each node: the row of its blocks, and the pixel at which the next node inside it begins
    rows: list[int] = []
    next_x: list[float] = []
    root_x = 0.0
    for node, parent in enumerate(graph.parents):
        width = times_ns[node] * scale
        if parent is None:
            row, x = 0, root_x
            root_x += width
        else:
            row, x = rows[parent] + 1, next_x[parent]
            next_x[parent] += width
        rows.append(row)
        next_x.append(x)
        if width >= LEAST_WIDTH:
            depth = max(depth, row + 1)
            blocks.append(_block(graph.nodes[node], x, row, width, times_ns[node]))
    return f'<svg viewBox="0 0 {WIDTH} {ROW * depth}" width="100%" role="img" class="step">{"".join(blocks)}</svg>'


def to_html(graph: RecordedGraph) -> str:
    """Return the graph as HTML for a notebook: the drawing, and the tree of all nodes as text."""
    tree = plain(to_ascii_tree(graph))
    return f"{to_svg(graph)}<details><summary>{len(graph.nodes):,} nodes as text</summary><pre>{tree}</pre></details>"


def _times_ns(graph: RecordedGraph) -> list[float]:
    """Return the time of each node, per run of its root. It is at least the time of the nodes inside the node."""
    inside = [0.0] * len(graph.nodes)
    # A node has a higher id than the node around it, so go through the nodes backwards.
    for node in range(len(graph.nodes) - 1, -1, -1):
        one, parent = graph.nodes[node], graph.parents[node]
        if isinstance(one, Brick | KernelLaunch | Transfer) and one.duration_ns is not None:
            inside[node] = max(inside[node], one.duration_ns * one.calls)
        if parent is not None:
            inside[parent] += inside[node]
    return inside


def _block(node: GraphNode, x: float, row: int, width: float, time_ns: float) -> str:
    letters = int(width / CHARACTER)
    name = plain(name_of(node)[:letters])
    text = (
        f'<text x="{x + 3:.1f}" y="{ROW * row + 13}" font-size="11" fill="#fff">{name}</text>' if letters > 3 else ""
    )
    return (
        f"<g><title>{plain(label(node))}, {time_ns / 1e3:.1f}µs in it</title>"
        f'<rect x="{x:.2f}" y="{ROW * row}" width="{max(0.3, width - 0.4):.2f}" height="{ROW - 1}" '
        f'fill="{BLOCK_COLORS.get(type(node), GRAY)}"/>{text}</g>'
    )
