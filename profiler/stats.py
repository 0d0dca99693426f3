"""Cumulative statistics per node, in columns: the daemon adds them up and the viewer keeps them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.histograms import BUCKETS, Column, Histograms, bucket_middle_ns, bucket_of, distinct
from cbtop.protocol.ring import (
    FLAG_AMOUNTS,
    FLAG_CANCELLED,
    FLAG_FAILED,
    FLAG_LOOSE,
    FLAG_PLAIN,
    FLAG_UNCOUNTED,
    LANE_SHIFT,
    LANES,
    UNKNOWN_AMOUNT,
)
from cbtop.protocol.ring_reader import Batch

# The number of nodes with a histogram of their own. Further nodes share one with all of the same name in the same
# phase: percentiles are then known for the brick, and not for each place.
MAX_HISTOGRAM_NODES = 8_192

COLUMNS = ("count", "failed", "total_ns", "min_ns", "max_ns", "elements", "closed_ns")
SUMS = tuple(name for name in COLUMNS if name not in ("min_ns", "max_ns"))
_ROW_OF = {name: at for at, name in enumerate(COLUMNS)}
_SUM_ROWS = np.array([[_ROW_OF[name]] for name in SUMS])
# Columns that few nodes have. `uncounted`: calls with an unknown number of elements. `amounts`: records of `flops`
# and `bytes`; `_given` counts those that had the figure. `cancelled`: cancelled steps; `cancelled_ns`: time in such
# steps. `loose`: calls stopped twice, out of order or late; `loose_ns`: their time, which is in no sum. `overlap_ns`:
# of a node with parts, in steps that ended, the time in which two of the parts ran at once, counted for each beyond
# the first. The rest is about steps:
# - `union_ns`: the time in which at least one ran; `first_ns`, `last_ns`: when the first began and the last ended.
# - `over`: steps with parts that took longer than the step; `over_ns`: by how much.
# - `crowded`: steps in the shared lane.
# - `sequences`: the sequences each worked on; `kept`: the positions each sequence had before. Both are sums over the
#   steps that give them; `_given` is the number of those steps, `_least` and `_most` the extremes.
# - `plain`: steps without a recorded inside; `plain_ns`: their time; `plain_tokens`: their tokens; `plain_uncounted`:
#   those with an unknown number of tokens.
# - `squared_tokens`: sum of each step's squared tokens, which tells with count and tokens if all had the same number.
SPARSE_COLUMNS = (
    "uncounted",
    "amounts",
    "flops",
    "flops_given",
    "bytes",
    "bytes_given",
    "cancelled",
    "cancelled_ns",
    "union_ns",
    "first_ns",
    "last_ns",
    "loose",
    "loose_ns",
    "over",
    "over_ns",
    "crowded",
    "sequences",
    "sequences_given",
    "sequences_least",
    "sequences_most",
    "kept",
    "kept_given",
    "kept_least",
    "kept_most",
    "plain",
    "plain_ns",
    "plain_tokens",
    "plain_uncounted",
    "overlap_ns",
    "squared_tokens",
)
_OF_PLAIN = {"count": "plain", "total_ns": "plain_ns", "elements": "plain_tokens"}
MOST_SQUARED = 1 << 32  # tokens of a step; larger numbers are cut to it, so that sums of squares do not overflow
SANE = 1 << 62  # a time or a count beyond it would overflow when two are added
# Stands for all step nodes together in `union_ns`, because two phases may run at the same time, and for all nodes in
# `first_ns`. On the wire these two have fields of their own.
ANY_STEP = 0
_MOMENTS = ("first_ns", "last_ns")
_EXTREMES = tuple(f"{of}_{end}" for of in ("sequences", "kept") for end in ("least", "most"))
_NO_TOTALS = frozenset(_MOMENTS + _EXTREMES)
MAX_KEPT_INTERVALS = 1 << 12  # per step node: a step that covers time before these counts it twice
MAX_SAID_INTERVALS = 1 << 10  # in one message
MAX_OPEN_GROUPS = 4096  # steps that run at the same time, by node and lane: a host has sixteen lanes
MAX_OPEN_PARTS = 64  # per group, before they are added up
SPARSE = 8  # this many empty cells can be skipped in the time it takes to sort one
PERCENTILES = (0.50, 0.95, 0.99, 0.999)  # nearest rank: the duration that this share of the calls does not exceed
NO_MINIMUM = np.iinfo(np.int64).max
SPARSE_BYTES = 200  # about: an entry of a dict, its key and its number
_ENDS = ("min_ns", "max_ns")
_UNKNOWN_MINIMUM, _UNKNOWN_MAXIMUM = -1, np.iinfo(np.int64).max  # beyond any value they are compared with


def sane(batch: Batch, nodes: int) -> NDArray[np.bool_]:
    """Return a mask of the records that make sense.

    They name one of `nodes` nodes, and run forward from a time that is not negative or give amounts of work.
    """
    duration = batch.end_ns - batch.start_ns
    amounts = batch.are(FLAG_AMOUNTS)  # their start and end are FLOP and bytes
    is_given = (batch.start_ns >= UNKNOWN_AMOUNT) & (batch.end_ns >= UNKNOWN_AMOUNT)
    good: NDArray[np.bool_] = (batch.node >= 1) & (batch.node <= nodes)
    good &= np.where(amounts, is_given, (batch.start_ns >= 0) & (batch.start_ns <= batch.end_ns) & (duration < SANE))
    good &= (batch.elements >= 0) & (batch.elements < SANE)
    return good


@dataclass(frozen=True, slots=True)
class Calls:
    """The statistics of a number of calls. Percentiles and `cv` come from the histogram: within one percent.

    They are None if the histograms hold more or fewer calls than these: for a node beyond MAX_HISTOGRAM_NODES, or if
    there was no room. A result of NodeStats.since has no minimum and maximum for these nodes either.
    """

    count: int
    failed: int
    total_ns: int
    min_ns: int | None
    max_ns: int | None
    elements: int
    cv: float | None  # standard deviation / mean
    p50_ns: float | None
    p95_ns: float | None
    p99_ns: float | None
    p999_ns: float | None

    @property
    def mean_ns(self) -> float:
        return self.total_ns / self.count


@dataclass(frozen=True, slots=True)
class Growth:
    """The calls counted between two moments: the increase of sums, histogram cells and rare columns."""

    node: NDArray[np.int32]  # each once
    sums: NDArray[np.int64]  # (SUMS, nodes)
    cell: NDArray[np.int32]  # each once
    count: NDArray[np.uint32] | Column
    rare: dict[tuple[int, int], int]  # by the number of the column in RARE and the node; without moments

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not (len(self.node) or len(self.cell) or self.rare)

    @property
    def size_bytes(self) -> int:
        arrays = self.node.nbytes + self.sums.nbytes + self.cell.nbytes + self.count.nbytes
        return arrays + SPARSE_BYTES * len(self.rare)

    def column(self, name: str) -> Column:
        """Return one of SUMS, one entry per node."""
        found: Column = self.sums[SUMS.index(name)]
        return found

    @classmethod
    def made(
        cls, node: Column, sums: Column, cell: Column, count: Column, rare: dict[tuple[int, int], int]
    ) -> Growth:
        """Return these increases without zeros (`sums`: a row for each of SUMS), in as few bytes as they need."""
        grew = (sums > 0).any(axis=0)
        counted = count > 0
        count = count[counted]
        return cls(
            node[grew].astype(np.int32),
            sums[:, grew],
            cell[counted].astype(np.int32),
            _narrow(count),
            {key: value for key, value in rare.items() if value > 0},
        )

    @classmethod
    def of(cls, parts: Sequence[Growth]) -> Growth:
        """Return the sum of all `parts`."""
        node, add_up = _each_once([part.node for part in parts])
        sums = add_up([np.zeros((len(SUMS), 0), np.int64), *(part.sums for part in parts)])
        cell, add_up = _each_once([part.cell for part in parts])
        count = add_up([_NONE, *(part.count for part in parts)])
        rare: Counter[tuple[int, int]] = Counter()
        for part in parts:
            rare.update(part.rare)
        return cls(node.astype(np.int32), sums, cell.astype(np.int32), _narrow(count), dict(rare))


class NodeStats:
    """One row per node id; rows appear as ids do. Columns are named as in `StatsUpdate`."""

    def __init__(self) -> None:
        self._size = 0
        self._table = np.zeros((len(COLUMNS), 0), np.int64)
        self._histograms = Histograms()
        self._shared: dict[int, int] = {}  # by first_of: the owner of the histogram for all nodes beyond the bound
        self._rare: dict[str, dict[int, int]] = {name: {} for name in SPARSE_COLUMNS}
        self._whole: NodeStats | None = None  # of `recent_part`, until min_ns and max_ns of all are needed
        self._intervals: dict[int, list[tuple[Column, Column]]] = {}  # by step: starts and ends of when any ran
        # By step and lane: when the last one ended, whether it was cancelled, and how much of its time was in none of
        # its parts.
        self._ended: dict[int, tuple[int, bool, int]] = {}
        # By step and lane, of a running step: nodes, and their times in two rows: all of it, and the overlap with
        # others.
        self._open: dict[int, list[tuple[Column, Column]]] = {}
        # The same for each node there: start and end of the part that ended last.
        self._last: dict[int, dict[int, tuple[int, int]]] = {}

    def __len__(self) -> int:
        """One more than the highest node id that has a row."""
        return self._size

    def column(self, name: str) -> Column:
        """Return a view of one column, one entry per node id. Ids without records hold 0 (min_ns: NO_MINIMUM)."""
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
        """Return the sum of a rare column over `nodes`."""
        values = self._rare[name]
        return sum(values.get(node, 0) for node in nodes) if values else 0

    def rare_column(self, name: str) -> Column:
        """Return a rare column in the form of the others: one entry per node id."""
        found = np.zeros(self._size, np.int64)
        for node, value in self._rare[name].items():
            if node < self._size:
                found[node] = value
        return found

    def of_recorded(self, name: str) -> Column:
        """Return a copy of `count`, `total_ns` or `elements` without plain steps, which have no recorded inside."""
        found = self.column(name).copy()
        for node, value in self._rare[_OF_PLAIN[name]].items():
            if node < self._size:
                found[node] = max(0, int(found[node]) - value)
        return found

    def intervals(self, from_ns: int, most: int) -> tuple[Column, Column, Column]:
        """Return when steps ran, as node, begin and length.

        These are the disjoint intervals of `union_ns` that end at `from_ns` or later, ascending for each node and up
        to its last one; at most `most` over all nodes.
        """
        found = [(_NONE, _NONE, _NONE)]
        for step, parts in sorted(self._intervals.items()):
            columns = zip(*(part for part in parts if part[1][-1] >= from_ns), strict=True)
            begin, end = [np.concatenate(column) for column in columns] or (_NONE, _NONE)
            first = max(int(np.searchsorted(end, from_ns)), len(end) - most)
            begin, end = begin[first:], end[first:]
            most -= len(end)
            found.append((np.full(len(end), step), begin, end - begin))
        node, begin, length = (np.concatenate(column) for column in zip(*found, strict=True))
        return node, begin, length

    def nodes_with(self, name: str) -> Set[int]:
        """Return the nodes with a value in a rare column."""
        return self._rare[name].keys()

    def nodes_with_records(self) -> Column:
        """Return the nodes that have any count, ascending."""
        rare = {node for values in self._rare.values() for node in values if node != ANY_STEP}
        known = np.flatnonzero(self.column("count"))
        return distinct(np.concatenate((known, np.array(sorted(rare), np.int64)))) if rare else known

    @property
    def received(self) -> int:
        """Number of records counted here, of any kind."""
        others = sum(self._rare["amounts"].values()) + sum(self._rare["cancelled"].values())
        return int(self.column("count").sum()) + others

    def is_open(self, step: int, lane: int) -> bool:
        """Whether any part has ended in a running step of that node and lane."""
        return step * LANES + lane in self._open

    def histogram(self, nodes: Iterable[int]) -> Column:
        """Return the sum of the histograms of `nodes`."""
        return self._histograms.sum(nodes)

    @property
    def size_bytes(self) -> int:
        """The approximate size of the table."""
        return self._table.nbytes + self._histograms.size_bytes + SPARSE_BYTES * sum(map(len, self._rare.values()))

    def calls(self, nodes: Sequence[int]) -> Calls | None:
        """Return the calls of `nodes` taken together, or None if there were none."""
        return self.calls_of([nodes])[0]

    def calls_of(self, groups: Sequence[Sequence[int] | Column]) -> list[Calls | None]:
        """Return the calls of each group of nodes taken together, all groups in one go."""
        node = np.concatenate([_NONE, *(np.asarray(group, np.int64) for group in groups)])
        group = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        there = node < self._size
        there[there] = self.column("count")[node[there]] > 0
        node, group = node[there], group[there]
        if not len(group):
            return [None] * len(groups)
        starts = np.concatenate((_FIRST, (group[1:] != group[:-1]).nonzero()[0] + 1))
        present = group[starts].tolist()
        which = np.zeros(len(group), np.int64)  # the index into `present` of each node's group
        which[starts[1:]] = 1
        which = which.cumsum()

        def summed(name: str) -> list[int]:
            total: list[int] = np.add.reduceat(self.column(name)[node], starts).tolist()
            return total

        cells = self._histograms.cells_of(node)
        least_ns, most_ns = self._ends(node, cells)
        low, high = np.minimum.reduceat(least_ns, starts), np.maximum.reduceat(most_ns, starts)
        spread = _spread(cells, which, np.array(summed("count")), low, high)
        names = ("count", "failed", "total_ns")
        least = [None if value == _UNKNOWN_MINIMUM else value for value in low.tolist()]
        most = [None if value == _UNKNOWN_MAXIMUM else value for value in high.tolist()]
        known = [[None if value != value else value for value in column.tolist()] for column in spread]
        rows = zip(*map(summed, names), least, most, summed("elements"), *known, strict=True)
        found: list[Calls | None] = [None] * len(groups)
        for at, row in zip(present, rows, strict=True):
            found[at] = Calls(*row)
        return found

    def medians_ns(self, nodes: Column, fraction: float = PERCENTILES[0]) -> NDArray[np.float64]:
        """Return the p50 of each node's calls, or the percentile at `fraction`.

        NaN if it has none, or if its histogram includes calls of other nodes.
        """
        found = np.full(len(nodes), np.nan)
        there = np.flatnonzero(self.column("count")[nodes])
        if len(there):
            node = nodes[there]
            cells, count = self._histograms.cells_of(node), self.column("count")[node]
            ends = self._ends(node, cells)
            (found[there],) = _spread(cells, np.arange(len(there)), count, *ends, (fraction,), with_cv=False)
        return found

    def _ends(self, node: Column, cells: tuple[Column, Column, Column]) -> tuple[Column, Column]:
        """Return min_ns and max_ns of each of `node`, whose histograms have these `cells`."""
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
            # A histogram that includes other nodes' calls tells nothing about its own.
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
        """Count the records of `batch`. Returns the nodes and the histogram cells that changed.

        `step_of[node]` is the step node above `node` (itself for a step, -1 if there is none): when a step ends, the
        time of its bricks so far is closed. `part_of[node]` is the node that it is in and takes time of (-1: none).
        `first_of[node]` is the first node of its name and category in its phase (None: no node shares its histogram).
        """
        self.grow(int(batch.node.max(initial=-1)) + 1)
        odd = (batch.flags & (FLAG_LOOSE | FLAG_UNCOUNTED)) != 0
        rare = batch.only(odd) if odd.any() else None
        if rare is not None:
            batch = self._take_amounts(batch, step_of)
            self._take_loose(batch)
            self._take_plain(batch)
        node, duration = batch.node, batch.end_ns - batch.start_ns
        closed = self._close_steps(batch, step_of, part_of)
        if rare is not None:
            batch = self._leave_out_cancelled(batch)
            node, duration = batch.node, batch.end_ns - batch.start_ns
        self._cover(batch, step_of)
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
        """Return the node whose histogram counts the calls of each node: itself, or the first beyond the bound."""
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
        """Return all columns of `node`: (COLUMNS, nodes). A result of `recent_part` lacks the extremes."""
        return self._table[:, node]

    def rare_value(self, name: str, node: int) -> int | None:
        """Return a value of a rare column, or None if there is none."""
        return self._rare[name].get(node)

    def add_rare(self, other: NodeStats, place: Column) -> None:
        """Add the rare totals of `other`, whose node n is `place[n]` here. Skips moments because clocks differ."""
        for name in SPARSE_COLUMNS:
            if name in _EXTREMES:
                for node, value in list(other._rare[name].items()):
                    if node < len(place):
                        self._reach(name, int(place[node]), value)
            elif name not in _MOMENTS and other._rare[name]:
                known = [node for node in other._rare[name] if node < len(place)]
                for node in known:
                    here = int(place[node])
                    self._rare[name][here] = self._rare[name].get(here, 0) + other._rare[name][node]

    def rare_values(self, nodes: Iterable[int]) -> tuple[Column, Column, NDArray[np.float64]]:
        """Return the values in rare columns of `nodes`: node, number of the column in RARE, value.

        Values are float64, because FLOP outgrow 64 bits. Times are exact for a hundred days and then to two
        nanoseconds.
        """
        wanted = set(nodes)
        found = [
            (node, at, value)
            for at, name in enumerate(SPARSE_COLUMNS)
            for node, value in self._rare[name].items()
            if node in wanted
        ]
        keys = np.array([key[:2] for key in found], np.int64).reshape(-1, 2)
        return keys[:, 0], keys[:, 1], np.array([float(value) for _, _, value in found], np.float64)

    def buckets(self, cell: Column) -> Column:
        """Return the histogram counts of cells."""
        return self._histograms.counts(cell)

    def all_buckets(self) -> Column:
        """Return every cell that counted anything, as node * BUCKETS + bucket, ascending."""
        return self._histograms.cells()

    def take_over(
        self,
        node: Column,
        totals: NDArray[np.int64],
        cell: Column,
        count: Column,
        rare: dict[tuple[int, int], int],
    ) -> Growth:
        """Replace the totals here by these (COLUMNS, nodes), each node and cell once. Returns the increase."""
        self.grow(int(node.max(initial=-1)) + 1)
        sums = totals[_SUM_ROWS[:, 0]] - self._table[_SUM_ROWS, node]
        self._table[:, node] = totals
        more: dict[tuple[int, int], int] = {}
        for (at, one), value in rare.items():
            known = self._rare[SPARSE_COLUMNS[at]]
            if SPARSE_COLUMNS[at] not in _NO_TOTALS:
                more[at, one] = value - known.get(one, 0)
            known[one] = value
        return Growth.made(node, sums, cell, self._histograms.set(cell, count), more)

    def everything(self) -> Growth:
        """Return all counts as an increase over nothing."""
        node, cell = self.nodes_with_records(), self.all_buckets()
        owner, at, value = self.rare_values(sorted({one for values in self._rare.values() for one in values}))
        rare = dict(zip(zip(at.tolist(), owner.tolist(), strict=True), map(int, value.tolist()), strict=True))
        return NodeStats().take_over(node, self.totals(node), cell, self.buckets(cell), rare)

    def since(self, growth: Growth) -> NodeStats:
        """Return a table of the counts in `growth`, the latest part of this one's.

        min_ns and max_ns are derived: the middle of the outermost buckets that counted, within one percent, and
        limited to those of all calls.
        """
        counted = NodeStats()
        counted.count(growth)
        return self.recent_part(counted)

    def count(self, growth: Growth, times: int = 1) -> None:
        """Add `growth`, or subtract it with `times` of -1."""
        self.grow(int(growth.node.max(initial=-1)) + 1)
        self._table[_SUM_ROWS, growth.node] += times * growth.sums
        for (at, node), value in growth.rare.items():
            values = self._rare[SPARSE_COLUMNS[at]]
            values[node] = values.get(node, 0) + times * value
            if not values[node]:
                del values[node]
        self._histograms.add(growth.cell.astype(np.int64), times * growth.count.astype(np.int64))

    def recent_part(self, counted: NodeStats) -> NodeStats:
        """Return a table of `counted`, the latest part of this one's counts; see `since`.

        It shares the histograms of `counted`.
        """
        found = NodeStats()
        found.grow(self._size)
        size = min(self._size, counted._size)
        found._table[_SUM_ROWS, np.arange(size)] = np.maximum(counted._table[_SUM_ROWS, np.arange(size)], 0)
        for name in SPARSE_COLUMNS:
            values = self._rare[name] if name in _MOMENTS else counted._rare[name]
            found._rare[name] = dict(values)
        found._histograms = counted._histograms
        found._whole = self
        return found

    def _take_amounts(self, batch: Batch, step_of: Column) -> Batch:
        """Add up the FLOP and bytes of single calls, the sequences of steps, and the calls without a count.

        Returns the remaining records.
        """
        amounts = batch.are(FLAG_AMOUNTS)
        if amounts.any():
            part, batch = batch.only(amounts), batch.only(~amounts)
            self._add_rare("amounts", part.node, np.ones(len(part.node), np.int64))
            is_step = step_of[part.node] == part.node
            for unit, of_steps, amount in (("flops", "sequences", part.start_ns), ("bytes", "kept", part.end_ns)):
                for name, whose in ((unit, ~is_step), (of_steps, is_step)):
                    given = whose & (amount != UNKNOWN_AMOUNT)
                    self._add_rare(name, part.node[given], amount[given])
                    self._add_rare(f"{name}_given", part.node[given], np.ones(int(given.sum()), np.int64))
                    if name is of_steps:
                        for node, value in zip(part.node[given].tolist(), amount[given].tolist(), strict=True):
                            self._reach(f"{name}_least", node, value)
                            self._reach(f"{name}_most", node, value)
        uncounted = batch.node[((batch.flags & FLAG_UNCOUNTED) != 0) & ~batch.are(FLAG_CANCELLED)]
        self._add_rare("uncounted", uncounted, np.ones(len(uncounted), np.int64))
        return batch

    def _take_loose(self, batch: Batch) -> None:
        loose = batch.only(batch.are(FLAG_LOOSE))
        self._add_rare("loose", loose.node, np.ones(len(loose.node), np.int64))
        self._add_rare("loose_ns", loose.node, loose.end_ns - loose.start_ns)

    def _take_plain(self, batch: Batch) -> None:
        plain = batch.only(batch.are(FLAG_PLAIN))
        uncounted = plain.node[(plain.flags & FLAG_UNCOUNTED) != 0]
        self._add_rare("plain", plain.node, np.ones(len(plain.node), np.int64))
        self._add_rare("plain_ns", plain.node, plain.end_ns - plain.start_ns)
        self._add_rare("plain_tokens", plain.node, plain.elements)
        self._add_rare("plain_uncounted", uncounted, np.ones(len(uncounted), np.int64))

    def _leave_out_cancelled(self, batch: Batch) -> Batch:
        cancelled = batch.are(FLAG_CANCELLED)
        if not cancelled.any():
            return batch
        self._add_rare("cancelled", batch.node[cancelled], np.ones(int(cancelled.sum()), np.int64))
        return batch.only(~cancelled)

    def _add_rare(self, name: str, node: Column, value: Column) -> None:
        values = self._rare[name]
        for one, number in zip(node.tolist(), value.tolist(), strict=True):
            values[one] = values.get(one, 0) + number

    def _reach(self, name: str, node: int, value: int) -> None:
        """Update an extreme of `node` by `value`."""
        known = self._rare[name].get(node, value)
        self._rare[name][node] = min(known, value) if name.endswith("_least") else max(known, value)

    def _cover(self, batch: Batch, step_of: Column) -> None:
        """Update when steps ran, counting time once if several ran, and the sums of their squared tokens."""
        if len(batch.node):
            first_ns = int(batch.start_ns.min())
            self._rare["first_ns"][ANY_STEP] = min(self._rare["first_ns"].get(ANY_STEP, first_ns), first_ns)
        outermost = step_of[batch.node] == batch.node
        for step in distinct(batch.node[outermost]).tolist():
            here = batch.node == step
            start, end = batch.start_ns[here], batch.end_ns[here]
            for name, moment in (("first_ns", int(start.min())), ("last_ns", int(end.max()))):
                known = self._rare[name].get(step, moment)
                self._rare[name][step] = min(known, moment) if name == "first_ns" else max(known, moment)
            tokens = np.minimum(batch.elements[here], MOST_SQUARED).astype(np.float64)
            if squared := int(np.dot(tokens, tokens)):
                self._rare["squared_tokens"][step] = self._rare["squared_tokens"].get(step, 0) + squared
            self._cover_step(step, start, end)
        if outermost.any():
            self._cover_step(ANY_STEP, batch.start_ns[outermost], batch.end_ns[outermost])

    def _cover_step(self, step: int, start: Column, end: Column) -> None:
        parts = self._intervals.setdefault(step, [])
        begin = int(start.min())
        overlapping = [part for part in parts if part[1][-1] >= begin]
        if overlapping:
            parts[:] = [part for part in parts if part[1][-1] < begin]
            start = np.concatenate([*(part[0] for part in overlapping), start])
            end = np.concatenate([*(part[1] for part in overlapping), end])
        order = np.argsort(start, kind="stable")
        begins, reached = start[order], np.maximum.accumulate(end[order])
        apart = begins[1:] > reached[:-1]
        starts = begins[np.concatenate(([True], apart))]
        ends = reached[np.concatenate((apart, [True]))]
        known = sum(int((part[1] - part[0]).sum()) for part in overlapping)
        more = int((ends - starts).sum()) - known
        self._rare["union_ns"][step] = self._rare["union_ns"].get(step, 0) + more
        if len(parts) >= MAX_OPEN_PARTS:  # each is earlier than the next
            older = tuple(np.concatenate(column)[-MAX_KEPT_INTERVALS:] for column in zip(*parts, strict=True))
            parts[:] = [(older[0], older[1])]
        parts.append((starts[-MAX_KEPT_INTERVALS:], ends[-MAX_KEPT_INTERVALS:]))
        while len(parts) > 1 and sum(len(part[0]) for part in parts) > 2 * MAX_KEPT_INTERVALS:
            parts.pop(0)

    def _close_steps(self, batch: Batch, step_of: Column, part_of: Column) -> Column:
        """Close the time of the parts of steps that ended. Returns the nodes concerned, even some not in the batch.

        Also notes if the parts of a step took more time than the step, which no nesting can, and how long parts of
        the same node ran at the same time, as those on two streams of a device do.

        Steps that run at the same time have a lane each, and a lane's records are in order. Records since the last
        end of a step in that lane belong to the next one, even if that one ran earlier and waited for a device. A
        record deferred until after its step's end is recognised by its time. In the last lane, which many steps may
        share, a step that ends closes everything so far, and a cancelled step closes nothing.
        """
        lane = (batch.flags >> LANE_SHIFT) & (LANES - 1)
        is_cancelled = batch.are(FLAG_CANCELLED)
        in_books = (step_of[batch.node] >= 0) & ~batch.are(FLAG_LOOSE) & ~batch.are(FLAG_PLAIN)
        inside = np.flatnonzero(in_books & ~(is_cancelled & (lane == LANES - 1)))
        owner = step_of[batch.node[inside]]
        group = owner * LANES + lane[inside]
        order = np.argsort(group, kind="stable")
        inside, owner, group = inside[order], owner[order], group[order]
        node, end_ns = batch.node[inside], batch.end_ns[inside]
        duration, cancelled = end_ns - batch.start_ns[inside], is_cancelled[inside]
        is_end = node == owner
        ends = np.flatnonzero(is_end)
        if len(ends):
            found = np.searchsorted(ends, np.arange(len(inside)))
            end_of, before = ends[np.minimum(found, len(ends) - 1)], ends[np.maximum(found - 1, 0)]
            within = (found < len(ends)) & (group[end_of] == group)
            lies_in = within & (end_ns - duration >= end_ns[end_of] - duration[end_of]) & (end_ns <= end_ns[end_of])
            follows = (found > 0) & (group[before] == group)  # a step of its lane that ended in this batch
            dropped = within & cancelled[end_of]
            ended_ns, was_cancelled = np.where(follows, end_ns[before], -1), follows & cancelled[before]
        else:
            within = lies_in = dropped = follows = was_cancelled = np.zeros(len(inside), np.bool_)
            ended_ns = np.full(len(inside), -1)
        for one in distinct(group[~follows]).tolist():
            if one in self._ended:
                of_one = ~follows & (group == one)
                ended_ns = np.where(of_one, self._ended[one][0], ended_ns)
                was_cancelled = np.where(of_one, self._ended[one][1], was_cancelled)
        late = ~is_end & ~lies_in & (end_ns <= ended_ns) & (end_ns - duration < ended_ns)
        dropped = np.where(late, was_cancelled, dropped)
        closing = (within | late) & ~dropped
        counted = closing & ~is_end & (part_of[node] == owner)
        room_ns = duration[ends]  # of each step that ended: its time outside its parts
        ended_in = np.where(late, found - 1, found) if len(ends) else np.zeros(len(inside), np.int64)
        in_batch = counted & (follows | ~late)
        shared_ns = self._shared_ns(group, part_of[node], end_ns - duration, end_ns)
        np.subtract.at(room_ns, ended_in[in_batch], duration[in_batch] - shared_ns[in_batch])
        self._note_late(group[counted & ~in_batch], (duration - shared_ns)[counted & ~in_batch])
        np.add.at(self._row("closed_ns"), node[closing], duration[closing])
        self._add_rare("cancelled_ns", node[dropped], duration[dropped])
        shared = closing & (shared_ns > 0)
        self._add_rare("overlap_ns", part_of[node[shared]], shared_ns[shared])
        concerned = [node[closing | dropped], owner[late], part_of[node[shared]]]
        for at, room in zip(ends.tolist(), room_ns.tolist(), strict=True):
            left_ns = room
            self._last.pop(int(group[at]), None)
            for carried, (carried_ns, beside_ns) in self._open.pop(int(group[at]), ()):
                if cancelled[at]:
                    self._add_rare("cancelled_ns", carried, carried_ns)
                else:
                    np.add.at(self._row("closed_ns"), carried, carried_ns)
                    left_ns -= int((carried_ns - beside_ns)[part_of[carried] == owner[at]].sum())
                    shared = beside_ns > 0
                    self._add_rare("overlap_ns", part_of[carried[shared]], beside_ns[shared])
                    concerned.append(part_of[carried[shared]])
                concerned.append(carried)
            is_crowded = int(group[at]) % LANES == LANES - 1
            if is_crowded:
                self._add_rare("crowded", owner[at : at + 1], np.ones(1, np.int64))
            elif not cancelled[at]:
                self._note_over(int(owner[at]), 0, left_ns)
            self._ended[int(group[at])] = int(end_ns[at]), bool(cancelled[at]), left_ns
        still_open = ~(within | late)
        for one in distinct(group[still_open]).tolist():
            of_one = still_open & (group == one)
            self._keep_open(one, node[of_one], np.stack([duration[of_one], shared_ns[of_one]]))
            self._keep_last(one, part_of[node[of_one]], (end_ns - duration)[of_one], end_ns[of_one])
        while len(self._ended) > MAX_OPEN_GROUPS:
            del self._ended[next(iter(self._ended))]
        return np.concatenate(concerned)

    def _shared_ns(self, group: Column, outer: Column, start_ns: Column, end_ns: Column) -> Column:
        """Return for each record how long others ran in its `outer` node that had begun before it.

        Records in the shared lane are left out, because it is not known which are of the same step.
        """
        found = np.zeros(len(group), np.int64)
        parts = np.flatnonzero((outer > 0) & (group % LANES != LANES - 1))
        if not len(parts):
            return found
        key = group[parts] * (self._size + 1) + outer[parts]
        order = np.argsort(key, kind="stable")
        at, key = parts[order], key[order]
        begun, ended = start_ns[at], end_ns[at]
        is_first = np.append(True, key[1:] != key[:-1])
        firsts, is_beside = np.flatnonzero(is_first), ~is_first & np.append(False, begun[1:] < ended[:-1])
        which = np.logical_or.reduceat(is_beside, firsts)
        nothing = 0, 0
        before = [nothing] * len(firsts)
        if self._last:
            around = zip(group[at[firsts]].tolist(), outer[at[firsts]].tolist(), strict=True)
            before = [self._last.get(one, {}).get(inside, nothing) for one, inside in around]
            which |= np.array([ended_ns for _, ended_ns in before]) > np.minimum.reduceat(begun, firsts)
        lasts = np.append(firsts[1:], len(at))
        for one in np.flatnonzero(which).tolist():
            here = at[firsts[one] : lasts[one]]
            here = here[np.argsort(start_ns[here], kind="stable")]
            times = zip(start_ns[here].tolist(), end_ns[here].tolist(), strict=True)
            found[here] = list(_covered_ns(times, *before[one]))
        return found

    def _keep_last(self, group: int, outer: Column, start_ns: Column, end_ns: Column) -> None:
        """Note the last part of each node in a running step: parts in a later batch may overlap it."""
        known = self._last.setdefault(group, {})
        order = np.lexsort((end_ns, outer))
        for at in order[np.flatnonzero(np.append(outer[order][1:] != outer[order][:-1], True))].tolist():
            one, times = int(outer[at]), (int(start_ns[at]), int(end_ns[at]))
            known[one] = max(known.get(one, (0, 0)), times, key=lambda each: each[1])
        if len(self._last) > MAX_OPEN_GROUPS:
            del self._last[next(iter(self._last))]

    def _note_late(self, groups: Column, duration: Column) -> None:
        """Subtract time that was deferred until after a step from that step's remaining time."""
        for group in distinct(groups).tolist():
            end_ns, is_cancelled, left_ns = self._ended[group]
            now_ns = left_ns - int(duration[groups == group].sum())
            if group % LANES != LANES - 1:
                self._note_over(group // LANES, left_ns, now_ns)
            self._ended[group] = end_ns, is_cancelled, now_ns

    def _note_over(self, step: int, before_ns: int, left_ns: int) -> None:
        """Note that the parts of a step took more than the step, if they had not already by `before_ns`."""
        more_ns = max(0, -left_ns) - max(0, -before_ns)
        if more_ns:
            over, over_ns = self._rare["over"], self._rare["over_ns"]
            over[step] = over.get(step, 0) + (before_ns >= 0)
            over_ns[step] = over_ns.get(step, 0) + more_ns

    def _keep_open(self, group: int, node: Column, times_ns: NDArray[np.int64]) -> None:
        parts = self._open.setdefault(group, [])
        parts.append((node, times_ns))
        if len(parts) >= MAX_OPEN_PARTS:
            nodes, times = (np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))
            which, where = np.unique(nodes, return_inverse=True)
            total = np.zeros((2, len(which)), np.int64)
            for row, each in zip(total, times, strict=True):
                np.add.at(row, where, each)
            parts[:] = [(which, total)]
        if len(self._open) > MAX_OPEN_GROUPS:
            del self._open[next(iter(self._open))]  # stays open for ever: no host has this many


