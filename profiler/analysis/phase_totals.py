"""The nodes that ran in one phase, and their totals. Statistics, graphs and time breakdowns are computed from
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.graph.node_table import Inside, NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.histograms import Column
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind

# A module's own operations are a row if they take at least this percentage of the phase's time. In models with small
# modules, calls of children and cbtop's stamps around them take 0.1 to 0.7 percent.
LEAST_OWN_PERCENT = 1.0


@dataclass(frozen=True)
class PhaseTotals:
    """The nodes inside one step node, and their totals. In a process without steps, all nodes.

    Only recorded steps count, because the bricks of plain steps are unknown. `closed_ns` is the part of `total_ns` in
    ended steps.

    The exclusive time of a brick is its time without inner bricks and steps. Its kernels and layers are its own work.
    The exclusive time of any other node is its time without all inner nodes. Adopted work ran in parallel and is
    never subtracted.

    Own operations are a row if they take LEAST_OWN_PERCENT. For a layer, and for a step that is a model's call, they
    take its exclusive time. A brick of own operations with less time has no calls and no time here.
    """

    step: Node | None
    inside: Inside  # the nodes inside the step, without the step
    table: NodeTable
    stats: NodeStats
    # Arrays by node id. Only entries of the phase's nodes are valid.
    columns: dict[str, Column]  # count, elements, total_ns, closed_ns, loose_ns, overlap_ns
    held: NDArray[np.bool_]  # mask of bricks with time, and of all nodes inside them
    adopted: NDArray[np.bool_]  # mask of adopted work, which is not in the parent's time
    own_rows: NDArray[np.bool_]  # mask of layers (outside of bricks) and steps whose own operations are a row
    small_own: Column  # ids of own operations that take too little time to be a row

    @classmethod
    def of(cls, table: NodeTable, stats: NodeStats, phase: str | None) -> PhaseTotals:
        """Return the totals of the phase called `phase`, or of all nodes if `phase` is None."""
        roots = table.children[None]
        step = next((n for n in roots if n.kind is NodeKind.STEP and display_name(n) == phase), None)
        return cls.below(step, table, stats)

    @classmethod
    def below(cls, step: Node | None, table: NodeTable, stats: NodeStats, *, hides_small: bool = True) -> PhaseTotals:
        """Return the totals below the node `step` (None: of all nodes).

        If `hides_small` is False, even small own operations are rows.
        """
        inside = table.inside(step.id if step else None)
        size = len(table) + 1
        stats.grow(size)
        columns = {name: stats.of_recorded(name)[:size] for name in ("count", "elements", "total_ns")}
        columns["closed_ns"] = stats.column("closed_ns")[:size].copy()
        columns["loose_ns"] = stats.sparse.dense("loose_ns", len(stats))[:size]
        columns["overlap_ns"] = stats.sparse.dense("overlap_ns", len(stats))[:size]
        total_ns, closed_ns = columns["total_ns"], columns["closed_ns"]
        is_row = _own_rows(step, table, inside, columns) if hides_small else table.column("has_own") > 0
        small = inside.ids[(table.column("kind_of") == NodeKind.BRICK)[inside.ids] & ~is_row[inside.ids]]
        small = small[table.column("has_own")[small] > 0]
        for name in columns:
            columns[name][small] = 0
        # A brick without time was never stopped. The nodes inside it count for the node around it.
        held, adopted = _held_and_adopted(table, inside, (total_ns > 0) | (closed_ns > 0))
        return cls(
            step=step,
            inside=inside,
            table=table,
            stats=stats,
            columns=columns,
            held=held,
            adopted=adopted,
            small_own=small,
            own_rows=is_row & (table.column("kind_of") != NodeKind.BRICK) & ~held & ~adopted,
        )

    @cached_property
    def exclusive_ns(self) -> Column:
        """The exclusive time of each node, from `total_ns`, by node id."""
        total_ns = self.columns["total_ns"]
        nested_ns = total_ns - self.columns["loose_ns"]
        return self._without_small(
            exclusive_of(self.table, self.inside, total_ns, nested_ns, self.columns["overlap_ns"])
        )

    @cached_property
    def closed_exclusive_ns(self) -> Column:
        """The exclusive time of each node, from `closed_ns`, by node id."""
        closed_ns = self.columns["closed_ns"]
        return self._without_small(
            exclusive_of(self.table, self.inside, closed_ns, closed_ns, self.columns["overlap_ns"])
        )

    def _without_small(self, exclusive_ns: Column) -> Column:
        exclusive_ns[self.small_own] = 0
        return exclusive_ns

    @cached_property
    def count(self) -> dict[int, int]:
        """The number of calls of each node and of the step, by node id."""
        return self._by_node("count")

    @cached_property
    def elements(self) -> dict[int, int]:
        return self._by_node("elements")

    @cached_property
    def total_ns(self) -> dict[int, int]:
        return self._by_node("total_ns")

    @cached_property
    def closed_ns(self) -> dict[int, int]:
        return self._by_node("closed_ns")

    def _by_node(self, name: str) -> dict[int, int]:
        ids = self.inside.ids if self.step is None else np.append(self.inside.ids, self.step.id)
        return dict(zip(ids.tolist(), self.columns[name][ids].tolist(), strict=True))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes inside this phase's step, parents first."""
        return self.inside.nodes

    @property
    def known_elements(self) -> dict[int, int]:
        """The number of elements of each node, by node id, if it is known."""
        unknown = self.stats.sparse["uncounted"].keys()
        return {node: n for node, n in self.elements.items() if node not in unknown} if unknown else self.elements

    @property
    def tokens(self) -> int | None:
        """The number of tokens of the phase's steps. None without steps, or if a step's tokens are unknown."""
        if self.step is None:
            return None
        all_of_them, plain = (self.stats.rare(name, (self.step.id,)) for name in ("uncounted", "plain_uncounted"))
        if all_of_them > plain:
            return None
        return int(self.columns["elements"][self.step.id])

    @property
    def wall_ns(self) -> int | None:
        """The wall time in ns of the phase's ended steps, or None without steps."""
        return int(self.columns["total_ns"][self.step.id]) if self.step else None

    def percent(self, closed_ns: int, adopted_ns: int = 0) -> float | None:
        """Return `closed_ns` in percent of the phase's wall time. None if there is only adopted time.

        Both arguments are times in ended steps.
        """
        if adopted_ns and not closed_ns:
            return None
        return 100 * closed_ns / self.wall_ns if self.wall_ns else None

    def us_per_token(self, closed_ns: int) -> float | None:
        """Return the time per token in µs. `closed_ns` is a time in ended steps."""
        return closed_ns / self.tokens / 1e3 if self.tokens else None


