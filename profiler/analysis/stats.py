"""The sums of each node since the process began, in columns. The daemon computes them from records, and sends them to
viewers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.calls import PERCENTILES, Calls, spread
from cbtop.profiler.analysis.growth import Growth
from cbtop.profiler.analysis.histograms import BUCKETS, Column, Histograms, bucket_middle_ns, bucket_of, distinct
from cbtop.profiler.analysis.node_columns import ANY_STEP, COLUMNS, NO_MINIMUM, NO_TOTALS, SPARSE_COLUMNS, SUMS
from cbtop.profiler.analysis.running_steps import RunningSteps
from cbtop.profiler.analysis.sparse_columns import SparseColumns
from cbtop.profiler.analysis.special_records import leave_out_cancelled, take_amounts, take_loose, take_plain
from cbtop.profiler.analysis.step_intervals import StepIntervals
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_FAILED, FLAG_LOOSE, FLAG_UNCOUNTED, UNKNOWN_AMOUNT
from cbtop.protocol.ring_reader import Batch

# Only this many nodes have their own histogram. All further nodes share one histogram per name and phase. So
# percentiles of the brick are known, but not of each node.
MAX_HISTOGRAM_NODES = 8_192

_ROW_OF = {name: at for at, name in enumerate(COLUMNS)}
_SUM_ROWS = np.array([[_ROW_OF[name]] for name in SUMS])
_OF_PLAIN = {"count": "plain", "total_ns": "plain_ns", "elements": "plain_tokens"}
SANE = 1 << 62  # two times or counts below this limit can be added without overflow
_ENDS = ("min_ns", "max_ns")
# The minimum and maximum of an unknown duration. No real duration has these values.
_UNKNOWN_MINIMUM, _UNKNOWN_MAXIMUM = -1, np.iinfo(np.int64).max
_NONE, _FIRST = np.zeros(0, np.int64), np.zeros(1, np.int64)


def sane(batch: Batch, nodes: int) -> NDArray[np.bool_]:
    """Return a mask of the valid records.

    Their node ids are from 1 to `nodes`, and their start is between 0 and their end. Records of amounts have no start
    and end.
    """
    duration = batch.end_ns - batch.start_ns
    amounts = batch.are(FLAG_AMOUNTS)  # a record of amounts has FLOP and bytes in the fields for start and end
    is_given = (batch.start_ns >= UNKNOWN_AMOUNT) & (batch.end_ns >= UNKNOWN_AMOUNT)
    good: NDArray[np.bool_] = (batch.node >= 1) & (batch.node <= nodes)
    good &= np.where(amounts, is_given, (batch.start_ns >= 0) & (batch.start_ns <= batch.end_ns) & (duration < SANE))
    good &= (batch.elements >= 0) & (batch.elements < SANE)
    return good


class NodeStats:
    """Statistics with one row per node id. Rows are added as ids appear. Columns are named as in `StatsUpdate`."""

    def __init__(self) -> None:
        self._size = 0
        self._table = np.zeros((len(COLUMNS), 0), np.int64)
        self._histograms = Histograms()
        # For nodes that share a histogram: the first node of their name and phase -> the node that has the histogram.
        self._shared: dict[int, int] = {}
        self.sparse = SparseColumns()
        # In a table of the latest counts (`recent_part`): the table of all counts. Its min_ns and max_ns limit the
        # estimates here.
        self._whole: NodeStats | None = None
        self.intervals = StepIntervals()
        self.running = RunningSteps()

    def __len__(self) -> int:
        """Return the number of rows: the highest node id plus one."""
        return self._size

    def column(self, name: str) -> Column:
        """Return a view of a column by node id. Without records, a node has 0, or NO_MINIMUM as min_ns."""
        if self._whole is not None and name in _ENDS:
            node = np.arange(self._size)
            found = self._ends(node, self._histograms.cells_of(node))
            for end, values in zip(_ENDS, found, strict=True):
                self._row(end)[: self._size] = values
            self._whole = None
        return self._row(name)[: self._size]

    def _row(self, name: str) -> Column:
        found: Column = self._table[_ROW_OF[name]]
        return found

    def rare(self, name: str, nodes: Iterable[int]) -> int:
        """Return the sum of a sparse column over `nodes`."""
        return self.sparse.sum(name, nodes)

    def of_recorded(self, name: str) -> Column:
        """Return a copy of `count`, `total_ns` or `elements` without plain steps (timed as a whole)."""
        found = self.column(name).copy()
        for node, value in self.sparse[_OF_PLAIN[name]].items():
            if node < self._size:
                found[node] = max(0, int(found[node]) - value)
        return found

    def nodes_with_records(self) -> Column:
        """Return the nodes with a value in `count` or a sparse column, ascending."""
        rare = self.sparse.nodes() - {ANY_STEP}
        known = np.flatnonzero(self.column("count"))
        return distinct(np.concatenate((known, np.array(sorted(rare), np.int64)))) if rare else known

    @property
    def received(self) -> int:
        """The number of records of any kind that this table has counted."""
        others = sum(self.sparse["amounts"].values()) + sum(self.sparse["cancelled"].values())
        return int(self.column("count").sum()) + others

    def histogram(self, nodes: Iterable[int]) -> Column:
        """Return the sum of the histograms of `nodes`."""
        return self._histograms.sum(nodes)

    @property
    def size_bytes(self) -> int:
        """The approximate size of the table in bytes."""
        return self._table.nbytes + self._histograms.size_bytes + self.sparse.size_bytes

    def calls(self, nodes: Sequence[int]) -> Calls | None:
        """Return the statistics of all calls of `nodes` together, or None without calls."""
        return self.calls_of([nodes])[0]

    def calls_of(self, groups: Sequence[Sequence[int] | Column]) -> list[Calls | None]:
        """Return the statistics of each group of nodes, all computed at once."""
        node = np.concatenate([_NONE, *(np.asarray(group, np.int64) for group in groups)])
        group = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        there = node < self._size
        there[there] = self.column("count")[node[there]] > 0
        node, group = node[there], group[there]
        if not len(group):
            return [None] * len(groups)
        starts = np.concatenate((_FIRST, (group[1:] != group[:-1]).nonzero()[0] + 1))
        present = group[starts].tolist()
        which = np.zeros(len(group), np.int64)  # the index of each node's group in `present`
        which[starts[1:]] = 1
        which = which.cumsum()

        def summed(name: str) -> list[int]:
            total: list[int] = np.add.reduceat(self.column(name)[node], starts).tolist()
            return total

        cells = self._histograms.cells_of(node)
        least_ns, most_ns = self._ends(node, cells)
        low, high = np.minimum.reduceat(least_ns, starts), np.maximum.reduceat(most_ns, starts)
        found_spread = spread(cells, which, np.array(summed("count")), low, high)
        names = ("count", "failed", "total_ns")
        least = [None if value == _UNKNOWN_MINIMUM else value for value in low.tolist()]
        most = [None if value == _UNKNOWN_MAXIMUM else value for value in high.tolist()]
        known = [[None if value != value else value for value in column.tolist()] for column in found_spread]
        rows = zip(*map(summed, names), least, most, summed("elements"), *known, strict=True)
        found: list[Calls | None] = [None] * len(groups)
        for at, row in zip(present, rows, strict=True):
            found[at] = Calls(*row)
        return found

    def medians_ns(self, nodes: Column, fraction: float = PERCENTILES[0]) -> NDArray[np.float64]:
        """Return the percentile at `fraction` (default: p50) of each node's calls.

        NaN for a node without calls, or with a histogram that has calls of other nodes.
        """
        found = np.full(len(nodes), np.nan)
        there = np.flatnonzero(self.column("count")[nodes])
        if len(there):
            node = nodes[there]
            cells, count = self._histograms.cells_of(node), self.column("count")[node]
            ends = self._ends(node, cells)
            (found[there],) = spread(cells, np.arange(len(there)), count, *ends, (fraction,), with_cv=False)
        return found

    def _ends(self, node: Column, cells: tuple[Column, Column, Column]) -> tuple[Column, Column]:
        """Return min_ns and max_ns of each node. In a table of the latest counts, they are estimated from the nodes'
        histogram cells, `cells`.
        """
        if self._whole is None:
            return self._row("min_ns")[node], self._row("max_ns")[node]
        place, bucket, counts = cells
        count = self._row("count")[node]
        low = np.where(count > 0, _UNKNOWN_MINIMUM, NO_MINIMUM)
        high = np.where(count > 0, _UNKNOWN_MAXIMUM, 0)
        begins = np.searchsorted(place, np.arange(len(node) + 1))
        at = np.flatnonzero(np.diff(begins))
        if len(at):
            first, last = begins[at], begins[at + 1] - 1
            # A node's own histogram has exactly its calls. A shared one says nothing about a single node.
            own = np.add.reduceat(counts, first) == count[at]
            at, first, last = at[own], first[own], last[own]
            least, most = (self._whole.column(name)[node[at]] for name in _ENDS)
            for found, ends in ((low, first), (high, last)):
                found[at] = np.clip(bucket_middle_ns(bucket[ends]).astype(np.int64), least, most)
        return low, high

    def grow(self, size: int) -> None:
        """Make room for node ids below `size`."""
        if size <= self._size:
            return
        room = self._table.shape[1]
        if size > room:
            room = max(size, 2 * room, 64)
            table = np.zeros((len(COLUMNS), room), np.int64)
            table[_ROW_OF["min_ns"]] = NO_MINIMUM
            table[:, : self._size] = self._table[:, : self._size]
            self._table = table
        self._size = size

    def add(
        self, batch: Batch, step_of: Column, part_of: Column, first_of: Column | None = None
    ) -> tuple[Column, Column]:
        """Count the records of `batch`. Returns the changed nodes and histogram cells.

        `step_of[node]` is the step above `node`, itself for a step, or -1 outside of steps. `part_of[node]` is the
        parent if its time includes the time of `node`, else -1. `first_of[node]` is the first node of the phase with
        this name and category. If it is None, no node shares a histogram. At the end of a step, its bricks' time is
        added to `closed_ns`.
        """
        self.grow(int(batch.node.max(initial=-1)) + 1)
        odd = (batch.flags & (FLAG_LOOSE | FLAG_UNCOUNTED)) != 0
        rare = batch.only(odd) if odd.any() else None
        if rare is not None:
            batch = take_amounts(self.sparse, batch, step_of)
            take_loose(self.sparse, batch)
            take_plain(self.sparse, batch)
        node, duration = batch.node, batch.end_ns - batch.start_ns
        closed = self.running.close(batch, step_of, part_of, self._row("closed_ns"), self.sparse)
        if rare is not None:
            batch = leave_out_cancelled(self.sparse, batch)
            node, duration = batch.node, batch.end_ns - batch.start_ns
        self.intervals.cover(batch, step_of, self.sparse)
        columns = dict(zip(COLUMNS, self._table, strict=True))
        np.add.at(columns["count"], node, 1)
        np.add.at(columns["failed"], node, (batch.flags & FLAG_FAILED) // FLAG_FAILED)
        np.add.at(columns["total_ns"], node, duration)
        np.add.at(columns["elements"], node, batch.elements)
        np.minimum.at(columns["min_ns"], node, duration)
        np.maximum.at(columns["max_ns"], node, duration)
        cells = np.unique(self._histogram_of(node, first_of) * BUCKETS + bucket_of(duration), return_counts=True)
        self._histograms.add(*cells)
        changed = [node, closed] if rare is None else [node, closed, rare.node]
        return distinct(np.concatenate(changed)), cells[0]

    def _histogram_of(self, node: Column, first_of: Column | None) -> Column:
        """Return for each node the node with its histogram: itself, or another one that shares its histogram."""
        beyond = np.flatnonzero(node > MAX_HISTOGRAM_NODES)
        if first_of is None or not len(beyond):
            return node
        first, at, which = np.unique(first_of[node[beyond]], return_index=True, return_inverse=True)
        pairs = zip(first.tolist(), node[beyond[at]].tolist(), strict=True)
        owner = np.array([self._shared.setdefault(one, here) for one, here in pairs], np.int64)
        found = node.copy()
        found[beyond] = owner[which]
        return found

    def totals(self, node: Column) -> NDArray[np.int64]:
        """Return all columns of `node`, as (COLUMNS, nodes). Minima and maxima are missing in a `recent_part`."""
        return self._table[:, node]

    def buckets(self, cell: Column) -> Column:
        """Return the histogram count of each cell."""
        return self._histograms.counts(cell)

    def all_buckets(self) -> Column:
        """Return all histogram cells with a count, ascending. A cell is node * BUCKETS + bucket."""
        return self._histograms.cells()

    def take_over(
        self,
        node: Column,
        totals: NDArray[np.int64],
        cell: Column,
        count: Column,
        rare: dict[tuple[int, int], int],
    ) -> Growth:
        """Replace the totals by `totals`, as (COLUMNS, nodes), and the counts of cells. Returns what was added.

        No node and no cell may occur twice.
        """
        self.grow(int(node.max(initial=-1)) + 1)
        sums = totals[_SUM_ROWS[:, 0]] - self._table[_SUM_ROWS, node]
        self._table[:, node] = totals
        more: dict[tuple[int, int], int] = {}
        for (at, one), value in rare.items():
            known = self.sparse[SPARSE_COLUMNS[at]]
            if SPARSE_COLUMNS[at] not in NO_TOTALS:
                more[at, one] = value - known.get(one, 0)
            known[one] = value
        return Growth.made(node, sums, cell, self._histograms.set(cell, count), more)

    def everything(self) -> Growth:
        """Return all counts of this table as the Growth since an empty table."""
        node, cell = self.nodes_with_records(), self.all_buckets()
        owner, at, value = self.sparse.values_of(sorted(self.sparse.nodes()))
        rare = dict(zip(zip(at.tolist(), owner.tolist(), strict=True), map(int, value.tolist()), strict=True))
        return NodeStats().take_over(node, self.totals(node), cell, self.buckets(cell), rare)

    def since(self, growth: Growth) -> NodeStats:
        """Return a table of the counts in `growth`, which must be the latest of this table.

        min_ns and max_ns are estimated within one percent, by the middle of the first and last bucket with a count.
        Those of all calls limit them.
        """
        counted = NodeStats()
        counted.count(growth)
        return self.recent_part(counted)

    def count(self, growth: Growth, times: int = 1) -> None:
        """Add the counts in `growth`. With `times` = -1, subtract them."""
        self.grow(int(growth.node.max(initial=-1)) + 1)
        self._table[_SUM_ROWS, growth.node] += times * growth.sums
        self.sparse.count(growth.rare, times)
        self._histograms.add(growth.cell.astype(np.int64), times * growth.count.astype(np.int64))

    def recent_part(self, counted: NodeStats) -> NodeStats:
        """Return a copy of `counted` with minima and maxima.

        `counted` has the latest counts of this table (see `since`). The copy shares its histograms.
        """
        found = NodeStats()
        found.grow(self._size)
        size = min(self._size, counted._size)
        found._table[_SUM_ROWS, np.arange(size)] = np.maximum(counted._table[_SUM_ROWS, np.arange(size)], 0)
        found.sparse.take_recent(self.sparse, counted.sparse)
        found._histograms = counted._histograms
        found._whole = self
        return found
