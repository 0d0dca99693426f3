"""Divide the last seconds of a rank into slices of at least 0.1 s. Return each brick's time in each slice.

Viewers compare the ranks of a job by slices. With 4 updates a second there are 20 slices in 5 s.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cbtop.profiler.analysis.brick_stats import name_and_category
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.histograms import Column
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.vocabulary import BrickCategory, NodeKind

# Least length of a slice. An update of the daemon begins at most one slice. Slices are aligned to the daemon's clock,
# so all viewers have the same.
SLICE_S = 0.1
_SLICE_NS = round(SLICE_S * 1e9)
SLICES = 20
MAX_SILENT_SLICES = 20  # A rank has stopped if none of its steps ended for this many slice lengths.

Brick = tuple[str, BrickCategory]


@dataclass(frozen=True, slots=True)
class Slice:
    """The recorded steps of one phase that ended in a slice: their wall time, and the self time of each brick."""

    steps: int
    wall_ns: int
    exclusive_ns: dict[Brick, int]


class BusySlices:
    """Stores the totals of a process at each update that reports an ended step. A slice is the time between two of
    them.
    """

    def __init__(self) -> None:
        self._taken: deque[_Taken] = deque(maxlen=SLICES + 1)
        self._now_ns = 0

    def tick(self, monotonic_ns: int, nodes: NodeTable, stats: NodeStats) -> None:
        """Set the daemon's clock to `monotonic_ns`. Begin a new slice if the current one is long enough."""
        self._now_ns = monotonic_ns
        # Only steps that were recorded with their bricks show which brick was busy.
        count = stats.of_recorded("count")
        steps = [n.id for n in nodes.children[None] if n.kind is NodeKind.STEP and n.id < len(count)]
        if self._taken:
            before = self._taken[-1]
            same = all(count[step] == _at(before.count, step) for step in steps)
            if same or monotonic_ns // _SLICE_NS <= before.monotonic_ns // _SLICE_NS:
                return
        closed = stats.column("closed_ns").copy()
        self._taken.append(_Taken(monotonic_ns, count, stats.of_recorded("total_ns"), closed))

    @property
    def count(self) -> int:
        """Number of the rank's slices, with or without steps of the shown phase."""
        return max(0, len(self._taken) - 1)

    @property
    def has_stopped(self) -> bool:
        """Whether the rank has stopped: no step has ended in the time of MAX_SILENT_SLICES longest slices."""
        if not self._taken:
            return True
        longest_ns = max((b.monotonic_ns - a.monotonic_ns for a, b in pairwise(self._taken)), default=0)
        return self._now_ns - self._taken[-1].monotonic_ns > MAX_SILENT_SLICES * max(longest_ns, SLICE_S * 1e9)

    def slices(self, nodes: NodeTable, phase: str) -> list[Slice]:
        """Return the slices with an ended step of `phase` among the last SLICES, oldest first."""
        step = next((n for n in nodes.children[None] if n.kind is NodeKind.STEP and display_name(n) == phase), None)
        if step is None:
            return []
        owner = _owners(nodes, step.id)
        found = []
        for before, after in pairwise(self._taken):
            size = len(after.closed_ns)
            earlier_ns = np.zeros(size, np.int64)
            earlier_ns[: len(before.closed_ns)] = before.closed_ns[:size]
            steps = _at(after.count, step.id) - _at(before.count, step.id)
            if steps > 0:
                wall_ns = _at(after.total_ns, step.id) - _at(before.total_ns, step.id)
                took_ns = (after.closed_ns - earlier_ns).tolist()
                found.append(Slice(steps, wall_ns, {brick: _own(took_ns, *ids) for brick, ids in owner.items()}))
        return found


@dataclass(frozen=True, slots=True)
class _Taken:
    """The totals of each node at one moment, of recorded steps only.

    `closed_ns` is the node's time in ended steps.
    """

    monotonic_ns: int
    count: Column
    total_ns: Column
    closed_ns: Column


def _at(column: Column, node: int) -> int:
    return int(column[node]) if node < len(column) else 0


def _own(took_ns: list[int], plus: list[int], minus: list[int]) -> int:
    size = len(took_ns)
    return sum(took_ns[node] for node in plus if node < size) - sum(took_ns[node] for node in minus if node < size)


def _owners(nodes: NodeTable, step: int) -> dict[Brick, tuple[list[int], list[int]]]:
    """Return two lists of node ids for each brick (name, category) in `step`: its own nodes, and nodes of other
    bricks directly inside it.
    """
    found: dict[Brick, tuple[list[int], list[int]]] = {}
    # node id -> the brick around the node, or None outside of bricks
    holder: dict[int, Brick | None] = {step: None}
    for node in nodes.descendants(step):
        if node.kind is NodeKind.ADOPTED or (node.parent is not None and node.parent not in holder):
            # ADOPTED work ran in parallel with the step, so its time is not part of the step.
            continue
        inside = holder[node.parent] if node.parent is not None else None
        holder[node.id] = inside
        if node.kind is NodeKind.STEP and inside is not None:
            found[inside][1].append(node.id)
        if node.kind is NodeKind.BRICK:
            brick = name_and_category(node)
            found.setdefault(brick, ([], []))[0].append(node.id)
            if inside is not None:
                found[inside][1].append(node.id)
            holder[node.id] = brick
    return found
