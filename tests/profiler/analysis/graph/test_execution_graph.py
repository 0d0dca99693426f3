"""The public methods of an execution graph: renderings, critical path, slack and distances from the roof."""

from __future__ import annotations

import json

import pytest

from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
from cbtop.profiler.analysis.graph.nodes import Brick, KernelLaunch, Layer
from cbtop.protocol.vocabulary import BrickId, TransferDirection


def _layer() -> ExecutionGraph:
    """Return a layer with two bricks. The second one launches a kernel."""
    graph = ExecutionGraph()
    graph.push_scope(Layer(0))
    graph.record_brick(BrickId.RMS_NORM, 50_000, elements=4096, flops=1e6, moved_bytes=1e6)
    graph.record_brick(BrickId.QKV_PROJECTION, 200_000, elements=4096, flops=4e9, moved_bytes=1e6)
    graph.record_kernel("batched_gemv", 1, (32, 1, 1), (256, 1, 1), 4096, 150_000, flops=4e9, moved_bytes=1e6)
    graph.pop_scope()
    return graph


def test_the_tree_is_the_predecessors_to_the_character() -> None:
    graph = ExecutionGraph()
    graph.push_scope(Layer(0))
    graph.record_brick(BrickId.QKV_PROJECTION, 200_000, elements=4096)
    graph.record_kernel("batched_gemv", 1, (32, 1, 1), (256, 1, 1), 4096)
    graph.pop_scope()
    assert graph.to_ascii_tree() == (
        "Layer 0\n└── QkvProjection  200.0µs (4096 elem)\n    └── batched_gemv  <<<32,256,1>>> smem=4096B"
    )
    assert ExecutionGraph().to_ascii_tree() == "(empty graph)"
    assert graph.to_tree_node().children[0].label == "QkvProjection  200.0µs (4096 elem)"


def test_every_rendering_has_the_nodes_and_edges_of_the_graph() -> None:
    graph = _layer()
    edges = len(list(graph.edges()))
    assert graph.to_dot().count(" -> ") == edges == len(graph.to_csr().columns)
    assert [node["kind"] for node in json.loads(graph.to_json())["nodes"]] == [
        "Layer",
        "Brick",
        "Brick",
        "KernelLaunch",
    ]
    assert str(graph.to_rich_tree().label) == "Layer 0"


def test_bricks_in_sequence_are_all_on_the_critical_path() -> None:
    graph = _layer()
    path = graph.critical_path()
    assert (path.nodes, path.total_ns) == ((1, 2, 3), 250_000)
    assert graph.compute_slack() == {1: 0.0, 2: 0.0, 3: 0.0}
    assert graph.critical_path_summary().startswith("Critical Path: 0.25ms (3 nodes)")


def test_a_node_that_may_start_later_has_slack() -> None:
    graph = ExecutionGraph()
    graph.record_transfer("host", "device", 64, TransferDirection.H2D, duration_ns=300.0, stream=1)
    graph.add_node(Brick("Long", 900.0))
    assert graph.compute_slack() == {0: 600.0, 1: 0.0}


def test_the_distance_from_the_roof_is_of_each_node_and_of_the_whole() -> None:
    found = _layer().roofline_distance(tflops=40, gb_per_sec=100)
    # RmsNorm: 1 FLOP/byte, so 100 GFLOP/s are attainable. This brick reaches 20 GFLOP/s. QkvProjection: 4,000
    # FLOP/byte, so 40 TFLOP/s are attainable. This brick reaches 20 TFLOP/s, and its kernel reaches 26.7 TFLOP/s.
    assert found.nodes == pytest.approx({1: 0.8, 2: 0.5, 3: 1 / 3})
    # The kernel is part of its brick: 4.001 GFLOP in 250 µs, and 2,000.5 FLOP/byte.
    assert found.whole == pytest.approx(1 - 4.001e9 / 250_000 / 40_000)


def test_a_rate_above_the_roof_has_no_distance_left() -> None:
    graph = ExecutionGraph()
    graph.add_node(KernelLaunch("fast", duration_ns=1.0, flops=1e9, moved_bytes=1e3))
    assert graph.roofline_distance(1, 1).nodes == {0: 0.0}


def test_what_is_unknown_has_no_distance_from_the_roof() -> None:
    graph = ExecutionGraph()
    graph.add_node(Brick("Untimed", None, 1, 1e9, 1e6))
    graph.add_node(Brick("NoWork", 1000.0, 1))
    found = graph.roofline_distance(1, 1)
    assert (found.nodes, found.whole) == ({}, None)


@pytest.mark.parametrize(("tflops", "gb_per_sec"), [(0, 1), (1, 0), (-1, 1), (float("nan"), 1)])
def test_a_roof_that_is_not_positive_is_refused(tflops: float, gb_per_sec: float) -> None:
    with pytest.raises(ValueError, match="both must be positive"):
        ExecutionGraph().roofline_distance(tflops, gb_per_sec)
