"""The execution graph of one phase, as an ExecutionGraph and as rows in drawing order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import overload

import numpy as np

from cbtop.comparison.items import Place
from cbtop.profiler.analysis.brick_stats import name_and_category
from cbtop.profiler.analysis.calls import Calls
from cbtop.profiler.analysis.graph.analysis import CriticalPath, CycleError, critical_path
from cbtop.profiler.analysis.graph.execution_graph import ExecutionGraph
from cbtop.profiler.analysis.graph.from_nodes import graph_of_nodes, mean_call, runs_of
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.graph.tree import EMPTY_TEXT, MANY_ROOTS, TreeNode, label, tree_lines
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.protocol.attributes import NO_KERNEL, NO_MODULE, KernelAttributes, ModuleAttributes, TransferAttributes
from cbtop.protocol.kernel_messages import KernelTimes
from cbtop.protocol.messages import Dependency, Node
from cbtop.protocol.vocabulary import BrickCategory, NodeKind

# A larger graph has no critical path, because it would take too long. With this many nodes, the path and its graph
# take 0.3 s, and all the rest of the view takes 0.03 s (2 shared cores). A view is made twice a second.
MAX_PATH_NODES = 10_000
# The critical path may be this much longer than the mean step, because their times come from different clocks.
LONGER = 1.01
BESIDE = (NodeKind.ASYNC_TASK, NodeKind.TRANSFER)  # Nodes of these kinds may run in parallel to their siblings.
_recent: deque[tuple[ExecutionGraph, CriticalPath | CycleError]] = deque(maxlen=4)


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One node of the tree layer → brick → kernel as a row.

    Rows are in drawing order, so a parent precedes its children.
    """

    id: int
    parent: int | None
    depth: int
    kind: NodeKind
    name: str
    label: str  # the node's name and figures, as in the ASCII tree without connectors
    category: BrickCategory | None
    backend: str
    count: int | None
    total_inclusive_us: float | None
    avg_inclusive_us: float | None
    p50_us: float | None
    p99_us: float | None
    elements: int | None  # mean number of elements per call of the node
    percent: float | None  # share of the step's wall time in percent
    node_label: str = ""  # the program's label of the node, or the stack of a layer
    kernel: KernelAttributes = NO_KERNEL
    # Whether the node is on the critical path. None if the path is unknown, or without exclusive time.
    on_critical_path: bool | None = None
    # slack: how much later (µs) the node could start without delaying the end of the step
    slack_us: float | None = None
    transfer: TransferAttributes | None = None  # the copied bytes and their direction; only for a copy
    # The kernel's times in the last burst (a few steps recorded on request). The fields above do not include them.
    burst: KernelTimes | None = None
    # the node's key in a baseline: (None, layer) for a layer, (brick, layer) for a brick
    place: Place | None = None
    module: ModuleAttributes = NO_MODULE  # the module of torch that the brick calls

    @property
    def copied_gb_per_sec(self) -> float | None:
        """Rate of a timed copy: its bytes divided by its mean time (derived)."""
        if self.transfer is None or not self.avg_inclusive_us:
            return None
        return self.transfer.size_bytes / self.avg_inclusive_us / 1e3


@dataclass(frozen=True, slots=True)
class CriticalPathView:
    """The critical path: the chain of work that determines how long a mean call of the graph takes (derived)."""

    total_us: float
    nodes: int  # number of nodes on the critical path
    timed_nodes: int  # number of nodes with exclusive time
    unknown: str = ""  # why the critical path is unknown, or ""; with a reason, all numbers are 0


