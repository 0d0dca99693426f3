"""The node table and totals of one phase: the plain numbers the other viewmodels add up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cbtop.profiler.stats import NodeStats
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from cbtop.store import SourceRecord


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """What lies below one step node (or everything, for a process without steps), and its totals.

    `exclusive_ns` of a node is its total less that of the nodes directly inside it.
    """

    step: Node | None
    nodes: tuple[Node, ...]  # a parent before its children, the step itself not among them
    count: dict[int, int]
    failed: dict[int, int]
    elements: dict[int, int]
    total_ns: dict[int, int]
    exclusive_ns: dict[int, int]
    closed_ns: dict[int, int]
    min_ns: dict[int, int]
    max_ns: dict[int, int]
    stats: NodeStats

    @classmethod
    def of(cls, record: SourceRecord, phase: str | None) -> PhaseTotals:
        """The phase called `phase`; everything that is not inside a step when it is None."""
        roots = record.nodes.children[None]
        step = next((n for n in roots if n.kind is NodeKind.STEP and n.name == phase), None)
        nodes = tuple(record.nodes.below(step.id if step else None))
        record.stats.grow(len(record.nodes) + 1)
        ids = [node.id for node in nodes] + ([step.id] if step else [])

        def column(name: str) -> dict[int, int]:
            return dict(zip(ids, record.stats.column(name)[ids].tolist(), strict=True))

        total_ns = column("total_ns")
        exclusive_ns = dict(total_ns)
        for node in nodes:
            if node.parent is not None:
                exclusive_ns[node.parent] -= total_ns[node.id]
        return cls(
            step=step,
            nodes=nodes,
            count=column("count"),
            failed=column("failed"),
            elements=column("elements"),
            total_ns=total_ns,
            exclusive_ns=exclusive_ns,
            closed_ns=column("closed_ns"),
            min_ns=column("min_ns"),
            max_ns=column("max_ns"),
            stats=record.stats,
        )

    @property
    def tokens(self) -> int | None:
        """Tokens of the phase: the elements of its steps. None without steps."""
        return self.elements[self.step.id] if self.step else None

    @property
    def wall_ns(self) -> int | None:
        """The time of the phase's ended steps. None without steps."""
        return self.total_ns[self.step.id] if self.step else None

    def percent(self, exclusive_ns: int) -> float | None:
        """A share of the phase's step wall time."""
        return 100 * exclusive_ns / self.wall_ns if self.wall_ns else None

    def percentile_us(self, nodes: Iterable[Node], fraction: float) -> float | None:
        """A percentile over all calls of `nodes`."""
        found = self.stats.percentile_ns([node.id for node in nodes], fraction)
        return None if found is None else found / 1e3
