"""Tests of graphs that are built from a recorded catalog: they equal graphs that are built from scopes."""

from __future__ import annotations

from pathlib import Path

from cbtop.profiler.analysis.graph.analysis import critical_path
from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
from cbtop.profiler.analysis.graph.from_nodes import graph_of_nodes
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import Brick, KernelLaunch, Layer, Step
from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.attributes import Work
from cbtop.protocol.catalog import CatalogReader
from cbtop.protocol.messages import Node
from cbtop.protocol.ring_reader import RingReader
from cbtop.protocol.vocabulary import BrickId, NodeKind


class Totals:
    """The totals of all records in a ring, by node id."""

    def __init__(self, directory: Path) -> None:
        (ring,), (catalog,) = directory.glob("*.ring"), directory.glob("*.catalog")
        self.table = NodeTable()
        for message in CatalogReader(catalog).read():
            if isinstance(message, Node):
                self.table.add(message)
        ids = range(1, len(self.table) + 1)
        self.count, self.total_ns, self.elements = dict.fromkeys(ids, 0), dict.fromkeys(ids, 0), dict.fromkeys(ids, 0)
        batch = RingReader(ring).read()
        columns = (batch.node.tolist(), batch.start_ns.tolist(), batch.end_ns.tolist(), batch.elements.tolist())
        for node, start_ns, end_ns, elements in zip(*columns, strict=True):
            self.count[node] += 1
            self.total_ns[node] += end_ns - start_ns
            self.elements[node] += elements


def test_scopes_and_a_recorded_catalog_give_the_same_graph(runtime: Path) -> None:
    kernel = KernelDefinition(
        "gemv", "", grid=(32, 1, 1), block=(256, 1, 1), shared_memory_bytes=4096, ptx_hash=(1 << 64) - 1
    )
    norm = BrickDefinition.of(BrickId.RMS_NORM, work=Work(flops_per_element=4, bytes_per_element=8))
    qkv = BrickDefinition.of(BrickId.QKV_PROJECTION, kernels=(kernel,))
    now_ns = 0

    def clock_ns() -> int:
        return now_ns

    profiler = BrickProfiler(clock_ns=clock_ns, recorder=RingRecorder(runtime))
    scopes = ExecutionGraph()
    with profiler.step("decode", tokens=1):
        scopes.push_scope(Step("decode"))
        for index in range(2):
            with profiler.layer(index):
                scopes.push_scope(Layer(index))
                with profiler.brick(norm, elements=16):
                    now_ns += 50_000
                scopes.record_brick(BrickId.RMS_NORM, 50_000, 16, flops=64, moved_bytes=128)
                with profiler.brick(qkv, elements=48):
                    now_ns += 200_000
                scopes.record_brick(BrickId.QKV_PROJECTION, 200_000, 48)
                scopes.record_kernel("gemv", (1 << 64) - 1, (32, 1, 1), (256, 1, 1), 4096)
                scopes.pop_scope()
        scopes.pop_scope()
    profiler.close()
    totals = Totals(runtime)
    graph, ids = graph_of_nodes(totals.table.descendants(None), totals.count, totals.total_ns, totals.elements)
    assert graph == scopes
    assert list(graph.edges()) == list(scopes.edges())
    assert {totals.table[node].name for node in ids} == {"decode", "0", "1", "RmsNorm", "QkvProjection", "gemv"}


def brick(number: int, parent: int | None, name: str) -> Node:
    return Node(number, parent, NodeKind.BRICK, name)


def test_a_brick_run_more_often_than_its_step_keeps_its_mean_and_calls() -> None:
    nodes = [Node(2, 1, NodeKind.LAYER, "0"), brick(3, 2, "RmsNorm"), brick(4, 3, "inner")]
    count = {1: 10, 2: 10, 3: 20, 4: 40}  # Node 1 is the step. The step was called ten times.
    total_ns = {1: 9000, 2: 8000, 3: 4000, 4: 1000}
    graph, ids = graph_of_nodes(nodes, count, total_ns, dict.fromkeys(count, 80))
    assert ids == {2: 0, 3: 1, 4: 2}
    assert graph.nodes[1:] == [Brick("RmsNorm", 200, 4, calls=2), Brick("inner", 25, 2, calls=4)]
    assert critical_path(graph).total_ns == 4000 / 10


def test_without_steps_a_root_is_one_run() -> None:
    graph, _ = graph_of_nodes(
        [brick(1, None, "outer"), brick(2, 1, "inner")], {1: 4, 2: 8}, {1: 400, 2: 80}, {1: 0, 2: 0}
    )
    assert graph.nodes == [Brick("outer", 100, 0), Brick("inner", 10, 0, calls=2)]


def test_what_never_ran_has_no_time() -> None:
    nodes = [brick(1, None, "idle"), Node(2, 1, NodeKind.KERNEL, "k", backend="numba")]
    graph, _ = graph_of_nodes(nodes, {1: 0, 2: 0}, {1: 0, 2: 0}, {1: 0, 2: 0})
    assert graph.nodes == [Brick("idle"), KernelLaunch("k", backend="numba")]