_NONE, _FIRST = np.zeros(0, np.int64), np.zeros(1, np.int64)


def _covered_ns(times_ns: Iterable[tuple[int, int]], begun_ns: int, ended_ns: int) -> Iterator[int]:
    """Yield how much of each interval, by start, is in the ones before it, or in `begun_ns` to `ended_ns`."""
    reached_ns = 0
    for start_ns, end_ns in times_ns:
        in_these_ns = max(0, min(end_ns, reached_ns) - start_ns)
        yield in_these_ns + max(0, min(end_ns, ended_ns) - max(start_ns, begun_ns, reached_ns))
        reached_ns = max(reached_ns, end_ns)


def _spread(
    cells: tuple[Column, Column, Column],
    group: Column,
    count: Column,
    low: Column,
    high: Column,
    fractions: Sequence[float] = PERCENTILES,
    *,
    with_cv: bool = True,
) -> list[NDArray[np.float64]]:
    """Return the cv (if `with_cv`) and the percentiles of each group, whose nodes have these `cells`.

    NaN if the histogram includes other calls.
    """
    groups = len(low)
    place, bucket, counts = cells
    # Each cell by its group, then by its bucket: the running count of a group begins where the previous group's ends.
    least = int(bucket.min(initial=BUCKETS))
    buckets = int(bucket.max(initial=least)) - least + 1
    key = group[place] * buckets + (bucket - least)
    # Nodes of a group have the same buckets: adding these up is worth an empty cell or two, and needs no sorting.
    if groups * buckets <= SPARSE * len(key):
        together = np.bincount(key, counts)  # exact: below 2 ** 53
        key = (together != 0).nonzero()[0]
        counts = together[key]
    elif np.any(key[1:] < key[:-1]):
        order = np.argsort(key, kind="stable")
        key, counts = key[order], counts[order]
    owner, middle = key // buckets, bucket_middle_ns(key % buckets + least)
    calls = np.bincount(owner, counts, minlength=groups)
    known = np.flatnonzero(calls)
    running, before = np.cumsum(counts, dtype=np.float64), np.cumsum(calls) - calls

    columns: list[NDArray[np.float64]] = []
    if with_cv:
        mean = _ratio(np.bincount(owner, counts * middle, minlength=groups), calls)
        variance = _ratio(np.bincount(owner, counts * (middle - mean[owner]) ** 2, minlength=groups), calls)
        columns.append(_ratio(np.sqrt(variance), mean))
    rank = before[known] + np.maximum(1, np.ceil(np.reshape(fractions, (-1, 1)) * calls[known]))
    percentiles = np.full((len(fractions), groups), np.nan)
    at = np.searchsorted(running, rank, side="left")
    percentiles[:, known] = np.clip(middle[at], low[known], high[known])
    columns += list(percentiles)
    others = calls != count  # percentiles of a part of the calls, or of more, would look like those of all calls
    if others.any():
        for column in columns:
            column[others] = np.nan
    return columns


def _each_once(parts: Sequence[NDArray[Any]]) -> tuple[Column, Callable[[Sequence[NDArray[Any]]], Column]]:
    """Return the distinct values, ascending, and a function that adds up the amounts (on the last axis) of each."""
    values = np.concatenate([_NONE, *parts])
    order = np.argsort(values, kind="stable")  # each part is in order: they are merged
    values = values[order]
    begins = np.flatnonzero(np.diff(values, prepend=-1))

    def add_up(amounts: Sequence[NDArray[Any]]) -> Column:
        found: Column = np.add.reduceat(np.concatenate(amounts, axis=-1)[..., order], begins, axis=-1)
        return found

    return values[begins], add_up


def _narrow(count: Column) -> NDArray[np.uint32] | Column:
    return count.astype(np.uint32) if int(count.max(initial=0)) >> 32 == 0 else count


def _ratio(over: NDArray[Any], under: NDArray[Any]) -> NDArray[np.float64]:
    """Return over / under, NaN if `under` is zero."""
    found = np.full(len(over), np.nan)
    np.divide(over, under, out=found, where=under != 0)
    return found
