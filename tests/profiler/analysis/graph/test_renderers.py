"""Tests of all renderers of a graph.

All renderers show the same graph, with any names, and report what they leave out.
"""

from __future__ import annotations

import html
import io
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest
from hypothesis import given
from rich.console import Console

from cbtop.profiler.analysis.graph import recorded_graph
from cbtop.profiler.analysis.graph.csr import EDGE_CODES, to_csr
from cbtop.profiler.analysis.graph.dot import EDGE_STYLES, FILL_COLORS, to_dot
from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
from cbtop.profiler.analysis.graph.json_text import to_json
from cbtop.profiler.analysis.graph.nodes import Edge, EdgeKind, Function, Layer
from cbtop.profiler.analysis.graph.rich_tree import to_rich_tree
from cbtop.profiler.analysis.graph.tree import label, to_ascii_tree
from cbtop.protocol.vocabulary import BrickId
from tests.profiler.analysis.graph.random_graphs import any_graph

RENDERERS = {
    "ascii": ExecutionGraph.to_ascii_tree,
    "dot": ExecutionGraph.to_dot,
    "json": ExecutionGraph.to_json,
}
SVG = "{http://www.w3.org/2000/svg}"
QUOTED = r'"((?:[^"\\]|\\.)*)"'
NODE_LINE = re.compile(rf"  n(\d+) \[label={QUOTED}, style=filled, fillcolor=(\w+)\];")
EDGE_LINE = re.compile(r"  n(\d+) -> n(\d+) \[(.*)\];")


def two_layers() -> ExecutionGraph:
    graph = ExecutionGraph()
    bricks = []
    for index in (0, 1):
        graph.push_scope(Layer(index))
        bricks.append(graph.record_brick(BrickId.RMS_NORM, 50_000, elements=4096))
        graph.record_kernel("rmsnorm", 1, (16, 1, 1), (256, 1, 1), 1024)
        graph.pop_scope()
    graph.add_edge(*bricks, EdgeKind.TRANSFER, 16)
    return graph


def as_text(graph: ExecutionGraph) -> str:
    """Return the graph as a Rich tree, as a terminal of 60 columns shows it."""
    console = Console(file=io.StringIO(), width=60, color_system=None)
    console.print(to_rich_tree(graph))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("render", [*RENDERERS.values(), as_text])
def test_every_renderer_takes_the_empty_graph(render: Callable[[ExecutionGraph], str]) -> None:
    assert render(ExecutionGraph())


