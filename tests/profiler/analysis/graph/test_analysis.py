"""Tests of the critical path of a graph: no time counts twice, slack is right, and cycles are reported."""

from __future__ import annotations

from itertools import pairwise

import networkx
import pytest
from hypothesis import given

from cbtop.profiler.analysis.graph import recorded_graph
from cbtop.profiler.analysis.graph.analysis import CycleError, critical_path, critical_path_summary
from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
from cbtop.profiler.analysis.graph.nodes import ORDERING_KINDS, AsyncTask, Brick, Function, KernelLaunch, Layer, Step
from cbtop.protocol.vocabulary import BrickId
from tests.profiler.analysis.graph.random_graphs import any_graph, dependency_dag


def fork_and_join() -> ExecutionGraph:
    """Return a graph: load (10 µs), then two parallel branches (50 and 20 µs), then join (5 µs)."""
    graph = ExecutionGraph()
    graph.push_scope(Layer(0))
    load = graph.record_brick("load", 10_000, 1)
    branches = []
    for name, duration_ns in (("long", 50_000), ("short", 20_000)):
        branches.append(graph.push_scope(AsyncTask(f"{name} branch", 1, 0, 0)))
        graph.record_brick(name, duration_ns, 1)
        graph.pop_scope()
    join = graph.record_brick("join", 5_000, 1)
    for branch in branches:
        graph.add_dependency(load, branch)
        graph.add_dependency(branch, join)
    graph.pop_scope()
    return graph


def test_the_path_takes_the_long_branch_and_the_short_one_has_slack() -> None:
    graph = fork_and_join()
    found = critical_path(graph)
    assert [graph.nodes[node].name for node in found.nodes] == ["load", "long", "join"]  # type: ignore[union-attr]
    assert found.total_ns == 65_000
    (short,) = graph.node_by_name("short")
    assert found.slack_ns == dict.fromkeys(found.nodes, 0) | {short: 30_000}


def test_the_summary_has_the_predecessors_layout() -> None:
    assert critical_path_summary(fork_and_join()) == (
        "Critical Path: 0.07ms (3 nodes)\n"
        "──────────────────────────────────────────────────\n"
        "┌ load (10.0µs)\n"
        "│ long (50.0µs)\n"
        "└ join (5.0µs)\n"
        "Parallelization Opportunities (high slack):\n"
        "  short slack=30.0µs"
    )


def test_the_summary_of_nothing_is_its_head() -> None:
    assert critical_path_summary(ExecutionGraph()) == "Critical Path: 0.00ms (0 nodes)\n" + "─" * 50


def test_the_summary_says_what_the_graph_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_graph, "MAX_NODES", 1)
    graph = ExecutionGraph()
    graph.record_brick("kept", 1000, 1)
    graph.record_brick("lost", 1000, 1)
    assert critical_path_summary(graph).splitlines()[-1] == "(1 dropped)"


def test_a_brick_and_its_kernels_are_not_both_counted() -> None:
    graph = ExecutionGraph()
    graph.push_scope(Step("decode"))
    for _ in range(2):
        graph.record_brick(BrickId.QKV_PROJECTION, 200_000, 4096)
        graph.record_kernel("gemv", 1, (32, 1, 1), (256, 1, 1), 0, duration_ns=150_000)
        graph.record_kernel("reduce", 2, (1, 1, 1), (32, 1, 1), 0, duration_ns=50_000)
    found = critical_path(graph)
    assert found.total_ns == 400_000
    assert {type(graph.nodes[node]) for node in found.nodes} == {KernelLaunch}


def test_what_a_brick_took_beside_its_kernels_stays_its_own() -> None:
    graph = ExecutionGraph()
    brick = graph.record_brick("qkv", 200_000, 1)
    kernel = graph.record_kernel("gemv", duration_ns=150_000)
    found = critical_path(graph)
    assert (found.nodes, found.total_ns) == ((brick, kernel), 200_000)
    assert found.exclusive_ns == (50_000, 150_000)


def test_time_below_something_untimed_is_still_inside_the_brick_above() -> None:
    graph = ExecutionGraph()
    brick = graph.add_node(Brick("outer", 100))
    function = graph.add_node(Function("forward"), brick)
    graph.add_node(KernelLaunch("inner", duration_ns=70), function)
    assert critical_path(graph).exclusive_ns == (30, 0, 70)


def test_a_brick_that_runs_twice_a_step_counts_twice() -> None:
    graph = ExecutionGraph()
    graph.add_node(Brick("RmsNorm", 100, calls=2.0))
    assert critical_path(graph).total_ns == 200


