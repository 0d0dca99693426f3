"""The statistics of one source, and the messages that update a viewer's copy of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cbtop.profiler.analysis.graph.node_table import MAX_NODES, NodeTable
from cbtop.profiler.analysis.histograms import MAX_CELLS, Column, distinct
from cbtop.profiler.analysis.node_columns import ANY_STEP, COLUMNS
from cbtop.profiler.analysis.stats import NodeStats, sane
from cbtop.profiler.analysis.step_intervals import MAX_SAID_INTERVALS
from cbtop.protocol.columns import pack_columns
from cbtop.protocol.messages import Packed, StatsUpdate
from cbtop.protocol.ring import LANE_SHIFT, LANES, NO_NODE
from cbtop.protocol.ring_reader import Batch

# With more nodes, calls may have no node because the table is full. Then even whole steps are not recorded.
NEARLY_FULL = MAX_NODES - 1000


class Totals:
    """Adds up the records of one source, and counts the lost ones."""

    def __init__(self) -> None:
        self.stats = NodeStats()
        self.received = self.overwritten = self.before_attach = self.rejected = 0
        self.without_node = 0  # rejected records of calls that are too deep to have a node
        self.last = NO_NODE, 0  # node id and lane of the newest record
        self._sequence = 0
        self._changed_nodes: list[Column] = []
        self._changed_cells: list[Column] = []
        # begin (ns) of the earliest record since the last call of `changes`
        self._changed_from_ns: int | None = None

    def sift(self, batch: Batch, nodes: NodeTable) -> Batch:
        """Return the valid records of `batch`. Count the invalid and the lost records."""
        self.overwritten += batch.overwritten
        if not self.received and not self.rejected:
            self.before_attach = self.overwritten
        if not len(batch.node):
            return batch
        good = sane(batch, len(nodes))
        self.rejected += int(len(good) - good.sum())
        if len(nodes) < NEARLY_FULL:
            self.without_node += int(((batch.node == NO_NODE) & (batch.end_ns > 0)).sum())
        if not good.all():
            batch = batch.only(good)
        self.received += len(batch.node)
        return batch

    def add(self, batch: Batch, nodes: NodeTable) -> None:
        """Add the valid records of `batch` to the statistics."""
        if len((calls := batch.calls()).node):
            self.last = int(calls.node[-1]), int(calls.flags[-1]) >> LANE_SHIFT & LANES - 1
            first_ns, known_ns = int(calls.start_ns.min()), self._changed_from_ns
            self._changed_from_ns = first_ns if known_ns is None else min(first_ns, known_ns)
        self.stats.grow(len(nodes) + 1)
        changed_nodes, changed_cells = self.stats.add(batch, *nodes.columns())
        self._changed_nodes.append(changed_nodes)
        self._changed_cells.append(changed_cells)

    def changes(self, source: str, read_ns: int) -> Iterator[StatsUpdate]:
        """Yield updates of `source` with the changes since the last call. The ring was read at `read_ns`."""
        if not self._changed_nodes:
            return
        node = distinct(np.concatenate(self._changed_nodes))
        cells = distinct(np.concatenate(self._changed_cells))
        yield from self._updates(source, read_ns, node, cells, self._changed_from_ns)
        self._changed_from_ns = None
        self._changed_nodes.clear()
        self._changed_cells.clear()

    def everything(self, source: str, read_ns: int) -> Iterator[StatsUpdate]:
        """Yield updates of `source` with all statistics. The ring was read at `read_ns`."""
        node, cells = self.stats.nodes_with_records(), self.stats.all_buckets()
        yield from self._updates(source, read_ns, node, cells, 0)

    def _updates(
        self, source: str, read_ns: int, node: Column, cell: Column, ran_from_ns: int | None
    ) -> Iterator[StatsUpdate]:
        """Yield updates of the nodes in `node`, the histogram cells in `cell` (ascending), and the intervals of
        steps.
        """
        yield self._update(source, read_ns, node, cell[:MAX_CELLS], ran_from_ns)
        for at in range(MAX_CELLS, len(cell), MAX_CELLS):
            yield self._update(source, read_ns, node[:0], cell[at : at + MAX_CELLS], None)

    def _update(self, source: str, read_ns: int, node: Column, cell: Column, ran_from_ns: int | None) -> StatsUpdate:
        self._sequence += 1
        columns = {name: _bytes(self.stats.column(name)[node]) for name in COLUMNS}
        rare = self.stats.sparse.values_of(node.tolist())
        ran = () if ran_from_ns is None else self.stats.intervals.since(ran_from_ns, MAX_SAID_INTERVALS)
        return StatsUpdate(
            source=source,
            sequence=self._sequence,
            monotonic_ns=read_ns,
            received=self.received,
            node=_bytes(node),
            cells=Packed(pack_columns((np.diff(cell, prepend=0), self.stats.buckets(cell)))),
            rare_node=_bytes(rare[0]),
            rare_column=_bytes(rare[1]),
            rare_value=rare[2].astype("<f8", copy=False).tobytes(),
            steps_ns=self.stats.sparse["union_ns"].get(ANY_STEP),
            first_ns=self.stats.sparse["first_ns"].get(ANY_STEP),
            ran=Packed(pack_columns(ran) if ran else b""),
            **columns,
        )


def _bytes(column: Column) -> bytes:
    return column.astype("<i8", copy=False).tobytes()