@pytest.mark.parametrize("render", [*RENDERERS.values(), as_text])
def test_every_renderer_says_what_was_dropped(
    render: Callable[[ExecutionGraph], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_graph, "MAX_NODES", 2)
    text = render(two_layers())
    assert "(5 dropped)" in text or '"dropped": 5' in text


@pytest.mark.parametrize("name", RENDERERS)
@given(graph=any_graph())
def test_every_renderer_gives_text_that_can_be_written(name: str, graph: ExecutionGraph) -> None:
    text = RENDERERS[name](graph)
    text.encode()
    assert text.replace("\n", "").isprintable()


@given(any_graph())
def test_dot_holds_every_node_and_edge_and_nothing_else(graph: ExecutionGraph) -> None:
    head, direction, shape, *lines, end, nothing = to_dot(graph).split("\n")
    opened = ["digraph ExecutionGraph {", "  rankdir=TB;", "  node [shape=box];"]
    assert [head, direction, shape, end, nothing] == [*opened, "}", ""]
    nodes, edges = lines[: len(graph.nodes)], lines[len(graph.nodes) :]
    for number, (node, line) in enumerate(zip(graph.nodes, nodes, strict=True)):
        match = NODE_LINE.fullmatch(line)
        assert match
        shown = html.unescape(re.sub(r"\\(.)", r"\1", match[2]))
        assert (int(match[1]), shown, match[3]) == (number, label(node), FILL_COLORS[type(node)])
    found = [EDGE_LINE.fullmatch(line) for line in edges]
    assert [(int(m[1]), int(m[2]), m[3]) for m in found if m] == [
        (edge.source, edge.destination, EDGE_STYLES[edge.kind]) for edge in graph.edges()
    ]


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_draws_what_the_labels_say() -> None:
    graph = two_layers()
    for name in ('"] n0 [label="', "\\N \\G \\l back\\", "&lt;b&gt; & <i>", "a\nb\x00c\ud800", "µ → 中", "{x|y}", ""):
        graph.add_node(Function(name))
    drawn = subprocess.run(["dot", "-Tsvg"], input=to_dot(graph), capture_output=True, text=True, check=True)
    assert drawn.stderr == ""
    texts: dict[str, str] = {}
    for group in ET.fromstring(drawn.stdout).iter(f"{SVG}g"):
        if group.get("class") == "node":
            text = "".join(part.text or "" for part in group.iter(f"{SVG}text"))
            # Graphviz writes adjacent spaces as no-break spaces.
            texts[group.findtext(f"{SVG}title", "")] = text.replace("\xa0", " ")
    assert texts == {f"n{number}": label(node) for number, node in enumerate(graph.nodes)}


@given(any_graph())
def test_json_holds_every_node_with_its_fields_and_every_edge(graph: ExecutionGraph) -> None:
    document = json.loads(to_json(graph))
    assert [(n["id"], n["parent"], n["kind"]) for n in document["nodes"]] == [
        (number, graph.parents[number], type(node).__name__) for number, node in enumerate(graph.nodes)
    ]
    for fields, node in zip(document["nodes"], graph.nodes, strict=True):
        assert type(node)(**{k: v for k, v in fields.items() if k not in ("id", "parent", "kind")}) == node
    edges = [Edge(e["source"], e["destination"], EdgeKind(e["kind"]), e["weight"]) for e in document["edges"]]
    assert edges == list(graph.edges())
    assert document["dropped"] == 0


def test_json_refuses_a_time_that_is_no_number() -> None:
    graph = ExecutionGraph()
    graph.record_brick("broken", float("nan"), 1)
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(graph)


@given(any_graph())
def test_the_rows_of_the_arrays_are_the_outgoing_edges(graph: ExecutionGraph) -> None:
    csr = to_csr(graph)
    kinds = list(EDGE_CODES)
    for node in range(len(graph.nodes)):
        row = slice(csr.row_offsets[node], csr.row_offsets[node + 1])
        columns = zip(csr.columns[row].tolist(), csr.kinds[row].tolist(), csr.weights[row].tolist(), strict=True)
        assert [Edge(node, to, kinds[kind], weight) for to, kind, weight in columns] == graph.outgoing_edges(node)
    assert csr.row_offsets[-1] == len(csr.columns) == len(list(graph.edges()))


def test_the_rich_tree_shows_what_the_ascii_tree_shows() -> None:
    graph = two_layers()
    graph.add_node(Function("[bold]not markup[/bold]"), 0)
    assert [line.rstrip() for line in as_text(graph).splitlines()] == to_ascii_tree(graph).splitlines()


def test_a_deep_graph_is_drawn_without_running_out_of_stack() -> None:
    graph = ExecutionGraph()
    for index in range(3000):
        graph.push_scope(Layer(index))
    assert len(to_ascii_tree(graph).splitlines()) == 3000


def test_the_renderers_load_neither_numpy_nor_rich() -> None:
    code = (
        "import sys, cbtop.profiler.analysis.graph.execution_graph, cbtop.profiler.analysis.graph.csr;"
        "import cbtop.profiler.analysis.graph.rich_tree;"
        "import cbtop.profiler.analysis.graph.analysis, cbtop.profiler.analysis.graph.from_nodes, cbtop.exporters;"
        "print({'numpy', 'rich', 'zmq', 'textual', 'numba'} & set(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout == "set()\n"
