"""The books: where a step's wall time went, with nothing left out and nothing counted twice."""

from __future__ import annotations

from cbtop.profiler.phase_totals import PhaseTotals
from cbtop.protocol.vocabulary import NodeKind
from cbtop.viewmodels.model import BooksView, Gap


def books(totals: PhaseTotals) -> BooksView | None:
    """wall = bricks + gaps + unattributed over the ended steps; None for a process without steps.

    All of it is derived from measured records: a brick's time is its own record, the gap `between bricks` is a
    layer's record less those of its bricks, and what lies in a step outside every layer and brick is unattributed.
    """
    if totals.step is None:
        return None
    closed = totals.closed_ns
    kinds = {node.id: node.kind for node in totals.nodes} | {totals.step.id: NodeKind.STEP}
    outer = [n for n in totals.nodes if n.kind is NodeKind.BRICK and not _inside_brick(n.parent, kinds)]
    wall_ns = closed[totals.step.id]
    bricks_ns = sum(closed[node.id] for node in outer)
    between_ns = _own_ns(totals, NodeKind.LAYER)
    unattributed_ns = wall_ns - bricks_ns - between_ns
    return BooksView(
        wall_us=wall_ns / 1e3,
        bricks_us=bricks_ns / 1e3,
        gaps=(Gap("between bricks", between_ns / 1e3),),
        gaps_us=between_ns / 1e3,
        unattributed_us=unattributed_ns / 1e3,
        residual_percent=100 * unattributed_ns / wall_ns if wall_ns else None,
        open_us=sum(totals.total_ns[node.id] - closed[node.id] for node in outer) / 1e3,
    )


def _own_ns(totals: PhaseTotals, kind: NodeKind) -> int:
    """The closed time of all nodes of `kind`, less that of the nodes directly inside them."""
    own = {node.id: totals.closed_ns[node.id] for node in totals.nodes if node.kind is kind}
    for node in totals.nodes:
        if node.parent in own:
            own[node.parent] -= totals.closed_ns[node.id]
    return sum(own.values())


def _inside_brick(parent: int | None, kinds: dict[int, NodeKind]) -> bool:
    return parent is not None and kinds[parent] is NodeKind.BRICK