class GraphRows(Sequence[GraphRow]):
    """The rows of a graph, one per node, parents first.

    A row is made when it is accessed, because a screen shows only a few. It then has the current statistics. To keep
    rows while statistics change, make a tuple.
    """

    def __init__(
        self,
        totals: PhaseTotals,
        on_path: Set[int] = frozenset(),
        slack_ns: Mapping[int, float] | None = None,
        in_burst: Mapping[int, KernelTimes] | None = None,
    ) -> None:
        # the nodes of the graph in drawing order; the same object until a node is added
        self.places: tuple[Node, ...] = totals.nodes
        self._totals = totals
        self._elements = totals.known_elements
        self._on_path, self._slack_ns = on_path, slack_ns or {}
        self._in_burst = in_burst or {}
        self._runs: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, at: int) -> GraphRow: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[GraphRow, ...]: ...
    def __getitem__(self, at: int | slice) -> GraphRow | tuple[GraphRow, ...]:
        return tuple(self._rows(self.places[at])) if isinstance(at, slice) else self._rows((self.places[at],))[0]

    def __iter__(self) -> Iterator[GraphRow]:
        return iter(self[:])

    def __hash__(self) -> int:
        return id(self.places)

    def __eq__(self, other: object) -> bool:
        """Return whether two sequences have the same nodes and counts, without making rows."""
        if not isinstance(other, GraphRows):
            return NotImplemented
        mine, theirs = self._totals.columns, other._totals.columns
        return (
            self.places is other.places
            and (self._on_path, self._slack_ns) == (other._on_path, other._slack_ns)
            and self._in_burst == other._in_burst
            and all(np.array_equal(mine[name], theirs[name]) for name in mine)
        )

    def some(self, places: Iterable[int]) -> list[GraphRow]:
        """Return the rows of the nodes at the indices `places`.

        Making forty rows together takes as long as making three rows one by one.
        """
        return self._rows([self.places[at] for at in places])

    @property
    def has_burst(self) -> bool:
        """Whether the last burst (steps recorded on request) has measured a kernel in these nodes."""
        return bool(self._in_burst) and any(node.id in self._in_burst for node in self.places)

    @property
    def largest_percent(self) -> float:
        """The largest share of the step's wall time in any row, in percent."""
        ids = self._totals.inside.ids
        closed_ns = self._totals.columns["closed_ns"][ids[~self._totals.adopted[ids]]]
        return self._totals.percent(int(closed_ns.max(initial=0))) or 0.0

    @property
    def costliest(self) -> int | None:
        """The id of the costliest node of the costliest brick, or None before the first step has ended.

        A brick counts with all its nodes, as in the table of bricks. Otherwise the output layer of a model would be
        the costliest, although a brick that every layer runs takes more time.
        """
        exclusive_ns, first_of = self._totals.closed_exclusive_ns, self._totals.table.column("first_of")
        nodes = [node.id for node in self.places if node.kind is NodeKind.BRICK and exclusive_ns[node.id] > 0]
        bricks: Counter[int] = Counter()
        for node in nodes:
            bricks[int(first_of[node])] += int(exclusive_ns[node])
        return max(nodes, key=lambda node: (bricks[int(first_of[node])], int(exclusive_ns[node])), default=None)

    def _rows(self, nodes: Sequence[Node]) -> list[GraphRow]:
        calls = self._totals.stats.calls_of([[node.id] for node in nodes])
        return [self._row(node, known) for node, known in zip(nodes, calls, strict=True)]

    def _row(self, node: Node, calls: Calls | None) -> GraphRow:
        totals = self._totals
        depth = totals.table.depth[node.id] - (2 if totals.step else 1)
        mean = mean_call(node, self._runs_of(node), totals.count, totals.total_ns, self._elements)
        slack_ns = self._slack_ns.get(node.id)
        return GraphRow(
            id=node.id,
            parent=node.parent if depth else None,
            depth=depth,
            kind=node.kind,
            name=node.name,
            label=label(mean),
            category=node.category,
            backend=node.backend,
            count=calls.count if calls else None,
            total_inclusive_us=calls.total_ns / 1e3 if calls else None,
            avg_inclusive_us=calls.mean_ns / 1e3 if calls else None,
            p50_us=calls.p50_ns / 1e3 if calls and calls.p50_ns is not None else None,
            p99_us=calls.p99_ns / 1e3 if calls and calls.p99_ns is not None else None,
            elements=round(calls.elements / calls.count) if calls and node.id in self._elements else None,
            percent=totals.percent(totals.closed_ns[node.id]) if calls and not totals.adopted[node.id] else None,
            node_label=node.label,
            kernel=node.kernel,
            transfer=node.transfer,
            on_critical_path=None if slack_ns is None else node.id in self._on_path,
            slack_us=None if slack_ns is None else slack_ns / 1e3,
            burst=self._in_burst.get(node.id),
            place=self._place_of(node),
            module=node.module,
        )

    def _place_of(self, node: Node) -> Place | None:
        """Return a node's key in a baseline: its layer, or its brick and the outermost layer around it.

        None for other nodes.
        """
        outer, at = None, node
        while at.kind is not NodeKind.STEP:
            outer = at if at.kind is NodeKind.LAYER else outer
            if at.parent is None:
                break
            at = self._totals.table[at.parent]
        layer = None if outer is None else display_name(outer)
        if node.kind is NodeKind.BRICK and not self._totals.adopted[node.id]:
            return name_and_category(node), layer
        return (None, layer) if node is outer else None

    def _runs_of(self, node: Node) -> int:
        found = self._runs.get(node.id)
        if found is None:
            is_root = node.parent is None or (self._totals.step is not None and node.parent == self._totals.step.id)
            outer = 0 if is_root or node.parent is None else self._runs_of(self._totals.table[node.parent])
            found = self._runs[node.id] = runs_of(node, outer, self._totals.count)
        return found


