"""The drawing of a graph: a block contains the blocks below it, and is as wide as their time."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
from cbtop.profiler.analysis.graph.nodes import Brick, Layer, Step
from cbtop.profiler.analysis.graph.svg import ROW, WIDTH


def drawn(graph: ExecutionGraph) -> dict[str, tuple[float, float, float]]:
    """Return (x, y, width) of each block, by the name in its title."""
    found = {}
    for group in ET.fromstring(graph.to_svg()):
        title, rect = group[0].text or "", group[1]
        x, y, width = (float(rect.attrib[name]) for name in ("x", "y", "width"))
        found[title.split(",")[0].split("  ")[0]] = x, y, width
    return found


def test_blocks_lie_inside_what_contains_them_and_add_up() -> None:
    graph = ExecutionGraph()
    step = graph.add_node(Step("decode"))
    for layer, times_us in enumerate((30, 10)):
        place = graph.add_node(Layer(layer), step)
        graph.add_node(Brick(f"Norm{layer}", 1e3 * times_us, calls=1), place)
        graph.add_node(Brick(f"Twice{layer}", 1e3 * times_us, calls=2), place)
    blocks = drawn(graph)
    widths = {name: round(width) for name, (_, _, width) in blocks.items()}
    assert (widths["decode"], widths["Layer 0"], widths["Layer 1"]) == (WIDTH, 750, 250)
    assert (widths["Norm0"], widths["Twice0"], widths["Norm1"]) == (250, 500, 83)
    assert blocks["Twice0"][:2] == (250, 2 * ROW)
    assert blocks["Norm1"][:2] == (750, 2 * ROW)


def test_a_graph_without_times_has_no_drawing_but_a_tree() -> None:
    graph = ExecutionGraph()
    graph.add_node(Layer(3))
    assert graph.to_svg() == ""
    assert "<pre>Layer 3</pre>" in graph._repr_html_()
    assert "(empty graph)" in ExecutionGraph()._repr_html_()


def test_names_are_escaped_and_blocks_too_narrow_are_left_out() -> None:
    graph = ExecutionGraph()
    graph.add_node(Brick("<script>", 1e9))
    graph.add_node(Brick("tiny", 1.0))
    assert "<script>" not in graph._repr_html_()
    assert re.findall("tiny", graph.to_svg()) == []
