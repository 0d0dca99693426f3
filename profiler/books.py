"""The books of a phase: where its steps' wall time went, what stands beside it, and whether that can be true."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.profiler.graph.node_table import NodeTable
from cbtop.profiler.graph.nodes import display_name
from cbtop.profiler.phase_totals import PhaseTotals
from cbtop.profiler.stats import NodeStats
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind

INSIDE_LAYERS, BETWEEN_LAYERS, INNER_STEPS = "inside layers", "between layers", "steps inside"
_GAPS = (INSIDE_LAYERS, BETWEEN_LAYERS, INNER_STEPS)


@dataclass(frozen=True, slots=True)
class Beside:
    """Time that is no part of any step's wall time: calls, their times added up, and by name the longest first.

    Calls that ran at the same time count as long as each of them took.
    """

    calls: int
    time_ns: int
    by_name: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Books:
    """wall = bricks + gaps + unattributed, over the ended steps of a phase. The rest stands beside that.

    They close unless what lay in a step took longer than it (`over_ns`, in `over` steps), or what lay in a layer or
    brick longer than that (`outdone`: which, and by how much): then no share of the wall time can be trusted.
    """

    wall_ns: int
    bricks_ns: int
    gaps_ns: dict[str, int]
    open_ns: int  # in a step that has not ended
    over: int
    over_ns: int
    outdone: tuple[tuple[str, int], ...]
    loose: int  # calls stopped twice, out of order or after their step
    loose_ns: int
    cancelled: int  # steps cancelled, or given another name inside: their bricks are in no books
    crowded: int  # steps that ran beside fifteen others: whose bricks were theirs is not known
    adopted: Beside | None  # in other threads or tasks, for these steps

    @property
    def unattributed_ns(self) -> int:
        return self.wall_ns - self.bricks_ns - sum(self.gaps_ns.values())

    @property
    def close(self) -> bool:
        """Whether no part is larger than what it is a part of."""
        return not (self.over or self.outdone or self.unattributed_ns < 0)


def books_of(totals: PhaseTotals, whole: PhaseTotals) -> Books | None:
    """The books of the phase `totals` is of; None for a process without steps.

    All of it is derived from measured records: a brick's time is its own record; the gap `inside layers` is the
    records of layers less those of the bricks in them, `between layers` those of layers that hold layers less these;
    `steps inside` are steps of a phase of their own that ran in one of these; what lies in a step outside of all that
    is unattributed. Only the gaps that this process can have are there. What is in a step that runs now comes from
    `whole`, the totals of the whole life.
    """
    step = totals.step
    if step is None:
        return None
    closed, stats = totals.closed_ns, totals.stats
    bricks, layers, steps_inside = _parts(totals)
    in_bricks_ns = sum(closed[node.id] for node in steps_inside if node.parent in totals.held)
    gaps_ns: dict[str, int] = {}
    for layer in layers:
        holds_layers = any(child.kind is NodeKind.LAYER for child in totals.table.children[layer.id])
        name = BETWEEN_LAYERS if holds_layers else INSIDE_LAYERS
        gaps_ns[name] = gaps_ns.get(name, 0) + totals.exclusive_ns(layer, closed)
    if steps_inside:
        gaps_ns[INNER_STEPS] = sum(closed[node.id] for node in steps_inside)
    ids = [node.id for node in totals.nodes]
    own = [node for node in totals.nodes if node.id not in totals.adopted]
    outdone = [(display_name(node), -totals.exclusive_ns(node, closed)) for node in own if node.kind in _HOLDERS]
    return Books(
        wall_ns=closed[step.id],
        bricks_ns=sum(closed[node.id] for node in bricks) - in_bricks_ns,
        gaps_ns={name: gaps_ns[name] for name in _GAPS if name in gaps_ns},
        open_ns=sum(whole.open_ns(node) for node in (bricks if whole is totals else _parts(whole)[0])),
        over=stats.rare("over", (step.id,)),
        over_ns=stats.rare("over_ns", (step.id,)),
        outdone=tuple(sorted(((name, ns) for name, ns in outdone if ns > 0), key=lambda one: -one[1])),
        loose=stats.rare("loose", ids),
        loose_ns=stats.rare("loose_ns", ids),
        cancelled=stats.rare("cancelled", (step.id,)),
        crowded=stats.rare("crowded", (step.id,)),
        adopted=_beside(
            [node for node in totals.nodes if _is_adopted(totals.table, node)],
            {id_: count - stats.rare("loose", (id_,)) for id_, count in totals.count.items()},
            closed,
        ),
    )


def outside_steps(table: NodeTable, stats: NodeStats) -> Beside | None:
    """What ran outside of every step, by the name of the outermost brick, layer or function; None where nothing did.

    Steps that ran inside of that are left out: their time is in their own books.
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
    """Whether `node` is the outermost of what was done elsewhere."""
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


def _parts(totals: PhaseTotals) -> tuple[list[Node], list[Node], list[Node]]:
    """The bricks and the layers that lie in no other brick (what a brick holds is its own), and the steps inside."""
    bricks, layers, steps = [], [], []
    for node in totals.nodes:
        if node.id in totals.adopted:
            continue
        if node.kind is NodeKind.STEP:
            steps.append(node)
        elif node.parent not in totals.held:
            if node.id in totals.held:
                bricks.append(node)
            elif node.kind is NodeKind.LAYER:
                layers.append(node)
    return bricks, layers, steps
