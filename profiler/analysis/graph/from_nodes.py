"""Makes an ExecutionGraph from the nodes of a catalog and their totals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import assert_never

from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
from cbtop.profiler.analysis.graph.nodes import (
    AsyncTask,
    Brick,
    Function,
    GraphNode,
    KernelLaunch,
    Layer,
    Step,
    Transfer,
    display_name,
)
from cbtop.protocol.attributes import FunctionAttributes, KernelAttributes, TransferAttributes, carried
from cbtop.protocol.messages import Dependency, Node
from cbtop.protocol.vocabulary import NodeKind


def graph_of_nodes(
    nodes: Iterable[Node],
    count: Mapping[int, int],
    total_ns: Mapping[int, int],
    elements: Mapping[int, int],
    dependencies: Iterable[Dependency] = (),
) -> tuple[ExecutionGraph, dict[int, int]]:
    """Return the graph of `nodes`, and a dict from ids in the node table to ids in the graph.

    Parents come first in `nodes`. `count`, `total_ns` and `elements` (if known) are totals by node id over any number
    of runs. The graph has means per call. A node is a root if its parent is not among `nodes`. If this parent is a
    step, its count is the number of runs.
    """
    graph = ExecutionGraph()
    ids: dict[int, int] = {}
    runs: dict[int, int] = {}
    for node in nodes:
        outer = node.parent or 0
        runs[node.id] = runs_of(node, runs.get(outer, 0), count)
        ids[node.id] = graph.add_node(mean_call(node, runs[node.id], count, total_ns, elements), ids.get(outer))
    for dependency in dependencies:
        if dependency.first in ids and dependency.then in ids:
            graph.add_dependency(ids[dependency.first], ids[dependency.then])
    return graph, ids


def runs_of(node: Node, runs_of_parent: int, count: Mapping[int, int]) -> int:
    """Return over how many runs the graph's means are taken: how often the outermost node around `node` ran."""
    outer = runs_of_parent or count.get(node.parent or 0, 0)
    if node.kind is NodeKind.ASYNC_TASK and not outer:
        return 1  # an async task's count says how often it was polled, not how often it ran
    return outer or count.get(node.id, 0)


def mean_call(
    node: Node, runs: int, count: Mapping[int, int], total_ns: Mapping[int, int], elements: Mapping[int, int]
) -> GraphNode:
    """Return `node` as a graph node with the values of its mean call. `runs` comes from `runs_of`."""
    calls = count.get(node.id, 0)
    mean_ns = total_ns[node.id] / calls if calls else None
    mean_elements = elements[node.id] / calls if calls and node.id in elements else None
    return _graph_node(node, mean_ns, mean_elements, calls / runs if calls else 1.0)


def _graph_node(node: Node, mean_ns: float | None, mean_elements: float | None, calls: float) -> GraphNode:
    # `Work` is linear in the elements, so the mean elements give the mean work.
    flops = None if mean_elements is None else node.work.flops(1, mean_elements)
    moved_bytes = None if mean_elements is None else node.work.bytes(1, mean_elements)
    match node.kind:
        case NodeKind.STEP:
            return Step(node.name, node.label)
        case NodeKind.LAYER:
            return Layer(int(node.name), node.label) if node.name.isdecimal() else Function(display_name(node))
        case NodeKind.BRICK:
            whole = None if mean_elements is None else round(mean_elements)
            return Brick(node.name, mean_ns, whole, flops, moved_bytes, calls, node.label)
        case NodeKind.KERNEL:
            launch = carried(KernelAttributes, node.kernel)
            return KernelLaunch(node.name, node.backend, mean_ns, flops, moved_bytes, calls, **launch)
        case NodeKind.ADOPTED:
            return Function(node.name)
        case NodeKind.FUNCTION:
            return Function(node.name, **carried(FunctionAttributes, node.function))
        case NodeKind.TRANSFER:
            if node.transfer is None:
                return Function(node.name)
            return Transfer(**carried(TransferAttributes, node.transfer), duration_ns=mean_ns, calls=calls)
        case NodeKind.ASYNC_TASK:
            return AsyncTask(node.name, round(calls), round(calls * (mean_elements or 0.0)), calls * (mean_ns or 0.0))
        case _:
            assert_never(node.kind)