def _own_rows(step: Node | None, table: NodeTable, inside: Inside, columns: dict[str, Column]) -> NDArray[np.bool_]:
    """Return a mask by node id: the own operations that are a row.

    Nodes with the same name become one row if together they take LEAST_OWN_PERCENT of the time. `columns` are those
    of `PhaseTotals`.
    """
    found = np.zeros(len(table) + 1, np.bool_)
    ids = inside.ids if step is None else np.append(inside.ids, step.id)
    ids = ids[table.column("has_own")[ids] > 0]
    ids = ids[columns["count"][ids] > 0]
    if not len(ids):
        return found
    total_ns = columns["total_ns"]
    nested_ns = total_ns - columns["loose_ns"]
    own_ns = exclusive_of(table, inside, total_ns, nested_ns, columns["overlap_ns"])[ids]
    whole_ns = int(total_ns[step.id]) if step else int(total_ns[[node.id for node in table.children[None]]].sum())

    def names() -> NDArray[np.int64]:
        _, which = np.unique([f"{table[node].kind} {table[node].own}" for node in ids.tolist()], return_inverse=True)
        return which

    which = table.made_of("own", step.id if step else None, ids, names)
    found[ids] = (np.bincount(which, weights=own_ns) >= LEAST_OWN_PERCENT / 100 * max(1, whole_ns))[which]
    return found


def _held_and_adopted(
    table: NodeTable, inside: Inside, is_timed: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return two masks by node id: bricks in `is_timed`, and adopted work (done by other threads or tasks).

    Both include all nodes inside.
    """
    parent_of, kind_of = table.column("parent_of"), table.column("kind_of")
    held, adopted = np.zeros_like(is_timed), np.zeros_like(is_timed)
    for ids in inside.by_depth:
        parent, kind = parent_of[ids], kind_of[ids]
        is_adopted = kind == NodeKind.ADOPTED
        adopted[ids] = is_adopted | adopted[parent]
        held[ids] = ~is_adopted & (held[parent] | ((kind == NodeKind.BRICK) & is_timed[ids]))
    return held, adopted


def exclusive_of(table: NodeTable, inside: Inside, time_ns: Column, nested_ns: Column, overlap_ns: Column) -> Column:
    """Return the exclusive time of each node by node id: `time_ns` without nodes inside it.

    From a brick, the bricks and steps inside it are subtracted. From other nodes, all nodes inside. What is
    subtracted is their `nested_ns`. If nodes overlap, the parent's `overlap_ns` is added back, so that nothing is
    subtracted twice.
    """
    parent_of, kind_of = table.column("parent_of"), table.column("kind_of")
    # What to subtract from each node, by node id: `in_brick` from bricks, `in_other` from other nodes.
    in_brick, in_other = -overlap_ns, -overlap_ns
    for ids in reversed(inside.by_depth):
        parent, kind = parent_of[ids], kind_of[ids]
        is_brick = kind == NodeKind.BRICK
        is_own = np.where(is_brick, time_ns[ids] != 0, kind == NodeKind.STEP)
        for inside_ns, is_shown in ((in_brick, is_own), (in_other, is_own | ~is_brick)):
            outside_ns = np.where(is_shown, nested_ns[ids], inside_ns[ids])
            outside_ns[kind == NodeKind.ADOPTED] = 0
            np.add.at(inside_ns, parent, outside_ns)
    found: Column = time_ns - np.where(kind_of == NodeKind.BRICK, in_brick, in_other)
    return found
