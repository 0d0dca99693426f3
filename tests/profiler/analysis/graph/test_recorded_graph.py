"""The graph derives edges from its scopes, keeps added edges, and counts nodes that have no room."""

from __future__ import annotations

import math

import pytest
from hypothesis import given

from cbtop.profiler.analysis.graph import recorded_graph
from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
from cbtop.profiler.analysis.graph.nodes import (
    DERIVED_KINDS,
    AsyncTask,
    Brick,
    Edge,
    EdgeKind,
    Function,
    KernelLaunch,
    Layer,
    Transfer,
    printable,
)
from cbtop.profiler.analysis.graph.recorded_graph import DROPPED
from cbtop.protocol.vocabulary import BrickId
from tests.profiler.analysis.graph.random_graphs import any_graph, hostile_text

CONTAINS, LAUNCHES, SEQUENCE = EdgeKind.CONTAINS, EdgeKind.LAUNCHES, EdgeKind.SEQUENCE


def two_bricks() -> ExecutionGraph:
    graph = ExecutionGraph()
    graph.push_scope(Layer(0))
    graph.record_brick(BrickId.RMS_NORM, 50_000, elements=4096)
    graph.record_brick(BrickId.QKV_PROJECTION, 200_000, elements=4096)
    graph.record_kernel("gemv", 7, (32, 1, 1), (256, 1, 1), 4096, 150_000)
    graph.record_kernel("reduce", 8, (1, 1, 1), (32, 1, 1), 0, 170_000)
    graph.pop_scope()
    return graph


def test_scopes_and_order_give_the_edges() -> None:
    assert list(two_bricks().edges()) == [
        Edge(0, 1, CONTAINS),
        Edge(0, 2, CONTAINS),
        Edge(1, 2, SEQUENCE),
        Edge(2, 3, LAUNCHES),
        Edge(2, 4, LAUNCHES),
        Edge(3, 4, SEQUENCE),
    ]


def test_roots_that_were_recorded_one_after_the_other_are_in_sequence() -> None:
    graph = ExecutionGraph()
    for index in range(3):
        graph.push_scope(Layer(index))
        graph.pop_scope()
    assert list(graph.edges()) == [Edge(0, 1, SEQUENCE), Edge(1, 2, SEQUENCE)]


def test_nobody_waits_for_an_async_task_unless_told_to() -> None:
    graph = ExecutionGraph()
    graph.record_brick("before", 1, 1)
    graph.add_node(AsyncTask("prefetch", 1, 0, 1))
    graph.record_brick("after", 1, 1)
    assert list(graph.edges()) == [Edge(0, 1, SEQUENCE), Edge(0, 2, SEQUENCE)]
    graph.add_dependency(1, 2)
    assert graph.incoming_edges(2) == [Edge(0, 2, SEQUENCE), Edge(1, 2, EdgeKind.DEPENDS_ON)]


def test_added_edges_keep_their_weight() -> None:
    graph = two_bricks()
    graph.add_edge(1, 2, EdgeKind.TRANSFER, weight=4096)
    graph.add_edge(0, 1, EdgeKind.CALLS)
    assert graph.outgoing_edges(1) == [Edge(1, 2, SEQUENCE), Edge(1, 2, EdgeKind.TRANSFER, 4096)]
    assert graph.incoming_edges(1) == [Edge(0, 1, CONTAINS), Edge(0, 1, EdgeKind.CALLS, 1)]


@pytest.mark.parametrize("kind", sorted(DERIVED_KINDS))
def test_what_follows_from_the_scopes_cannot_be_said_twice(kind: EdgeKind) -> None:
    with pytest.raises(ValueError, match="follow from the scopes"):
        two_bricks().add_edge(0, 1, kind)


