"""The node table of one source: nodes as they were defined, checked when they are added."""

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
MAX_DEPTH = 32  # step, layer, brick, kernel, and room for bricks inside bricks

# Nodes with time that is part of the time of the node around them; a kernel, a copy or a task may run in parallel.
# Nodes inside a brick, other than bricks and steps, are its own work.
_PARTS = frozenset({NodeKind.STEP, NodeKind.LAYER, NodeKind.BRICK, NodeKind.FUNCTION})
_PARTS_OF = dict.fromkeys(_PARTS, _PARTS) | {NodeKind.BRICK: frozenset({NodeKind.STEP, NodeKind.BRICK})}


@dataclass(frozen=True, slots=True)
class Inside:
    """The nodes inside one node, a parent before its children: all ids, and the ids by depth, outermost first."""

    nodes: tuple[Node, ...]
    ids: NDArray[np.int64]
    by_depth: tuple[NDArray[np.int64], ...]


class NodeTable:
    """Nodes by id (1, 2, 3, …), each after its parent, so there are no cycles; at most MAX_NODES, MAX_DEPTH deep."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.children: dict[int | None, list[Node]] = {None: []}
        self.step_of = array("q", [-1])  # the step that each id is in (itself for a step), -1 if there is none
        self.part_of = array("q", [-1])  # inside a step: the parent whose time includes each id's time; else -1
        self.first_of = array("q", [0])  # the first node of the same kind, name and category in the same phase
        self.like_of = array("q", [0])  # the first of these that also has the same work and budget
        self.parent_of = array("q", [0])  # 0 for a root
        self.kind_of = array("q", [-1])
        self.depth = array("q", [0])
        self.backends: set[str] = set()
        self._first: dict[tuple[int, NodeKind, str, BrickCategory], int] = {}  # by phase (0: none) and these three
        self._like: dict[tuple[int, Work, float | None, float | None], int] = {}
        self._phase: array[int] = array("q", [0])
        self._columns: dict[str, NDArray[np.int64]] = {}
        self._inside: dict[int | None, Inside] = {}
        self._made: dict[tuple[str, int | None], tuple[NDArray[np.int64], Any]] = {}  # see made_of

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, node: int) -> Node:
        return self.nodes[node - 1]

    def add(self, node: Node) -> None:
        """Add the next node. Raises ValueError if it does not fit."""
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
        first = self._first.setdefault((self._phase[-1], node.kind, node.name, category), node.id)
        self.first_of.append(first)
        like = first, node.work, node.budget_us_per_token, node.budget_gb_per_sec
        self.like_of.append(self._like.setdefault(like, node.id))
        self.parent_of.append(node.parent or 0)
        self.kind_of.append(node.kind)
        if node.backend and node.kind is not NodeKind.KERNEL:
            self.backends.add(node.backend)
        self._columns.clear()
        self._inside.clear()
        self._made.clear()

    def _outer_of(self, node: Node) -> int:
        """Return the node around it, if its time is part of that node's; else -1."""
        assert node.parent is not None
        return node.parent if node.kind in _PARTS_OF.get(self[node.parent].kind, ()) else -1

    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return `step_of`, `part_of` and `first_of`, as `NodeStats.add` takes them."""
        return self.column("step_of"), self.column("part_of"), self.column("first_of")

    def column(self, name: str) -> NDArray[np.int64]:
        """Return one of the arrays above; the same object until a node is added."""
        import numpy as np  # not needed by a process that only records

        found = self._columns.get(name)
        if found is None:
            found = self._columns[name] = np.array(getattr(self, name), np.int64)
        return found

    def inside(self, node: int | None) -> Inside:
        """Return the nodes inside `node` (None: all); the same object until a node is added."""
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
        """Return the result of `make`, which depends only on `nodes` inside `step` and this table.

        The same object is returned until these change or a node is added. The last one of each `what` and step is
        kept.
        """
        import numpy as np

        known = self._made.get((what, step))
        if known is None or not np.array_equal(known[0], nodes):
            known = self._made[what, step] = nodes, make()
        found: T = known[1]
        return found

    def descendants(self, node: int | None) -> list[Node]:
        """Return all nodes inside `node` (None: all), a parent before its children, in drawing order."""
        found: list[Node] = []
        waiting = list(reversed(self.children[node]))
        while waiting:
            here = waiting.pop()
            found.append(here)
            waiting.extend(reversed(self.children[here.id]))
        return found