def graph_rows(
    totals: PhaseTotals, dependencies: Collection[Dependency], in_burst: Mapping[int, KernelTimes] | None = None
) -> tuple[GraphRows, CriticalPathView | None]:
    """Return the rows of a phase, and the critical path.

    The path is None if all nodes run one after another, because then every node is critical.
    """
    ids, known = totals.inside.ids, totals.count.keys()
    is_beside = np.isin(totals.table.column("kind_of")[ids], BESIDE).any()
    if not is_beside and not any({one.first, one.then} <= known for one in dependencies):
        return GraphRows(totals, in_burst=in_burst), None
    if len(ids) > MAX_PATH_NODES:
        unknown = f"{len(ids):,} nodes; it is computed for up to {MAX_PATH_NODES:,}"
        return GraphRows(totals, in_burst=in_burst), CriticalPathView(0.0, 0, 0, unknown)
    graph, at = graph_of_nodes(totals.nodes, totals.count, totals.total_ns, totals.known_elements, dependencies)
    path = _path_of(graph)
    if isinstance(path, CycleError):
        return GraphRows(totals, in_burst=in_burst), CriticalPathView(0.0, 0, 0, str(path))
    step_ns = (totals.wall_ns or 0) / max(totals.count[totals.step.id], 1) if totals.step else 0.0
    if step_ns and path.total_ns > LONGER * step_ns:
        took = f"{path.total_ns / 1e3:,.1f} µs, a step {step_ns / 1e3:,.1f} µs"
        unknown = f"its nodes take {took}: some run beside others, and none of them says so"
        return GraphRows(totals, in_burst=in_burst), CriticalPathView(0.0, 0, 0, unknown)
    node_at = {place: node for node, place in at.items()}
    on_path = frozenset(node_at[place] for place in path.nodes)
    rows = GraphRows(totals, on_path, {node_at[place]: slack for place, slack in path.slack_ns.items()}, in_burst)
    return rows, CriticalPathView(path.total_ns / 1e3, len(path.nodes), len(path.slack_ns))


def places_of(graph: Sequence[GraphRow]) -> Sequence[GraphRow | Node]:
    """Return the nodes of `graph` in drawing order. It is the same object until a node is added."""
    return graph.places if isinstance(graph, GraphRows) else graph


def rows_at(graph: Sequence[GraphRow], places: Sequence[int]) -> list[GraphRow]:
    """Return the rows of the nodes of `graph` at the indices `places`."""
    return graph.some(places) if isinstance(graph, GraphRows) else [graph[at] for at in places]


def largest_share(graph: Sequence[GraphRow]) -> float:
    """Return the largest share (%) of the step's wall time in any row of `graph`."""
    if isinstance(graph, GraphRows):
        return graph.largest_percent
    return max((row.percent or 0.0 for row in graph), default=0.0)


def costliest_brick(graph: Sequence[GraphRow]) -> int | None:
    """Return the id of the brick of `graph` that takes the most time, or None without a timed brick."""
    if isinstance(graph, GraphRows):
        return graph.costliest
    rows = [row for row in graph if row.kind is NodeKind.BRICK and row.total_inclusive_us]
    bricks: dict[str, float] = {}
    for row in rows:
        bricks[row.name] = bricks.get(row.name, 0.0) + (row.total_inclusive_us or 0.0)
    return max(rows, key=lambda row: (bricks[row.name], row.total_inclusive_us or 0.0)).id if rows else None


def has_burst(graph: Sequence[GraphRow]) -> bool:
    """Return whether the last burst (steps recorded on request) has measured a kernel of `graph`."""
    return graph.has_burst if isinstance(graph, GraphRows) else any(row.burst is not None for row in graph)


def tree_text(rows: Sequence[GraphRow], note: Callable[[GraphRow], str] = lambda _: "") -> str:
    """Return the rows as an ASCII tree in the format of cbtop's predecessor.

    `note` returns a text to append to a row's line.
    """
    inside: dict[int | None, list[TreeNode]] = {}
    for row in reversed(tuple(rows)):
        children = tuple(reversed(inside.pop(row.id, [])))
        inside.setdefault(row.parent, []).append(TreeNode(row.label + note(row), children, row.id))
    roots = tuple(reversed(inside.get(None, [])))
    if not roots:
        return EMPTY_TEXT
    return "\n".join(tree_lines(roots[0] if len(roots) == 1 else TreeNode(MANY_ROOTS, roots)))


def _path_of(graph: ExecutionGraph) -> CriticalPath | CycleError:
    """Return the critical path of `graph`.

    A recent graph with the same contents already has it (4 ms instead of 130).
    """
    for known, path in tuple(_recent):
        if known == graph:
            return path
    try:
        found: CriticalPath | CycleError = critical_path(graph)
    except CycleError as error:
        # Store the error without its traceback, which would keep the whole view in memory.
        found = error.with_traceback(None)
    _recent.append((graph, found))
    return found
