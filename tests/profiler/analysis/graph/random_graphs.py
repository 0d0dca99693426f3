"""Random graphs for hypothesis: nested scopes, parallel tasks, and dependencies without cycles."""

from __future__ import annotations

from hypothesis import strategies as st

from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
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

# Characters of hostile names: quotes, braces, backslashes, escapes, markup, newlines, lone surrogates.
hostile_text = st.text(st.one_of(st.characters(), st.sampled_from('"\\{}[]<>&;N\n\r\0\x1b\u202e\ud800')), max_size=12)
durations_ns = st.one_of(st.none(), st.integers(0, 10**9))

any_node: st.SearchStrategy[GraphNode] = st.one_of(
    st.builds(Layer, st.integers(0, 99), hostile_text),
    st.builds(Step, hostile_text, hostile_text),
    st.builds(Brick, hostile_text, durations_ns, st.integers(0, 10**6), label=hostile_text),
    st.builds(KernelLaunch, hostile_text, hostile_text, durations_ns),
    st.builds(Transfer, hostile_text, hostile_text, st.integers(0, 99), st.sampled_from(["H2D", "D2H", "D2D"])),
    st.builds(Function, hostile_text, file=st.one_of(st.none(), hostile_text), line=st.integers(1, 99)),
    st.builds(AsyncTask, hostile_text, st.integers(0, 9), st.integers(0, 9), st.integers(0, 10**9)),
)


@st.composite
def any_graph(draw: st.DrawFn) -> ExecutionGraph:
    """Generate a graph with any nesting of nodes and any edges. The graph may have cycles."""
    graph = ExecutionGraph()
    for node in draw(st.lists(any_node, max_size=12)):
        above = draw(st.one_of(st.none(), st.integers(0, len(graph.nodes) - 1))) if graph.nodes else None
        graph.add_node(node, above)
    ids = st.integers(0, len(graph.nodes) - 1)
    added = st.tuples(ids, ids, st.sampled_from([EdgeKind.CALLS, EdgeKind.DEPENDS_ON, EdgeKind.TRANSFER]))
    for source, destination, kind in draw(st.lists(added, max_size=8)) if graph.nodes else []:
        graph.add_edge(source, destination, kind, draw(st.floats(0, 1e9)))
    return graph


@st.composite
def dependency_dag(draw: st.DrawFn) -> ExecutionGraph:
    """Generate a graph of nodes that run in parallel or one after another.

    Dependencies only go forward, so there is no cycle.
    """
    graph = ExecutionGraph()
    for number in range(draw(st.integers(1, 14))):
        time_ns = draw(st.integers(0, 1000))
        beside = draw(st.booleans())
        graph.add_node(AsyncTask(f"task {number}", 1, 0, time_ns) if beside else Brick(f"brick {number}", time_ns))
    ids = st.integers(0, len(graph.nodes) - 1)
    for one, other in draw(st.lists(st.tuples(ids, ids), max_size=30)):
        if one != other:
            graph.add_dependency(min(one, other), max(one, other))
    return graph