def test_children_that_take_longer_than_their_parent_leave_it_nothing() -> None:
    graph = ExecutionGraph()
    graph.record_brick("overlapped", 100, 1)
    graph.record_kernel("a", duration_ns=80)
    graph.record_kernel("b", duration_ns=80)
    assert critical_path(graph).exclusive_ns == (0, 80, 80)


@pytest.mark.parametrize(
    ("edges", "named"),
    [
        ([(2, 0)], {0, 1, 2}),  # This dependency contradicts the order in which the nodes ran.
        ([(1, 1)], {1}),
        ([(3, 4), (4, 3)], {3, 4}),
        ([(5, 3)], {3, 5}),  # The parent would have to wait for its own child.
        ([(3, 5)], {3, 5}),  # The child would have to wait for its own parent.
    ],
)
def test_a_cycle_is_an_error_that_names_it(edges: list[tuple[int, int]], named: set[int]) -> None:
    graph = ExecutionGraph()
    for name in ("zero", "one", "two"):
        graph.add_node(Brick(name, 1))
    graph.add_node(AsyncTask("three", 1, 0, 1))
    graph.add_node(AsyncTask("four", 1, 0, 1))
    graph.add_node(Brick("five", 1), 3)
    for source, destination in edges:
        graph.add_dependency(source, destination)
    with pytest.raises(CycleError) as caught:
        critical_path(graph)
    assert set(caught.value.nodes) == named
    for node in named:
        assert f"(node {node})" in str(caught.value)


@given(dependency_dag())
def test_networkx_finds_the_same_path_length_and_slack(graph: ExecutionGraph) -> None:
    found = critical_path(graph)
    times = [float(node.duration_ns or 0) if isinstance(node, Brick) else node.total_poll_ns for node in graph.nodes]
    oracle = networkx.DiGraph()
    oracle.add_nodes_from(range(len(times)))
    oracle.add_edges_from((e.source, e.destination) for e in graph.edges() if e.kind in ORDERING_KINDS)
    for source, _, data in oracle.edges(data=True):
        data["weight"] = times[source]
    # Convert times of nodes into lengths of edges. An additional node at the begin and one at the end connect the
    # nodes.
    for node, time in enumerate(times):
        oracle.add_edge("begin", node, weight=0)
        oracle.add_edge(node, "end", weight=time)
    assert networkx.is_directed_acyclic_graph(oracle)
    total = networkx.dag_longest_path_length(oracle)
    assert found.total_ns == total == sum(times[node] for node in found.nodes)
    order = list(networkx.topological_sort(oracle))
    earliest = dict.fromkeys(order, 0.0)
    for node in order:
        for later, data in oracle[node].items():
            earliest[later] = max(earliest[later], earliest[node] + data["weight"])
    latest = dict.fromkeys(order, total)
    for node in reversed(order):
        for later, data in oracle[node].items():
            latest[node] = min(latest[node], latest[later] - data["weight"])
    assert found.slack_ns == {node: latest[node] - earliest[node] for node, time in enumerate(times) if time}
    assert all(networkx.has_path(oracle, one, other) for one, other in pairwise(found.nodes))


def event_order(graph: ExecutionGraph) -> networkx.DiGraph[tuple[int, str]]:
    """Return the order in which nodes begin and end, as a directed graph.

    This function is independent of the tested code, so that both can be compared.
    """
    order: networkx.DiGraph[tuple[int, str]] = networkx.DiGraph()
    for node, parent in enumerate(graph.parents):
        order.add_edge((node, "begin"), (node, "end"))
        if parent is not None:
            order.add_edge((parent, "begin"), (node, "begin"))
            order.add_edge((node, "end"), (parent, "end"))
    order.add_edges_from(
        ((e.source, "end"), (e.destination, "begin")) for e in graph.edges() if e.kind in ORDERING_KINDS
    )
    return order


@given(any_graph())
def test_any_graph_has_either_a_path_or_a_cycle(graph: ExecutionGraph) -> None:
    if not networkx.is_directed_acyclic_graph(event_order(graph)):
        with pytest.raises(CycleError):
            critical_path(graph)
        return
    found = critical_path(graph)
    assert found.total_ns == pytest.approx(sum(found.exclusive_ns[node] for node in found.nodes))
    assert all(slack >= 0 for slack in found.slack_ns.values())
    assert {found.slack_ns[node] for node in found.nodes} <= {0.0}


@pytest.mark.slow
def test_a_full_graph_is_analysed_in_seconds() -> None:
    graph = ExecutionGraph()
    graph.push_scope(Step("decode"))
    for index in range(1000):
        graph.push_scope(Layer(index))
        for _ in range(24):
            graph.record_brick(BrickId.RMS_NORM, 100, 1)
            graph.record_kernel("rms", duration_ns=60)
        graph.pop_scope()
    graph.pop_scope()
    assert critical_path(graph).total_ns == 1000 * 24 * 100
