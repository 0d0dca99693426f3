"""The nodes and totals of one phase: the plain numbers that statistics, books and graphs are made of."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.profiler.graph.node_table import NodeTable
from cbtop.profiler.stats import NodeStats
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """What lies below one step node (or everything, for a process without steps), and its totals.

    `exclusive_ns` of a node is its total less that of the nodes directly inside it.
    """

    step: Node | None
    nodes: tuple[Node, ...]  # a parent before its children, the step itself not among them
    count: dict[int, int]
    elements: dict[int, int]
    total_ns: dict[int, int]
    exclusive_ns: dict[int, int]
    closed_ns: dict[int, int]
    table: NodeTable
    stats: NodeStats

    @classmethod
    def of(cls, table: NodeTable, stats: NodeStats, phase: str | None) -> PhaseTotals:
        """The phase called `phase`; every node there is when it is None."""
        roots = table.children[None]
        step = next((n for n in roots if n.kind is NodeKind.STEP and n.name == phase), None)
        nodes = tuple(table.below(step.id if step else None))
        stats.grow(len(table) + 1)
        ids = [node.id for node in nodes] + ([step.id] if step else [])

        def column(name: str) -> dict[int, int]:
            return dict(zip(ids, stats.column(name)[ids].tolist(), strict=True))

        total_ns = column("total_ns")
        exclusive_ns = dict(total_ns)
        for node in nodes:
            if node.parent is not None:
                exclusive_ns[node.parent] -= total_ns[node.id]
        return cls(
            step=step,
            nodes=nodes,
            count=column("count"),
            elements=column("elements"),
            total_ns=total_ns,
            exclusive_ns=exclusive_ns,
            closed_ns=column("closed_ns"),
            table=table,
            stats=stats,
        )

    @property
    def tokens(self) -> int | None:
        """Tokens of the phase: the elements of its steps. None without steps."""
        return self.elements[self.step.id] if self.step else None

    @property
    def wall_ns(self) -> int | None:
        """The wall time of the phase's ended steps. None without steps."""
        return self.total_ns[self.step.id] if self.step else None

    def percent(self, exclusive_ns: int) -> float | None:
        """A share of the phase's step wall time."""
        return 100 * exclusive_ns / self.wall_ns if self.wall_ns else None
