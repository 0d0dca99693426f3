"""A graph of nodes, with their nesting and edges. It is filled by recording, or later from a node table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from cbtop.profiler.analysis.graph.node_table import MAX_NODES
from cbtop.profiler.analysis.graph.nodes import (
    DERIVED_KINDS,
    Brick,
    Edge,
    EdgeKind,
    GraphNode,
    KernelLaunch,
    Transfer,
    is_beside,
    name_of,
)
from cbtop.protocol.attributes import Grid
from cbtop.protocol.vocabulary import BrickId, TransferDirection

DROPPED = -1  # The id of a node that did not fit. The nodes inside it and its edges are dropped, too.
MAX_EDGES = MAX_NODES  # limit for edges that callers add
_OPPOSITE = {
    TransferDirection.H2D: TransferDirection.D2H,
    TransferDirection.D2H: TransferDirection.H2D,
}


@dataclass(slots=True)
class RecordedGraph:
    """Nodes, their nesting, and the added edges. The id of a node is its index in `nodes`.

    `push_scope` and `pop_scope` set the scope of the next node:

        graph.push_scope(Layer(0))
        graph.record_brick(BrickId.QKV_PROJECTION, 200_000, elements=4096)
        graph.record_kernel("batched_gemv", ptx_hash, (32, 1, 1), (256, 1, 1), shared_memory_bytes=4096)
        graph.pop_scope()

    A graph has at most MAX_NODES nodes and MAX_EDGES added edges. `dropped` counts the nodes and edges that did not
    fit.
    """

    nodes: list[GraphNode] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=list)
    added_edges: list[Edge] = field(default_factory=list)
    dropped: int = 0
    _scopes: list[int] = field(default_factory=list)
    _last_brick: int | None = None

    def add_node(self, node: GraphNode, parent: int | None = None) -> int:
        """Add a node inside `parent` (None: as a root). Returns its id, or DROPPED if there is no room.

        Raises ValueError for an unknown parent.
        """
        if parent == DROPPED or len(self.nodes) >= MAX_NODES:
            self.dropped += 1
            return DROPPED
        if parent is not None:
            self._known(parent)
        self.nodes.append(node)
        self.parents.append(parent)
        return len(self.nodes) - 1

    def add_edge(self, source: int, destination: int, kind: EdgeKind, weight: float = 1.0) -> None:
        """Connect two nodes by an edge. Contains, Launches and Sequence edges follow from the scopes and cannot be
        added.

        Raises ValueError for these kinds, for an unknown node, and for a weight that is not finite.
        """
        if kind in DERIVED_KINDS:
            raise ValueError(f"{kind.value} edges follow from the scopes; add Calls, DependsOn or Transfer")
        if not math.isfinite(weight):
            raise ValueError(f"a {kind.value} edge of weight {weight}; a finite number is wanted")
        if DROPPED in (source, destination) or len(self.added_edges) >= MAX_EDGES:
            self.dropped += 1
            return
        self.added_edges.append(Edge(self._known(source), self._known(destination), kind, weight))

    def add_dependency(self, first: int, then: int) -> None:
        """Declare that `then` cannot start before `first` has ended."""
        self.add_edge(first, then, EdgeKind.DEPENDS_ON)

    def push_scope(self, node: GraphNode) -> int:
        """Add a node to the current scope, and make it the current scope. Returns its id."""
        added = self.add_node(node, self.current_scope)
        self._scopes.append(added)
        self._last_brick = None
        return added

    def pop_scope(self) -> None:
        """Leave the current scope. Raises ValueError if there is no current scope."""
        if not self._scopes:
            raise ValueError("pop_scope without a push_scope before it")
        self._scopes.pop()
        self._last_brick = None

    @property
    def current_scope(self) -> int | None:
        return self._scopes[-1] if self._scopes else None

    @property
    def is_scope_balanced(self) -> bool:
        """Whether every scope has been left."""
        return not self._scopes

    def record_brick(
        self,
        brick: BrickId | str,
        duration_ns: float,
        elements: int,
        flops: float | None = None,
        moved_bytes: float | None = None,
    ) -> int:
        """Add a timed brick to the current scope. The kernels recorded next are its launches."""
        name = brick.display_name if isinstance(brick, BrickId) else brick
        node = Brick(name, duration_ns, elements, flops, moved_bytes)
        self._last_brick = self.add_node(node, self.current_scope)
        return self._last_brick

    def record_kernel(
        self,
        name: str,
        ptx_hash: int | None = None,
        grid: Grid | None = None,
        block: Grid | None = None,
        shared_memory_bytes: int = 0,
        duration_ns: float | None = None,
        flops: float | None = None,
        moved_bytes: float | None = None,
    ) -> int:
        """Add a kernel launch to this scope's last brick, or to the scope if it has no brick.

        For other launch attributes, use `add_node(KernelLaunch(…))`.
        """
        parent = self.current_scope if self._last_brick is None else self._last_brick
        kernel = KernelLaunch(
            name,
            duration_ns=duration_ns,
            flops=flops,
            moved_bytes=moved_bytes,
            grid=grid,
            block=block,
            shared_memory_bytes=shared_memory_bytes,
            ptx_hash=ptx_hash,
        )
        return self.add_node(kernel, parent)

    def record_transfer(
        self,
        source: str,
        destination: str,
        size_bytes: int,
        direction: TransferDirection,
        duration_ns: float | None = None,
        stream: int | None = None,
    ) -> int:
        """Add a copy between memories to the current scope. With a `stream`, it is parallel to its siblings."""
        copy = Transfer(source, destination, size_bytes, direction, duration_ns, stream=stream)
        return self.add_node(copy, self.current_scope)

    def clear(self) -> None:
        """Remove everything, including the open scopes."""
        self.nodes.clear()
        self.parents.clear()
        self.added_edges.clear()
        self._scopes.clear()
        self._last_brick = None
        self.dropped = 0

    def node(self, node: int) -> GraphNode:
        """Return the node with this id. Raises ValueError if there is no such node."""
        return self.nodes[self._known(node)]

    def node_by_name(self, name: str) -> list[int]:
        """Return the ids of all nodes called `name`, in the order of adding."""
        return [found for found, node in enumerate(self.nodes) if name_of(node) == name]

    def kernel_nodes(self) -> list[tuple[int, KernelLaunch]]:
        """Return every kernel as (id, kernel)."""
        return [(found, node) for found, node in enumerate(self.nodes) if isinstance(node, KernelLaunch)]

    def slowest_kernel(self) -> tuple[int, KernelLaunch] | None:
        """Return the first of the longest kernels as (id, kernel), or None if no kernel was timed."""
        timed = [(found, kernel) for found, kernel in self.kernel_nodes() if kernel.duration_ns is not None]
        return max(timed, key=lambda pair: pair[1].duration_ns or 0.0, default=None)

    def detect_ping_pong(self) -> list[tuple[int, int]]:
        """Return pairs of transfers that move data from one memory to another and back. A transfer is in at most one
        pair.

        The second copy has the same number of bytes and the opposite direction. Its source is the destination of the
        first copy.
        """
        pairs: list[tuple[int, int]] = []
        gone: dict[tuple[int, str, TransferDirection], list[int]] = {}
        for found, node in enumerate(self.nodes):
            if not isinstance(node, Transfer) or node.direction not in _OPPOSITE:
                continue
            waiting = gone.get((node.size_bytes, node.source, _OPPOSITE[node.direction]))
            if waiting:
                pairs.append((waiting.pop(), found))
            else:
                gone.setdefault((node.size_bytes, node.destination, node.direction), []).append(found)
        return pairs

    def edges(self) -> Iterator[Edge]:
        """Yield every edge: first the edges that follow from the scopes, node by node, then the added edges.

        A parent launches its kernels and contains its other nodes. A node follows the sibling (or root) recorded
        before it. A parallel node (`is_beside`) starts where it was recorded, and nothing follows it. Nodes that need
        its result declare a dependency.
        """
        before: dict[int | None, int] = {}
        for node, parent in enumerate(self.parents):
            if parent is not None:
                launched = isinstance(self.nodes[node], KernelLaunch)
                yield Edge(parent, node, EdgeKind.LAUNCHES if launched else EdgeKind.CONTAINS)
            if parent in before:
                yield Edge(before[parent], node, EdgeKind.SEQUENCE)
            if not is_beside(self.nodes[node]):
                before[parent] = node
        yield from self.added_edges

    def outgoing_edges(self, node: int) -> list[Edge]:
        """Return the edges that leave `node`.

        Takes time linear in all edges of the graph: for many nodes, use `to_csr`.
        """
        return [edge for edge in self.edges() if edge.source == node]

    def incoming_edges(self, node: int) -> list[Edge]:
        """Return the edges that arrive at `node`. Takes time linear in all edges."""
        return [edge for edge in self.edges() if edge.destination == node]

    @property
    def roots(self) -> list[int]:
        return [node for node, parent in enumerate(self.parents) if parent is None]

    def children(self) -> dict[int, list[int]]:
        """Return the nodes inside each node, in the order of adding."""
        inside: dict[int, list[int]] = {node: [] for node in range(len(self.nodes))}
        for node, parent in enumerate(self.parents):
            if parent is not None:
                inside[parent].append(node)
        return inside

    def _known(self, node: int) -> int:
        if not 0 <= node < len(self.nodes):
            raise ValueError(f"no node {node}; there are {len(self.nodes)}")
        return node
