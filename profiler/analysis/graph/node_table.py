"""The table of all nodes of one source. Each node is checked when it is added."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from cbtop.protocol.attributes import Work
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickCategory, NodeKind

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")

MAX_NODES = 100_000
MAX_DEPTH = 32  # deepest nesting: a step, a layer, a brick and a kernel, and bricks inside bricks

# Kinds of nodes that are parts of the time of the node around them. Kernels, copies and tasks are not, because they
# may run in parallel. In a brick, only bricks and steps are, because all other time is the brick's own work.
_PARTS = frozenset({NodeKind.STEP, NodeKind.LAYER, NodeKind.BRICK, NodeKind.FUNCTION})
_PARTS_OF = dict.fromkeys(_PARTS, _PARTS) | {NodeKind.BRICK: frozenset({NodeKind.STEP, NodeKind.BRICK})}


@dataclass(frozen=True, slots=True)
class Inside:
    """The ids of all nodes inside one node. In `ids`, parents come before children. `by_depth` has the ids of each
    depth.
    """

    nodes: tuple[Node, ...]
    ids: NDArray[np.int64]
    by_depth: tuple[NDArray[np.int64], ...]


class NodeTable:
    """Nodes by id (1, 2, 3, …), at most MAX_NODES, at most MAX_DEPTH deep.

    A node comes after its parent, so there are no cycles.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.children: dict[int | None, list[Node]] = {None: []}
        self.step_of = array("q", [-1])  # by id: the step around the node (for a step, itself), or -1
        # by id, in a step: the parent, if its time includes the node's time; else -1
        self.part_of = array("q", [-1])
        # by id: the first node of the same phase, kind, name, category and `own`
        self.first_of = array("q", [0])
        self.like_of = array("q", [0])  # by id: the first such node that also has the same work and budget
        self.parent_of = array("q", [0])  # 0 for a root
        self.kind_of = array("q", [-1])
        self.depth = array("q", [0])
        # 1 for a module's own operations, else 0; they become a row if they take enough time
        self.has_own = array("q", [0])
        self.backends: set[str] = set()
        # (phase, kind, name, category) -> first node; phase 0 is outside of steps
        self._first: dict[tuple[int, NodeKind, str, BrickCategory], int] = {}
        self._like: dict[tuple[int, Work, float | None, float | None], int] = {}
        self._phase: array[int] = array("q", [0])
        self._columns: dict[str, NDArray[np.int64]] = {}
        self._inside: dict[int | None, Inside] = {}
        # Results that `made_of` has kept.
        self._made: dict[tuple[str, int | None], tuple[NDArray[np.int64], Any]] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, node: int) -> Node:
        return self.nodes[node - 1]

    def add(self, node: Node) -> None:
        """Add the next node. Raises ValueError for a wrong id, parent or depth, or if the table is full."""
        expected = len(self.nodes) + 1
        if node.id != expected or expected > MAX_NODES:
            raise ValueError(f"node {node.id} where {expected} was due (at most {MAX_NODES} are taken)")
        if node.parent is not None and not 1 <= node.parent < expected:
            raise ValueError(f"node {node.id} lies inside {node.parent}, which is not defined before it")
        depth = 1 if node.parent is None else self.depth[node.parent] + 1
        if depth > MAX_DEPTH:
            raise ValueError(f"node {node.id} lies {depth} deep, at most {MAX_DEPTH} are taken")
        outer = -1 if node.parent is None else self.step_of[node.parent]
        self.nodes.append(node)
        self.children[node.id] = []
        self.children[node.parent].append(node)
        self.step_of.append(node.id if node.kind is NodeKind.STEP and outer < 0 else outer)
        self.part_of.append(self._outer_of(node) if outer > 0 else -1)
        self.depth.append(depth)
        is_phase = node.parent is None and node.kind is NodeKind.STEP
        self._phase.append(node.id if is_phase else self._phase[node.parent or 0])
        category = BrickCategory.OTHER if node.category is None else node.category
        # A layer is named by its number. `own` names the row of a layer's own operations. So the key has both.
        name = node.name if node.kind is NodeKind.BRICK else f"{node.own}{node.name}"
        first = self._first.setdefault((self._phase[-1], node.kind, name, category), node.id)
        self.first_of.append(first)
        like = first, node.work, node.budget_us_per_token, node.budget_gb_per_sec
        self.like_of.append(self._like.setdefault(like, node.id))
        self.parent_of.append(node.parent or 0)
        self.kind_of.append(node.kind)
        self.has_own.append(bool(node.own))
        if node.backend and node.kind is not NodeKind.KERNEL:
            self.backends.add(node.backend)
        self._columns.clear()
        self._inside.clear()
        self._made.clear()

    def _outer_of(self, node: Node) -> int:
        """Return the parent of `node` if its time includes the time of `node`, else -1."""
        assert node.parent is not None
        return node.parent if node.kind in _PARTS_OF.get(self[node.parent].kind, ()) else -1

    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return `step_of`, `part_of` and `first_of`, for `NodeStats.add`."""
        return self.column("step_of"), self.column("part_of"), self.column("first_of")

    def column(self, name: str) -> NDArray[np.int64]:
        """Return one of the arrays of this class as a NumPy array. It is the same object until a node is added."""
        import numpy as np  # imported here, because a process that only records does not need NumPy

        found = self._columns.get(name)
        if found is None:
            found = self._columns[name] = np.array(getattr(self, name), np.int64)
        return found

    def inside(self, node: int | None) -> Inside:
        """Return the nodes inside `node` (None: all nodes). It is the same object until a node is added."""
        import numpy as np

        found = self._inside.get(node)
        if found is None:
            nodes = tuple(self.descendants(node))
            ids = np.array([one.id for one in nodes], np.int64)
            depth = self.column("depth")[ids]
            order = np.argsort(depth, kind="stable")
            by_depth = np.split(ids[order], np.flatnonzero(np.diff(depth[order])) + 1)
            found = self._inside[node] = Inside(nodes, ids, tuple(by_depth))
        return found

    def made_of(self, what: str, step: int | None, nodes: NDArray[np.int64], make: Callable[[], T]) -> T:
        """Return the result of `make`, which is cached for `what` and `step`.

        `make` is called again after a node was added, or for other `nodes`. Its result may depend only on `nodes`,
        which are inside `step`, and on this table.
        """
        import numpy as np

        known = self._made.get((what, step))
        if known is None or not np.array_equal(known[0], nodes):
            known = self._made[what, step] = nodes, make()
        found: T = known[1]
        return found

    def descendants(self, node: int | None) -> list[Node]:
        """Return all nodes inside `node` (None: all nodes), in drawing order. A parent comes before its children."""
        found: list[Node] = []
        waiting = list(reversed(self.children[node]))
        while waiting:
            here = waiting.pop()
            found.append(here)
            waiting.extend(reversed(self.children[here.id]))
        return found
