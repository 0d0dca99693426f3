"""The execution graph of one phase, as an ExecutionGraph and as rows in drawing order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from cbtop.profiler.graph.analysis import CriticalPath, CycleError, critical_path
from cbtop.profiler.graph.execution_graph import ExecutionGraph
from cbtop.profiler.graph.from_nodes import graph_of_nodes
from cbtop.profiler.graph.nodes import AsyncTask, Transfer
from cbtop.profiler.graph.tree import EMPTY_TEXT, MANY_ROOTS, TreeNode, label, tree_lines
from cbtop.profiler.phase_totals import PhaseTotals
from cbtop.profiler.stats import Calls
from cbtop.protocol.messages import Dependency, Node
from cbtop.viewmodels.model import CriticalPathView, GraphRow

# The path of so many nodes takes 0.13 s beside 0.35 s for the rest of their view (2 shared cores; at 100,000 nodes
# 0.9 s beside 2.6 s): more is not worth the wait twice a second.
MAX_PATH_NODES = 10_000
_recent: deque[tuple[ExecutionGraph, CriticalPath | CycleError]] = deque(maxlen=4)


def execution_graph(totals: PhaseTotals, dependencies: Iterable[Dependency]) -> tuple[ExecutionGraph, dict[int, int]]:
    """The phase's nodes with their mean times, and each node's id in the graph by its id in the table."""
    return graph_of_nodes(totals.nodes, totals.count, totals.total_ns, totals.known_elements, dependencies)


def graph_rows(
    totals: PhaseTotals, graph: ExecutionGraph, ids: dict[int, int]
) -> tuple[tuple[GraphRow, ...], CriticalPathView | None]:
    """One row a node, a parent before its children, and the critical path where anything lies beside it."""
    path, found = _path_of(graph)
    on_path = frozenset(path.nodes) if path else frozenset()
    slack_ns = path.slack_ns if path else {}
    rows: list[GraphRow] = []
    depths: dict[int | None, int] = {totals.step.id if totals.step else None: -1}
    for node, calls in zip(totals.nodes, totals.stats.calls_of([[node.id] for node in totals.nodes]), strict=True):
        depths[node.id] = depth = depths[node.parent] + 1
        at = ids[node.id]
        slack = slack_ns.get(at)
        is_on_path = None if slack is None else at in on_path
        rows.append(_row(node, depth, label(graph.nodes[at]), totals, calls, is_on_path, slack))
    return tuple(rows), found


def tree_text(rows: Sequence[GraphRow], note: Callable[[GraphRow], str] = lambda _: "") -> str:
    """The rows as the ASCII tree, to the character as the predecessor drew it; `note` adds to the end of a line."""
    inside: dict[int | None, list[TreeNode]] = {}
    for row in reversed(rows):
        children = tuple(reversed(inside.pop(row.id, [])))
        inside.setdefault(row.parent, []).append(TreeNode(row.label + note(row), children, row.id))
    roots = tuple(reversed(inside.get(None, [])))
    if not roots:
        return EMPTY_TEXT
    return "\n".join(tree_lines(roots[0] if len(roots) == 1 else TreeNode(MANY_ROOTS, roots)))


def _path_of(graph: ExecutionGraph) -> tuple[CriticalPath | None, CriticalPathView | None]:
    """The critical path, and what is said of it: nothing where the graph is one sequence, all of it critical."""
    if not graph.added_edges and not any(isinstance(node, AsyncTask | Transfer) for node in graph.nodes):
        return None, None
    if len(graph.nodes) > MAX_PATH_NODES:
        unknown = f"{len(graph.nodes):,} nodes; it is computed for up to {MAX_PATH_NODES:,}"
        return None, CriticalPathView(0.0, 0, 0, unknown)
    path = _remembered(graph)
    if isinstance(path, CycleError):
        return None, CriticalPathView(0.0, 0, 0, str(path))
    return path, CriticalPathView(path.total_ns / 1e3, len(path.nodes), len(path.slack_ns))


def _remembered(graph: ExecutionGraph) -> CriticalPath | CycleError:
    """The path of `graph`; that of an equal graph where it is one of the last few (comparing takes 4 ms, not 130)."""
    for known, path in tuple(_recent):
        if known == graph:
            return path
    try:
        found: CriticalPath | CycleError = critical_path(graph)
    except CycleError as error:
        found = error.with_traceback(None)  # a traceback would keep every frame, and the whole view, alive
    _recent.append((graph, found))
    return found


def _row(
    node: Node,
    depth: int,
    text: str,
    totals: PhaseTotals,
    calls: Calls | None,
    on_critical_path: bool | None,
    slack_ns: float | None,
) -> GraphRow:
    uncounted = totals.stats.rare("uncounted", (node.id,))
    return GraphRow(
        id=node.id,
        parent=node.parent if depth else None,
        depth=depth,
        kind=node.kind,
        name=node.name,
        label=text,
        category=node.category,
        backend=node.backend,
        count=calls.count if calls else None,
        total_inclusive_us=calls.total_ns / 1e3 if calls else None,
        avg_inclusive_us=calls.mean_ns / 1e3 if calls else None,
        p50_us=calls.p50_ns / 1e3 if calls and calls.p50_ns is not None else None,
        p99_us=calls.p99_ns / 1e3 if calls and calls.p99_ns is not None else None,
        elements=round(calls.elements / calls.count) if calls and not uncounted else None,
        percent=totals.percent(totals.closed_ns[node.id]) if calls and node.id not in totals.adopted else None,
        node_label=node.label,
        kernel=node.kernel,
        on_critical_path=on_critical_path,
        slack_us=None if slack_ns is None else slack_ns / 1e3,
    )
