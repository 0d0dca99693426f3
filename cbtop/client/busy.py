"""What a rank was busy with in its last two seconds, in slices: to compare it with the others."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cbtop.profiler.graph.node_table import NodeTable
from cbtop.profiler.graph.nodes import display_name
from cbtop.profiler.histograms import Column
from cbtop.profiler.stats import NodeStats
from cbtop.protocol.vocabulary import NodeKind

SLICE_S = 0.1  # an update
SLICES = 20
MAX_SILENT_SLICES = 20  # without a step for so many slices: it is not running steps now


@dataclass(frozen=True, slots=True)
class Slice:
    """The recorded steps of one phase that ended within a slice, and what each brick had for itself in them."""

    steps: int
    exclusive_ns: dict[str, int]


class BusySlices:
    """The totals of one source at a few moments at which a step had ended."""

    def __init__(self) -> None:
        self._taken: deque[tuple[int, Column, Column]] = deque(maxlen=SLICES + 1)
        self._now_ns = 0

    def tick(self, monotonic_ns: int, nodes: NodeTable, stats: NodeStats) -> None:
        """It is `monotonic_ns` on the daemon's clock: begin a slice if one is due."""
        self._now_ns = monotonic_ns
        count = stats.of_recorded("count")  # of plain steps nobody knows what was busy in them
        steps = [n.id for n in nodes.children[None] if n.kind is NodeKind.STEP and n.id < len(count)]
        if self._taken:
            before_ns, count_before, _ = self._taken[-1]
            same = all(count[step] == (count_before[step] if step < len(count_before) else 0) for step in steps)
            if same or monotonic_ns - before_ns < SLICE_S * 1e9:
                return
        self._taken.append((monotonic_ns, count, stats.column("closed_ns").copy()))

    @property
    def count(self) -> int:
        """How many slices there are, of whatever phase."""
        return max(0, len(self._taken) - 1)

    @property
    def has_stopped(self) -> bool:
        """Whether no step has ended for long, measured by how long they took before."""
        if not self._taken:
            return True
        longest_ns = max((after[0] - before[0] for before, after in self._pairs()), default=0)
        return self._now_ns - self._taken[-1][0] > MAX_SILENT_SLICES * max(longest_ns, SLICE_S * 1e9)

    def slices(self, nodes: NodeTable, phase: str) -> list[Slice]:
        """Of the last SLICES those in which steps of `phase` ended, the oldest first."""
        step = next((n for n in nodes.children[None] if n.kind is NodeKind.STEP and display_name(n) == phase), None)
        if step is None:
            return []
        owner = _owners(nodes, step.id)
        found = []
        for (_, count_before, closed_before), (_, count, closed) in self._pairs():
            size = len(closed)
            earlier = np.zeros(size, np.int64)
            earlier[: len(closed_before)] = closed_before[:size]
            steps = int(count[step.id]) - (int(count_before[step.id]) if step.id < len(count_before) else 0)
            if steps > 0:
                took = (closed - earlier).tolist()
                found.append(Slice(steps, {name: _own(took, *ids) for name, ids in owner.items()}))
        return found

    def _pairs(self) -> list[tuple[tuple[int, Column, Column], tuple[int, Column, Column]]]:
        return list(pairwise(self._taken))


def _own(took_ns: list[int], plus: list[int], minus: list[int]) -> int:
    size = len(took_ns)
    return sum(took_ns[node] for node in plus if node < size) - sum(took_ns[node] for node in minus if node < size)


def _owners(nodes: NodeTable, step: int) -> dict[str, tuple[list[int], list[int]]]:
    """By name the nodes whose time is that brick's, and those inside them whose time is another's."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    holder: dict[int, str | None] = {step: None}  # the brick each node lies in
    for node in nodes.descendants(step):
        if node.kind is NodeKind.ADOPTED or (node.parent is not None and node.parent not in holder):
            continue  # done elsewhere, beside the step
        inside = holder[node.parent] if node.parent is not None else None
        holder[node.id] = inside
        if node.kind is NodeKind.STEP and inside is not None:
            found[inside][1].append(node.id)
        if node.kind is NodeKind.BRICK:
            found.setdefault(node.name, ([], []))[0].append(node.id)
            if inside is not None:
                found[inside][1].append(node.id)
            holder[node.id] = node.name
    return found
