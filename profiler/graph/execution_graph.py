"""ExecutionGraph: what ran inside what, built by scopes while recording or from a recorded node table."""

from __future__ import annotations

from dataclasses import dataclass, field

from cbtop.protocol.vocabulary import BrickId

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Layer:
    index: int


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass, or the mean of many: `decode`, `prefill`."""

    name: str


@dataclass(frozen=True, slots=True)
class Brick:
    """`duration_ns` is None where the brick was never timed; `elements` are those of one call."""

    name: str
    duration_ns: float | None = None
    elements: int | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: a GPU launch has a grid and a block, a CPU kernel only its backend."""

    name: str
    grid: Grid | None = None
    block: Grid | None = None
    shared_memory_bytes: int = 0
    backend: str = ""
    ptx_hash: int | None = None
    duration_ns: float | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """`direction` is H2D, D2H or D2D."""

    source: str
    destination: str
    size_bytes: int
    direction: str
    duration_ns: float | None = None


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class AsyncTask:
    name: str
    polls: int
    yields: int
    total_poll_ns: float


GraphNode = Layer | Step | Brick | Kernel | Transfer | Function | AsyncTask


@dataclass(slots=True)
class ExecutionGraph:
    """Nodes and who contains whom. A node's id is its place in `nodes`.

    `push_scope` and `pop_scope` say where the next node belongs:

        graph.push_scope(Layer(0))
        graph.record_brick(BrickId.QKV_PROJECTION, 200_000, elements=4096)
        graph.record_kernel("batched_gemv", grid=(32, 1, 1), block=(256, 1, 1), shared_memory_bytes=4096)
        graph.pop_scope()
    """

    nodes: list[GraphNode] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=list)
    _scopes: list[int] = field(default_factory=list)
    _last_brick: int | None = None

    def add_node(self, node: GraphNode, parent: int | None = None) -> int:
        """Add a node inside `parent` (None: a root) and give its id. Raises ValueError for an unknown parent."""
        if parent is not None and not 0 <= parent < len(self.nodes):
            raise ValueError(f"no node {parent} to hold {node}; there are {len(self.nodes)}")
        self.nodes.append(node)
        self.parents.append(parent)
        return len(self.nodes) - 1

    def push_scope(self, node: GraphNode) -> int:
        """Add a node where we are and go inside it."""
        added = self.add_node(node, self.current_scope)
        self._scopes.append(added)
        self._last_brick = None
        return added

    def pop_scope(self) -> None:
        """Go back out. Raises ValueError when there is nothing to leave."""
        if not self._scopes:
            raise ValueError("pop_scope without a push_scope before it")
        self._scopes.pop()
        self._last_brick = None

    @property
    def current_scope(self) -> int | None:
        return self._scopes[-1] if self._scopes else None

    @property
    def is_scope_balanced(self) -> bool:
        """Whether every scope that was entered was left."""
        return not self._scopes

    def record_brick(self, brick: BrickId | str, duration_ns: float, elements: int) -> int:
        """Add a timed brick where we are; kernels recorded next are its launches."""
        name = brick.display_name if isinstance(brick, BrickId) else brick
        self._last_brick = self.add_node(Brick(name, duration_ns, elements), self.current_scope)
        return self._last_brick

    def record_kernel(self, name: str, grid: Grid, block: Grid, shared_memory_bytes: int) -> int:
        """Add a kernel launch to the brick recorded last in this scope, or to the scope itself."""
        parent = self.current_scope if self._last_brick is None else self._last_brick
        return self.add_node(Kernel(name, grid, block, shared_memory_bytes), parent)

    @property
    def roots(self) -> list[int]:
        return [node for node, parent in enumerate(self.parents) if parent is None]

    def children(self) -> dict[int, list[int]]:
        """The nodes inside each node, in the order they were added."""
        inside: dict[int, list[int]] = {node: [] for node in range(len(self.nodes))}
        for node, parent in enumerate(self.parents):
            if parent is not None:
                inside[parent].append(node)
        return inside
