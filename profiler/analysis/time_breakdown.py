"""Divides the wall time of a phase's steps into bricks and gaps (the books of the phase), and adds up the time
outside of steps. The parts add up if no part is larger than the whole around it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.histograms import Column
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind

INSIDE_LAYERS, BETWEEN_LAYERS, INNER_STEPS = "inside layers", "between layers", "steps inside"


@dataclass(frozen=True, slots=True)
class Beside:
    """Calls outside of the steps' wall time: their number, the sum of their times, and their time by name, longest
    first.

    If they ran at the same time, each counts with its whole time.
    """

    calls: int
    time_ns: int
    by_name: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """The time breakdown of a phase, summed over its ended steps: wall = bricks + gaps - overlap + unattributed. All
    other times are not in this sum.

    The books do not close if parts took longer than their whole. Then no share of the wall time can be trusted.
    `over` is the number of such steps, and `over_ns` the excess. `exceeded` has the layers and bricks with such
    parts, and their excess in ns.
    """

    wall_ns: int
    bricks_ns: int
    gaps_ns: dict[str, int]
    overlap_ns: int  # time when n > 1 bricks or gaps ran at once, counted n - 1 times
    open_ns: int  # time of bricks in running steps
    over: int
    over_ns: int
    exceeded: tuple[tuple[str, int], ...]
    unmatched_calls: int  # number of calls that were stopped twice, out of order or after their step
    unmatched_ns: int
    cancelled: int  # number of steps that were cancelled, or renamed after bricks ran; their bricks are left out
    # Number of steps in the shared lane, which steps use when all other lanes are taken. Its bricks cannot be
    # assigned to single steps.
    in_shared_lane: int
    # Work of other threads or tasks for this phase's steps; None without any.
    adopted: Beside | None

    @property
    def unattributed_ns(self) -> int:
        return self.wall_ns - self.bricks_ns - sum(self.gaps_ns.values()) + self.overlap_ns

    @property
    def close(self) -> bool:
        """Whether the books close: no layer, brick or gap is larger than the step or node around it."""
        return not (self.over or self.exceeded or self.unattributed_ns < 0)


def books_of(totals: PhaseTotals, whole: PhaseTotals) -> TimeBreakdown | None:
    """Return the books of the phase in `totals`, or None for a process without steps.

    All times are measured. The gaps are `inside layers` (layers without their bricks), `between layers` (layers of
    layers, without the inner ones) and `steps inside` (steps of other phases). If own operations of a layer or of the
    step are a row, they count as a brick instead of a gap. The rest of a step is unattributed. Gaps that cannot occur
    in this process are left out. The time in running steps comes from `whole`, the totals since the process began.
    """
    step = totals.step
    if step is None:
        return None
    closed, stats, table = totals.columns["closed_ns"], totals.stats, totals.table
    kind_of, parent_of = table.column("kind_of"), table.column("parent_of")
    bricks, layers, steps_inside = _parts(totals)
    in_bricks_ns = closed[steps_inside[totals.held[parent_of[steps_inside]]]].sum()
    ids = totals.inside.ids
    holds_layers = np.zeros(len(parent_of), np.bool_)
    holds_layers[parent_of[ids[kind_of[ids] == NodeKind.LAYER]]] = True
    own_ns = int(totals.closed_exclusive_ns[layers[totals.own_rows[layers]]].sum())
    own_ns += int(totals.closed_exclusive_ns[step.id]) if totals.own_rows[step.id] else 0
    layers = layers[~totals.own_rows[layers]]
    gaps_ns: dict[str, int] = {}
    for name, found in (
        (INSIDE_LAYERS, layers[~holds_layers[layers]]),
        (BETWEEN_LAYERS, layers[holds_layers[layers]]),
    ):
        if len(found):
            gaps_ns[name] = int(totals.closed_exclusive_ns[found].sum())
    if len(steps_inside):
        gaps_ns[INNER_STEPS] = int(closed[steps_inside].sum())
    below_zero = ids[~totals.adopted[ids] & (totals.closed_exclusive_ns[ids] < 0)].tolist()
    outdone = [
        (display_name(table[node]), -int(totals.closed_exclusive_ns[node]))
        for node in below_zero
        if table[node].kind in _HOLDERS
    ]
    # A node inside a brick is a part of the brick's time, so leave it out.
    around = ids[~totals.adopted[ids] & ~totals.held[ids]]
    every, adopted = ids.tolist(), ids[kind_of[parent_of[ids]] == NodeKind.ADOPTED].tolist()
    return TimeBreakdown(
        wall_ns=int(closed[step.id]),
        bricks_ns=int(closed[bricks].sum() - in_bricks_ns) + own_ns,
        gaps_ns=gaps_ns,
        overlap_ns=stats.rare("overlap_ns", [step.id, *around.tolist()]),
        open_ns=_open_ns(whole, bricks if whole is totals else _parts(whole)[0]),
        over=stats.rare("over", (step.id,)),
        over_ns=stats.rare("over_ns", (step.id,)),
        exceeded=tuple(sorted(outdone, key=lambda one: -one[1])),
        unmatched_calls=stats.rare("loose", every),
        unmatched_ns=stats.rare("loose_ns", every),
        cancelled=stats.rare("cancelled", (step.id,)),
        in_shared_lane=stats.rare("crowded", (step.id,)),
        adopted=_beside(
            [table[node] for node in adopted],
            {node: totals.count[node] - stats.rare("loose", (node,)) for node in adopted},
            totals.closed_ns if adopted else {},
        ),
    )


def outside_steps(table: NodeTable, stats: NodeStats) -> Beside | None:
    """Return the time of bricks, layers and functions outside of all steps, by the outermost node's name. None
    without any.

    Steps inside such a node are subtracted, because their time is in their own time breakdown.
    """
    stats.grow(len(table) + 1)
    total_ns, count = stats.column("total_ns"), stats.column("count")
    time_ns: dict[int, int] = {}
    nodes = []
    for root in table.children[None]:
        if root.kind in _HOLDERS:
            inside = table.descendants(root.id)
            nodes += [root, *(node for node in inside if _is_adopted(table, node))]
            steps = [node.id for node in inside if node.kind is NodeKind.STEP]
            time_ns[root.id] = int(total_ns[root.id] - total_ns[steps].sum())
    times_ns = {node.id: time_ns.get(node.id, int(total_ns[node.id])) for node in nodes}
    return _beside(nodes, {node.id: int(count[node.id]) for node in nodes}, times_ns)


_HOLDERS = (NodeKind.LAYER, NodeKind.BRICK, NodeKind.FUNCTION)


def _is_adopted(table: NodeTable, node: Node) -> bool:
    """Return whether `node` is the outermost node of work that other threads or tasks did for a step (adopted
    work).
    """
    return node.parent is not None and table[node.parent].kind is NodeKind.ADOPTED


def _beside(nodes: list[Node], count: dict[int, int], time_ns: dict[int, int]) -> Beside | None:
    by_name: dict[str, int] = {}
    calls = 0
    for node in nodes:
        if count[node.id]:
            name = display_name(node)
            by_name[name] = by_name.get(name, 0) + max(0, time_ns[node.id])
            calls += count[node.id]
    if not calls:
        return None
    longest = sorted(by_name.items(), key=lambda one: -one[1])
    return Beside(calls, sum(by_name.values()), tuple(longest))


def _parts(totals: PhaseTotals) -> tuple[Column, Column, Column]:
    """Return three lists of ids in this phase's step: its bricks, its layers outside of bricks, and all steps inside
    it.
    """
    ids = totals.inside.ids[~totals.adopted[totals.inside.ids]]
    kind, parent = totals.table.column("kind_of")[ids], totals.table.column("parent_of")[ids]
    is_step = kind == NodeKind.STEP
    is_outer, is_held = ~is_step & ~totals.held[parent], totals.held[ids]
    return ids[is_outer & is_held], ids[is_outer & ~is_held & (kind == NodeKind.LAYER)], ids[is_step]


def _open_ns(totals: PhaseTotals, bricks: Column) -> int:
    """Return the time of `bricks` in running steps."""
    open_ns = int((totals.columns["total_ns"][bricks] - totals.columns["closed_ns"][bricks]).sum())
    ids = bricks.tolist()
    return open_ns - totals.stats.rare("cancelled_ns", ids) - totals.stats.rare("loose_ns", ids)
