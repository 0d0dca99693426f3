"""The nodes and totals of one phase: the plain numbers that statistics, books and graphs are made of."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.profiler.graph.node_table import NodeTable
from cbtop.profiler.graph.nodes import display_name
from cbtop.profiler.stats import NodeStats
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """What lies below one step node (or everything, for a process without steps), and its totals.

    `closed_ns` is the part of `total_ns` that lies in steps that have ended.
    """

    step: Node | None
    nodes: tuple[Node, ...]  # a parent before its children, the step itself not among them
    count: dict[int, int]
    elements: dict[int, int]
    total_ns: dict[int, int]
    closed_ns: dict[int, int]
    table: NodeTable
    stats: NodeStats

    @classmethod
    def of(cls, table: NodeTable, stats: NodeStats, phase: str | None) -> PhaseTotals:
        """The phase called `phase`; every node there is when it is None."""
        roots = table.children[None]
        step = next((n for n in roots if n.kind is NodeKind.STEP and display_name(n) == phase), None)
        nodes = tuple(table.descendants(step.id if step else None))
        stats.grow(len(table) + 1)
        ids = [node.id for node in nodes] + ([step.id] if step else [])

        def column(name: str) -> dict[int, int]:
            return dict(zip(ids, stats.column(name)[ids].tolist(), strict=True))

        return cls(
            step=step,
            nodes=nodes,
            count=column("count"),
            elements=column("elements"),
            total_ns=column("total_ns"),
            closed_ns=column("closed_ns"),
            table=table,
            stats=stats,
        )

    @property
    def known_elements(self) -> dict[int, int]:
        """The elements of the nodes whose calls all gave a count."""
        return {node: n for node, n in self.elements.items() if not self.stats.rare("uncounted", (node,))}

    @property
    def tokens(self) -> int | None:
        """Tokens of the phase: the elements of its steps. None without steps, or where a step gave no count."""
        return self.known_elements.get(self.step.id) if self.step else None

    @property
    def wall_ns(self) -> int | None:
        """The wall time of the phase's ended steps. None without steps."""
        return self.total_ns[self.step.id] if self.step else None

    def percent(self, closed_ns: int) -> float | None:
        """A share of the phase's step wall time, for time that lies in ended steps."""
        return 100 * closed_ns / self.wall_ns if self.wall_ns else None

    def us_per_token(self, closed_ns: int) -> float | None:
        """Time a token, for time that lies in ended steps."""
        return closed_ns / self.tokens / 1e3 if self.tokens else None

    def exclusive_ns(self, node: Node, of: dict[int, int]) -> int:
        """The time of `node` in the column `of`, less what lies inside it and is shown for itself.

        For a brick that is other bricks (its kernels, and layers it holds, are its own work); else everything.
        """
        inside = self._bricks_in(node) if node.kind is NodeKind.BRICK else self.table.children[node.id]
        return of[node.id] - sum(of[child.id] for child in inside)

    def _bricks_in(self, node: Node) -> list[Node]:
        found: list[Node] = []
        for child in self.table.children[node.id]:
            found += [child] if child.kind is NodeKind.BRICK else self._bricks_in(child)
        return found
