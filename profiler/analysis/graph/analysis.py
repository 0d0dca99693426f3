"""Finds the critical path of an execution graph, and the slack of all other nodes."""

# Rules
# - A node counts with its exclusive time: its time without the nodes inside it. No time counts twice.
# - The nodes inside a node begin after the node's own time, and end before the node does.
# - Only Sequence and DependsOn edges order nodes. A cycle raises an error.

from __future__ import annotations

import graphlib
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from cbtop.profiler.analysis.graph.nodes import ORDERING_KINDS, EdgeKind, is_beside, name_of, printable, work_ns
from cbtop.profiler.analysis.graph.recorded_graph import RecordedGraph
from cbtop.profiler.analysis.graph.tree import dropped_text

RULE_WIDTH = 50
SHOWN_SLACKS = 5


class CycleError(ValueError):
    """Raised if nodes wait for each other in a cycle. `nodes` are their ids along the cycle, each once."""

    def __init__(self, graph: RecordedGraph, nodes: Sequence[int]) -> None:
        self.nodes = tuple(nodes)
        around = [*nodes, nodes[0]]
        named = " → ".join(f"{printable(name_of(graph.nodes[node]))} (node {node})" for node in around)
        super().__init__(f"a cycle has no critical path: {named}")


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The chain of work that determines the total time.

    `nodes` are the chain's nodes with exclusive time, in order. `exclusive_ns` has the exclusive time of every node
    of the graph. `slack_ns` says how much later a node could start without delaying the end of the graph. It is 0 on
    the chain.
    """

    nodes: tuple[int, ...]
    total_ns: float
    exclusive_ns: tuple[float, ...]
    slack_ns: dict[int, float]


def exclusive_ns(graph: RecordedGraph) -> list[float]:
    """Return the exclusive time of every node: its time without the nodes inside it.

    Parallel nodes (`is_beside`) are not subtracted. If children overlap on a device or use a different clock, they
    may add up to more than their parent. The exclusive time is then 0.
    """
    inside = [0.0] * len(graph.nodes)
    own = [0.0] * len(graph.nodes)
    for node in range(len(graph.nodes) - 1, -1, -1):
        taken = work_ns(graph.nodes[node])
        if taken is not None:
            own[node] = max(0.0, taken - inside[node])
        parent = graph.parents[node]
        if parent is not None and not is_beside(graph.nodes[node]):
            inside[parent] += inside[node] if taken is None else taken
    return own


def critical_path(graph: RecordedGraph) -> CriticalPath:
    """Return the longest chain of nodes that wait for each other. Raises CycleError for a cycle."""
    own = exclusive_ns(graph)
    after = _events(graph)
    order = _topological(graph, after)
    start = [0.0] * len(after)  # the earliest time of each event, in ns
    before = [-1] * len(after)
    for event in order:
        end = start[event] + _weight(own, event)
        for later in after[event]:
            if end > start[later]:
                start[later], before[later] = end, event
    rest = [0.0] * len(after)  # the longest time from each event to the end of the graph, in ns
    for event in reversed(order):
        rest[event] = _weight(own, event) + max((rest[later] for later in after[event]), default=0.0)
    last = max(order, key=lambda event: start[event] + _weight(own, event), default=-1)
    total = start[last] + _weight(own, last) if order else 0.0
    path: list[int] = []
    while last >= 0:
        if _weight(own, last):
            path.append(last // 2)
        last = before[last]
    path.reverse()
    slack = {node: max(0.0, total - start[2 * node] - rest[2 * node]) for node, time in enumerate(own) if time}
    slack.update(dict.fromkeys(path, 0.0))  # the slack is exactly 0 here, apart from rounding
    return CriticalPath(tuple(path), total, tuple(own), slack)


def critical_path_summary(graph: RecordedGraph) -> str:
    """Return the path and the nodes with the most slack as text, laid out as in cbtop's predecessor.

    Raises CycleError.
    """
    found = critical_path(graph)
    lines = [f"Critical Path: {found.total_ns / 1e6:.2f}ms ({len(found.nodes)} nodes)", "─" * RULE_WIDTH]
    last = len(found.nodes) - 1
    for place, node in enumerate(found.nodes):
        bracket = "┌" if place == 0 else "└" if place == last else "│"
        lines.append(f"{bracket} {printable(name_of(graph.nodes[node]))} ({found.exclusive_ns[node] / 1e3:.1f}µs)")
    slackest = sorted(found.slack_ns.items(), key=lambda pair: (-pair[1], pair[0]))[:SHOWN_SLACKS]
    shown = [(node, slack) for node, slack in slackest if slack > 0]
    if shown:
        lines.append("Parallelization Opportunities (high slack):")
    lines += [f"  {printable(name_of(graph.nodes[node]))} slack={slack / 1e3:.1f}µs" for node, slack in shown]
    if graph.dropped:
        lines.append(dropped_text(graph))
    return "\n".join(lines)


def _weight(own: Sequence[float], event: int) -> float:
    return 0.0 if event % 2 else own[event // 2]


def _events(graph: RecordedGraph) -> list[list[int]]:
    """Return which events follow each event. Event 2n is the start of node n, and event 2n + 1 its end.

    A node's own time comes directly after its begin.
    """
    after: list[list[int]] = [[] for _ in range(2 * len(graph.nodes))]
    for node in range(len(graph.nodes)):
        after[2 * node].append(2 * node + 1)
    for edge in graph.edges():
        if edge.kind in ORDERING_KINDS:
            after[2 * edge.source + 1].append(2 * edge.destination)
        elif edge.kind in (EdgeKind.CONTAINS, EdgeKind.LAUNCHES):
            after[2 * edge.source].append(2 * edge.destination)
            after[2 * edge.destination + 1].append(2 * edge.source + 1)
    return after


def _topological(graph: RecordedGraph, after: list[list[int]]) -> list[int]:
    """Return the events in an order in which each event comes after all events that it waits for."""
    sorter = TopologicalSorter[int]()
    for event, laters in enumerate(after):
        sorter.add(event)
        for later in laters:
            sorter.add(later, event)
    try:
        return list(sorter.static_order())
    except graphlib.CycleError as error:
        around = error.args[1][:-1]  # `graphlib` repeats the first event of a cycle at its end
        raise CycleError(graph, list(dict.fromkeys(event // 2 for event in around))) from error
