"""The books: where a step's wall time went, with nothing left out and nothing counted twice."""

from __future__ import annotations

from cbtop.profiler.phase_totals import PhaseTotals
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from cbtop.viewmodels.model import BooksView, Gap

INSIDE_LAYERS, BETWEEN_LAYERS = "inside layers", "between layers"


def books(totals: PhaseTotals, open_in: PhaseTotals) -> BooksView | None:
    """wall = bricks + gaps + unattributed over the ended steps; None for a process without steps.

    All of it is derived from measured records: a brick's time is its own record; the gap `inside layers` is the
    records of layers less those of the bricks in them, `between layers` those of layers that hold layers less these;
    what lies in a step outside every layer and brick is unattributed. Only the gaps that this process's layers can
    show are there. What is in a step that runs now comes from `open_in`, the totals of the whole life.
    """
    if totals.step is None:
        return None
    closed = totals.closed_ns
    outer, layers = _outer(totals)
    wall_ns = closed[totals.step.id]
    bricks_ns = sum(closed[node.id] for node in outer)
    gaps_ns: dict[str, int] = {}
    for layer in layers:
        holds_layers = any(child.kind is NodeKind.LAYER for child in totals.table.children[layer.id])
        name = BETWEEN_LAYERS if holds_layers else INSIDE_LAYERS
        gaps_ns[name] = gaps_ns.get(name, 0) + totals.exclusive_ns(layer, closed)
    cancelled_ns = open_in.stats.rare("cancelled_ns", [node.id for node in outer])
    unattributed_ns = wall_ns - bricks_ns - sum(gaps_ns.values())
    return BooksView(
        wall_us=wall_ns / 1e3,
        bricks_us=bricks_ns / 1e3,
        gaps=tuple(Gap(name, gaps_ns[name] / 1e3) for name in (INSIDE_LAYERS, BETWEEN_LAYERS) if name in gaps_ns),
        gaps_us=sum(gaps_ns.values()) / 1e3,
        unattributed_us=unattributed_ns / 1e3,
        residual_percent=100 * unattributed_ns / wall_ns if wall_ns else None,
        open_us=(sum(open_in.total_ns[node.id] - open_in.closed_ns[node.id] for node in outer) - cancelled_ns) / 1e3,
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
