"""The books: where a step's wall time went, with nothing left out and nothing counted twice."""

from __future__ import annotations

from cbtop.profiler.phase_totals import PhaseTotals
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from cbtop.viewmodels.model import BooksView, Gap


def books(totals: PhaseTotals, open_in: PhaseTotals) -> BooksView | None:
    """wall = bricks + gaps + unattributed over the ended steps; None for a process without steps.

    All of it is derived from measured records: a brick's time is its own record, the gap `between bricks` is a
    layer's record less those of its bricks, and what lies in a step outside every layer and brick is unattributed.
    What is in a step that runs now comes from `open_in`, the totals of the whole life.
    """
    if totals.step is None:
        return None
    closed = totals.closed_ns
    outer, layers = _outer(totals)
    wall_ns = closed[totals.step.id]
    bricks_ns = sum(closed[node.id] for node in outer)
    between_ns = sum(totals.own_ns(layer, closed) for layer in layers)
    unattributed_ns = wall_ns - bricks_ns - between_ns
    return BooksView(
        wall_us=wall_ns / 1e3,
        bricks_us=bricks_ns / 1e3,
        gaps=(Gap("between bricks", between_ns / 1e3),),
        gaps_us=between_ns / 1e3,
        unattributed_us=unattributed_ns / 1e3,
        residual_percent=100 * unattributed_ns / wall_ns if wall_ns else None,
        open_us=sum(open_in.total_ns[node.id] - open_in.closed_ns[node.id] for node in outer) / 1e3,
    )


def _outer(totals: PhaseTotals) -> tuple[list[Node], list[Node]]:
    """The bricks that lie in no other brick, and the layers that do not either: what a brick holds is its own."""
    held: set[int] = set()
    bricks, layers = [], []
    for node in totals.nodes:
        if node.parent in held:
            held.add(node.id)
        elif node.kind is NodeKind.BRICK:
            held.add(node.id)
            bricks.append(node)
        elif node.kind is NodeKind.LAYER:
            layers.append(node)
    return bricks, layers