@pytest.mark.parametrize(("source", "destination"), [(0, 5), (5, 0), (-2, 0)])
def test_an_edge_to_a_node_that_is_not_there_is_refused(source: int, destination: int) -> None:
    with pytest.raises(ValueError, match="there are 5"):
        two_bricks().add_dependency(source, destination)


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_is_a_finite_number(weight: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        two_bricks().add_edge(0, 1, EdgeKind.CALLS, weight)


def test_an_unknown_parent_or_node_is_refused() -> None:
    graph = two_bricks()
    with pytest.raises(ValueError, match="no node 9"):
        graph.add_node(Layer(1), 9)
    with pytest.raises(ValueError, match="no node -1"):
        graph.node(-1)


def test_a_name_finds_every_node_that_carries_it() -> None:
    graph = two_bricks()
    graph.record_brick(BrickId.RMS_NORM, 1, 1)
    assert graph.node_by_name("RmsNorm") == [1, 5]
    assert graph.node_by_name("Layer 0") == [0]
    assert graph.node_by_name("none") == []


def test_kernels_are_found_and_the_slowest_named() -> None:
    graph = two_bricks()
    assert [(node, kernel.name) for node, kernel in graph.kernel_nodes()] == [(3, "gemv"), (4, "reduce")]
    assert graph.slowest_kernel() == (4, graph.node(4))
    assert graph.node(3) == KernelLaunch(
        "gemv", duration_ns=150_000, grid=(32, 1, 1), block=(256, 1, 1), shared_memory_bytes=4096, ptx_hash=7
    )


def test_without_a_timed_kernel_none_is_the_slowest() -> None:
    graph = ExecutionGraph()
    graph.record_kernel("untimed", 1, (1, 1, 1), (1, 1, 1), 0)
    assert graph.slowest_kernel() is None


def test_a_transfer_that_comes_back_is_a_ping_pong() -> None:
    graph = ExecutionGraph()
    graph.push_scope(Layer(0))
    there = graph.record_transfer("host", "gpu0", 4096, "H2D", 1000)
    graph.record_transfer("gpu0", "host", 8, "D2H")  # different number of bytes
    graph.record_transfer("gpu1", "host", 4096, "D2H")  # different device
    graph.record_transfer("gpu0", "gpu1", 4096, "D2D")  # this copy does not go through the host
    back = graph.record_transfer("gpu0", "host", 4096, "D2H")
    graph.record_transfer("gpu0", "host", 4096, "D2H")  # `there` is already paired with `back`
    graph.pop_scope()
    assert graph.node(there) == Transfer("host", "gpu0", 4096, "H2D", 1000)
    assert graph.detect_ping_pong() == [(there, back)]


def test_a_round_trip_through_the_host_is_a_ping_pong_too() -> None:
    graph = ExecutionGraph()
    graph.record_transfer("gpu0", "host", 64, "D2H")
    graph.record_transfer("host", "gpu0", 64, "H2D")
    assert graph.detect_ping_pong() == [(0, 1)]


def test_scopes_balance() -> None:
    graph = ExecutionGraph()
    graph.push_scope(Function("forward"))
    assert not graph.is_scope_balanced
    graph.pop_scope()
    assert graph.is_scope_balanced
    with pytest.raises(ValueError, match="without a push_scope"):
        graph.pop_scope()


def test_clear_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_graph, "MAX_NODES", 5)
    graph = two_bricks()
    graph.add_dependency(1, 2)
    graph.push_scope(Layer(1))
    graph.clear()
    assert graph == ExecutionGraph()


def test_what_finds_no_room_is_dropped_with_all_that_hangs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_graph, "MAX_NODES", 2)
    graph = ExecutionGraph()
    graph.push_scope(Layer(0))
    graph.record_brick("kept", 1, 1)
    graph.pop_scope()
    assert graph.push_scope(Layer(1)) == DROPPED
    brick = graph.record_brick("lost", 1, 1)
    graph.record_kernel("lost too")
    graph.add_dependency(1, brick)
    graph.pop_scope()
    assert graph.is_scope_balanced
    assert (len(graph.nodes), graph.dropped, graph.added_edges) == (2, 4, [])


def test_added_edges_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_graph, "MAX_EDGES", 1)
    graph = two_bricks()
    graph.add_dependency(1, 2)
    graph.add_dependency(1, 3)
    assert (len(graph.added_edges), graph.dropped) == (1, 1)


@given(any_graph())
def test_every_edge_leaves_one_node_and_arrives_at_one(graph: ExecutionGraph) -> None:
    edges = list(graph.edges())
    ids = range(len(graph.nodes))
    assert sorted(map(repr, edges)) == sorted(repr(e) for node in ids for e in graph.outgoing_edges(node))
    assert sorted(map(repr, edges)) == sorted(repr(e) for node in ids for e in graph.incoming_edges(node))


@given(hostile_text)
def test_printable_text_is_one_line_and_changes_nothing_that_was(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable()
    shown.encode()


def test_a_brick_keeps_its_own_amounts() -> None:
    graph = ExecutionGraph()
    graph.record_brick("qkv", 100, 4, flops=800, moved_bytes=64)
    assert graph.node(0) == Brick("qkv", 100, 4, 800, 64)
