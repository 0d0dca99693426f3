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
    held: frozenset[int]  # the bricks with time of their own, and what lies in one: that is the brick's
    adopted: frozenset[int]  # what was done elsewhere, beside the time of what it lies in

    @classmethod
    def of(cls, table: NodeTable, stats: NodeStats, phase: str | None) -> PhaseTotals:
        """The phase called `phase`; every node there is when it is None."""
        roots = table.children[None]
        step = next((n for n in roots if n.kind is NodeKind.STEP and display_name(n) == phase), None)
        return cls.below(step, table, stats)

    @classmethod
    def below(cls, step: Node | None, table: NodeTable, stats: NodeStats) -> PhaseTotals:
        """The same, of a step node; every node there is when it is None."""
        nodes = tuple(table.descendants(step.id if step else None))
        stats.grow(len(table) + 1)
        ids = [node.id for node in nodes] + ([step.id] if step else [])

        def column(name: str) -> dict[int, int]:
            return dict(zip(ids, stats.column(name)[ids].tolist(), strict=True))

        total_ns, closed_ns = column("total_ns"), column("closed_ns")
        held: set[int] = set()
        adopted: set[int] = set()
        for node in nodes:
            if node.kind is NodeKind.ADOPTED or node.parent in adopted:
                adopted.add(node.id)
            # A brick without time of its own was never stopped: what lies in it lies in what that one lies in.
            is_timed = node.kind is NodeKind.BRICK and (total_ns[node.id] or closed_ns[node.id])
            if node.kind is not NodeKind.ADOPTED and (node.parent in held or is_timed):
                held.add(node.id)
        return cls(
            step=step,
            nodes=nodes,
            count=column("count"),
            elements=column("elements"),
            total_ns=total_ns,
            closed_ns=closed_ns,
            table=table,
            stats=stats,
            held=frozenset(held),
            adopted=frozenset(adopted),
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

    def percent(self, closed_ns: int, adopted_ns: int = 0) -> float | None:
        """A share of the phase's step wall time, for time in ended steps; None where all of it was `adopted_ns`."""
        if adopted_ns and not closed_ns:
            return None
        return 100 * closed_ns / self.wall_ns if self.wall_ns else None

    def us_per_token(self, closed_ns: int) -> float | None:
        """Time a token, for time that lies in ended steps."""
        return closed_ns / self.tokens / 1e3 if self.tokens else None

    def exclusive_ns(self, node: Node, of: dict[int, int]) -> int:
        """The time of `node` in the column `of`, less what lies inside it and is shown for itself.

        For a brick that is other bricks and steps (its kernels, and layers it holds, are its own work); else
        everything. What was done elsewhere ran beside it.
        """
        inside = self._inside(node.id, of, is_brick=node.kind is NodeKind.BRICK)
        return of[node.id] - sum(self._nested_ns(child, of) for child in inside)

    def open_ns(self, node: Node) -> int:
        """The time of `node` that lies in a step which has not ended."""
        loose_ns = self.stats.rare("loose_ns", (node.id,))
        return (
            self.total_ns[node.id] - self.closed_ns[node.id] - self.stats.rare("cancelled_ns", (node.id,)) - loose_ns
        )

    def _nested_ns(self, node: Node, of: dict[int, int]) -> int:
        """The time of `node` that lies inside of what it was started in."""
        return of[node.id] - (self.stats.rare("loose_ns", (node.id,)) if of is self.total_ns else 0)

    def _inside(self, node: int, of: dict[int, int], *, is_brick: bool) -> list[Node]:
        found: list[Node] = []
        for child in self.table.children[node]:
            if child.kind is NodeKind.ADOPTED:
                continue
            if child.kind is NodeKind.BRICK:
                is_other = bool(of[child.id])  # one that was never stopped has no time of its own
            else:
                is_other = not is_brick or child.kind is NodeKind.STEP
            found += [child] if is_other else self._inside(child.id, of, is_brick=is_brick)
        return found
