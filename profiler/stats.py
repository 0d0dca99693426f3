"""Cumulative statistics per node, in columns: what the daemon adds up and the viewer keeps.

A duration falls into a log-linear bucket (the layout of HdrHistogram, with 64 buckets an octave): exact below
64 ns, and above it a bucket is at most 1/64 of its value wide, so its midpoint is within 0.8 % of any duration in
it. Buckets are counted for the life of the source, so percentiles of any sum of nodes are those of all its calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.protocol.ring import (
    FLAG_AMOUNTS,
    FLAG_CANCELLED,
    FLAG_FAILED,
    FLAG_LOOSE,
    FLAG_UNCOUNTED,
    LANE_SHIFT,
    LANES,
    UNKNOWN_AMOUNT,
    Batch,
)

Column = NDArray[np.int64]

SUB_BUCKET_BITS = 6
SUB_BUCKETS = 1 << SUB_BUCKET_BITS
MAX_DURATION_NS = (1 << 42) - 1  # 73 minutes; longer ones are counted in the last bucket
BUCKETS = (42 - SUB_BUCKET_BITS) * SUB_BUCKETS + SUB_BUCKETS
# A histogram row is 18.5 KiB; a hostile node table must not cost more than this many of them.
MAX_HISTOGRAM_NODES = 8_192

COLUMNS = ("count", "failed", "total_ns", "min_ns", "max_ns", "elements", "closed_ns")
# What few nodes have. `uncounted`: calls whose elements are not known. `amounts`: records of `flops` and `bytes`, of
# which so many were `_given`. `cancelled`: cancelled steps; `cancelled_ns`: time in such steps. And of steps:
# `union_ns`, the time in which at least one of them ran; `first_ns` and `last_ns`, when the first began and the last
# ended. `loose`: calls stopped twice, out of order or late, and `loose_ns` their time, which is in no books. Of steps
# that what lay in them outdid: `over`, how many, and `over_ns`, by how much. `crowded`: steps in the shared lane.
RARE = (
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
)
SANE = 1 << 62  # a time or a count beyond it would overflow when two are added
ANY_STEP = 0  # stands for all step nodes together in `union_ns`: two phases may run at the same time. Not on the wire
_MOMENTS = ("first_ns", "last_ns")  # not totals
MAX_KEPT_INTERVALS = 1 << 14  # of a step node: time before these that a step covers counts twice
MAX_OPEN_GROUPS = 4096  # steps that run at the same time, by node and lane: a host has sixteen lanes
MAX_OPEN_PARTS = 64  # of one of these, before they are added up
PERCENTILES = (0.50, 0.95, 0.99, 0.999)  # nearest rank: the duration that many of the calls do not exceed
NO_MINIMUM = np.iinfo(np.int64).max
_UNKNOWN_MINIMUM, _UNKNOWN_MAXIMUM = -1, np.iinfo(np.int64).max  # each outdoes what it is compared with


def bucket_of(duration_ns: Column) -> Column:
    """The bucket of each duration (ns, >= 0)."""
    value = np.clip(duration_ns, 0, MAX_DURATION_NS)
    octave = np.maximum(np.frexp(value.astype(np.float64))[1].astype(np.int64) - 1 - SUB_BUCKET_BITS, 0)
    found: Column = octave * SUB_BUCKETS + (value >> octave)
    return found


def bucket_middle_ns(bucket: Column) -> NDArray[np.float64]:
    """The middle of each bucket, in ns."""
    octave = np.maximum(bucket // SUB_BUCKETS - 1, 0)
    low = (bucket - octave * SUB_BUCKETS) << octave
    middle: NDArray[np.float64] = low + ((1 << octave) - 1) / 2
    return middle


def distinct(values: Column) -> Column:
    """The distinct ones of `values` (>= 0), ascending. NumPy's own `unique` hashes: ten times as long as its sort."""
    ordered = np.sort(values)
    found: Column = ordered[np.diff(ordered, prepend=-1) != 0]
    return found


def sane(batch: Batch, nodes: int) -> NDArray[np.bool_]:
    """Which records tell something: they name one of `nodes` nodes and run forward from a time that is not
    negative, or give amounts of work."""
    duration = batch.end_ns - batch.start_ns
    amounts = batch.are(FLAG_AMOUNTS)  # of these, start and end are FLOP and bytes
    is_given = (batch.start_ns >= UNKNOWN_AMOUNT) & (batch.end_ns >= UNKNOWN_AMOUNT)
    good: NDArray[np.bool_] = (batch.node >= 1) & (batch.node <= nodes)
    good &= np.where(amounts, is_given, (batch.start_ns >= 0) & (duration >= 0) & (duration < SANE))
    good &= (batch.elements >= 0) & (batch.elements < SANE)
    return good


@dataclass(frozen=True, slots=True)
class Calls:
    """What is known of a number of calls. Percentiles and `cv` come from the histogram: within one percent.

    They are None for nodes beyond MAX_HISTOGRAM_NODES, whose calls are counted but not sorted by duration; what
    NodeStats.since gives has no minimum and maximum for these either.
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
class Snapshot:
    """What a table held at one moment: its columns, and the histogram cells that had counted anything."""

    columns: dict[str, Column]
    cell: NDArray[np.int32]  # node * BUCKETS + bucket
    count: Column
    rare: dict[str, dict[int, int]]


class NodeStats:
    """One row a node id; rows appear as ids do. Columns are named as in `StatsUpdate`."""

    def __init__(self) -> None:
        self._size = 0
        self._columns = {name: np.zeros(0, np.int64) for name in COLUMNS}
        # The kernel gives zeroed pages as they are touched: rows that count nothing cost nothing.
        self._histogram = np.zeros((MAX_HISTOGRAM_NODES, BUCKETS), np.int64)
        self._rare: dict[str, dict[int, int]] = {name: {} for name in RARE}
        self._intervals: dict[int, list[tuple[Column, Column]]] = {}  # by step: starts and ends of when any ran
        # By step and lane: when the last one ended, if cancelled, and what of its time lay in none of its parts.
        self._ended: dict[int, tuple[int, bool, int]] = {}
        self._open: dict[int, list[tuple[Column, Column]]] = {}  # by step and lane: nodes and times of a running step

    def __len__(self) -> int:
        """One more than the highest node id there is a row for."""
        return self._size

    def column(self, name: str) -> Column:
        """A view of one column, one entry a node id; ids without records hold 0 (min_ns: NO_MINIMUM)."""
        return self._columns[name][: self._size]

    def rare(self, name: str, nodes: Iterable[int]) -> int:
        """The sum of a rare column over `nodes`."""
        values = self._rare[name]
        return sum(values.get(node, 0) for node in nodes) if values else 0

    def nodes_with_records(self) -> Column:
        """The nodes of which anything is counted, ascending."""
        rare = {node for values in self._rare.values() for node in values if node != ANY_STEP}
        known = np.flatnonzero(self.column("count"))
        return distinct(np.concatenate((known, np.array(sorted(rare), np.int64)))) if rare else known

    @property
    def received(self) -> int:
        """How many records are counted here, whatever they tell of."""
        others = sum(self._rare["amounts"].values()) + sum(self._rare["cancelled"].values())
        return int(self.column("count").sum()) + others

    def histogram(self, nodes: Iterable[int]) -> Column:
        """The histograms of `nodes`, summed. Nodes beyond MAX_HISTOGRAM_NODES have none."""
        rows = [node for node in nodes if node < min(self._size, MAX_HISTOGRAM_NODES)]
        summed: Column = self._histogram[rows].sum(axis=0)
        return summed

    def calls(self, nodes: Sequence[int]) -> Calls | None:
        """The calls of `nodes` taken together; None where there were none."""
        return self.calls_of([nodes])[0]

    def calls_of(self, groups: Sequence[Sequence[int]]) -> list[Calls | None]:
        """The calls of each group of nodes taken together, all groups in one go."""
        count = self.column("count")
        ran = [[node for node in group if node < self._size and count[node]] for group in groups]
        present = [at for at, group in enumerate(ran) if group]
        if not present:
            return [None] * len(groups)
        node = np.array([node for at in present for node in ran[at]], np.int64)
        sizes = np.array([len(ran[at]) for at in present])
        starts = np.cumsum(sizes) - sizes

        def summed(name: str) -> list[int]:
            total: list[int] = np.add.reduceat(self.column(name)[node], starts).tolist()
            return total

        low = np.minimum.reduceat(self.column("min_ns")[node], starts)
        high = np.maximum.reduceat(self.column("max_ns")[node], starts)
        spread = self._spread(node, np.repeat(np.arange(len(present)), sizes), low, high)
        names = ("count", "failed", "total_ns")
        least = [None if value == _UNKNOWN_MINIMUM else value for value in low.tolist()]
        most = [None if value == _UNKNOWN_MAXIMUM else value for value in high.tolist()]
        rows = zip(*map(summed, names), least, most, summed("elements"), *spread, strict=True)
        found: list[Calls | None] = [None] * len(groups)
        for at, row in zip(present, rows, strict=True):
            found[at] = Calls(*row)
        return found

    def _spread(self, node: Column, group: Column, low: Column, high: Column) -> list[list[float | None]]:
        """The cv and the percentiles of each group, in the order of `Calls`; None where no call was counted."""
        groups = len(low)
        has_histogram = node < MAX_HISTOGRAM_NODES
        rows = self._histogram[node[has_histogram]]
        at = np.flatnonzero((rows != 0).reshape(-1))
        counts = rows.reshape(-1)[at]
        # Each cell by its group, then by its bucket: the running count of a group begins where the last's ended.
        key = group[has_histogram][at // BUCKETS] * BUCKETS + at % BUCKETS
        order = np.argsort(key, kind="stable")
        key, counts = key[order], counts[order]
        owner, middle = key // BUCKETS, bucket_middle_ns(key % BUCKETS)
        calls = np.bincount(owner, counts, minlength=groups)
        known = np.flatnonzero(calls)
        running, before = np.cumsum(counts, dtype=np.float64), np.cumsum(calls) - calls

        mean = _ratio(np.bincount(owner, counts * middle, minlength=groups), calls)
        variance = _ratio(np.bincount(owner, counts * (middle - mean[owner]) ** 2, minlength=groups), calls)
        columns = [_ratio(np.sqrt(variance), mean)]
        for fraction in PERCENTILES:
            rank = before[known] + np.maximum(1, np.ceil(fraction * calls[known]))
            column = np.full(groups, np.nan)
            column[known] = np.clip(middle[np.searchsorted(running, rank, side="left")], low[known], high[known])
            columns.append(column)
        partly = np.bincount(group[~has_histogram], minlength=groups) > 0  # a percentile of some would pass for all
        for column in columns:
            column[partly] = np.nan
        return [[None if value != value else value for value in column.tolist()] for column in columns]

    def grow(self, size: int) -> None:
        """Make room for node ids below `size`."""
        if size <= self._size:
            return
        room = len(self._columns["count"])
        if size > room:
            room = max(size, 2 * room, 64)
            for name, column in self._columns.items():
                grown = np.full(room, NO_MINIMUM if name == "min_ns" else 0, np.int64)
                grown[: self._size] = column[: self._size]
                self._columns[name] = grown
        self._size = size

    def add(self, batch: Batch, step_of: Column, part_of: Column) -> tuple[Column, Column, Column]:
        """Count the records of `batch`; gives the nodes that changed and the (node, bucket) pairs that did.

        `step_of[node]` is the step node above `node` (itself for a step, -1 where there is none): when a step ends,
        what its bricks took so far is closed. `part_of[node]` is that step where the node lies directly in it, and
        takes of its time.
        """
        self.grow(int(batch.node.max(initial=-1)) + 1)
        odd = (batch.flags & (FLAG_LOOSE | FLAG_UNCOUNTED)) != 0
        rare = batch.only(odd) if odd.any() else None
        if rare is not None:
            batch = self._take_amounts(batch)
            self._take_loose(batch)
        node, duration = batch.node, batch.end_ns - batch.start_ns
        closed = self._close_steps(batch, step_of, part_of)
        if rare is not None:
            batch = self._leave_out_cancelled(batch)
            node, duration = batch.node, batch.end_ns - batch.start_ns
        self._cover(batch, step_of)
        columns = self._columns
        np.add.at(columns["count"], node, 1)
        np.add.at(columns["failed"], node, (batch.flags & FLAG_FAILED) // FLAG_FAILED)
        np.add.at(columns["total_ns"], node, duration)
        np.add.at(columns["elements"], node, batch.elements)
        np.minimum.at(columns["min_ns"], node, duration)
        np.maximum.at(columns["max_ns"], node, duration)
        counted = node < MAX_HISTOGRAM_NODES
        cells = np.unique(node[counted] * BUCKETS + bucket_of(duration[counted]), return_counts=True)
        self._histogram.reshape(-1)[cells[0]] += cells[1]
        changed = [node, closed] if rare is None else [node, closed, rare.node]
        return distinct(np.concatenate(changed)), cells[0] // BUCKETS, cells[0] % BUCKETS

    def clear(self) -> None:
        """Forget every count."""
        for name, column in self._columns.items():
            column[: self._size] = NO_MINIMUM if name == "min_ns" else 0
        self._histogram[: self._size] = 0
        for values in self._rare.values():
            values.clear()
        self._intervals.clear()
        self._ended.clear()
        self._open.clear()
        self._size = 0

    def set(self, node: Column, columns: dict[str, Column]) -> None:
        """Take over the totals of `node` from another table (a StatsUpdate)."""
        self.grow(int(node.max(initial=-1)) + 1)
        for name, values in columns.items():
            self._columns[name][node] = values

    def set_rare(self, node: Column, column: Column, value: NDArray[np.float64]) -> None:
        """Take over values of rare columns: `column` numbers them as in RARE."""
        for one, at, number in zip(node.tolist(), column.tolist(), value.tolist(), strict=True):
            self._rare[RARE[at]][one] = int(number)

    def add_rare(self, other: NodeStats, place: Column) -> None:
        """Add the rare totals of `other`, whose node n is `place[n]` here. Moments are left out: clocks differ."""
        for name in RARE:
            if name not in _MOMENTS and other._rare[name]:
                known = [node for node in other._rare[name] if node < len(place)]
                for node in known:
                    here = int(place[node])
                    self._rare[name][here] = self._rare[name].get(here, 0) + other._rare[name][node]

    def rare_values(self, nodes: Iterable[int]) -> tuple[Column, Column, NDArray[np.float64]]:
        """What there is in rare columns of `nodes`: node, number of the column in RARE, value.

        Values are float64: FLOP outgrow 64 bits, times are exact for a hundred days and then to two nanoseconds.
        """
        found = [
            (node, at, self._rare[name][node])
            for at, name in enumerate(RARE)
            if self._rare[name]
            for node in nodes
            if node in self._rare[name]
        ]
        keys = np.array([key[:2] for key in found], np.int64).reshape(-1, 2)
        return keys[:, 0], keys[:, 1], np.array([float(value) for _, _, value in found], np.float64)

    def set_buckets(self, node: Column, bucket: Column, count: Column) -> None:
        """Take over histogram counts."""
        self.grow(int(node.max(initial=-1)) + 1)
        self._histogram[node, bucket] = count

    def buckets(self, node: Column, bucket: Column) -> Column:
        """The histogram counts at (node, bucket)."""
        return self._histogram[node, bucket]

    def all_buckets(self) -> tuple[Column, Column]:
        """Every (node, bucket) that counted anything."""
        cell = self._cells()
        return cell // BUCKETS, cell % BUCKETS

    def snapshot(self) -> Snapshot:
        """What it holds now, for `since`."""
        cell = self._cells()
        columns = {name: self.column(name).copy() for name in COLUMNS}
        rare = {name: dict(values) for name, values in self._rare.items()}
        return Snapshot(columns, cell.astype(np.int32), self._histogram.reshape(-1)[cell], rare)

    def since(self, snapshot: Snapshot) -> NodeStats:
        """What this table has counted after `snapshot` was taken of it.

        min_ns and max_ns are derived: the middle of the outermost buckets that counted, within one percent.
        """
        found = NodeStats()
        found.grow(self._size)
        for name in COLUMNS:
            if name not in ("min_ns", "max_ns"):
                before = snapshot.columns[name][: self._size]
                found.column(name)[:] = self.column(name)
                found.column(name)[: len(before)] -= before
                np.maximum(found.column(name), 0, out=found.column(name))  # counts that shrink are no counts
        for name, values in self._rare.items():
            before_of = {} if name in _MOMENTS else snapshot.rare[name]
            found._rare[name] = {node: max(0, value - before_of.get(node, 0)) for node, value in values.items()}
        cell, counts = self._cells(), found._histogram.reshape(-1)
        counts[cell] = self._histogram.reshape(-1)[cell]
        counts[snapshot.cell] -= snapshot.count
        counts[snapshot.cell] = np.maximum(counts[snapshot.cell], 0)
        cell = cell[counts[cell] > 0]
        found._find_extremes(cell, self.column("min_ns"), self.column("max_ns"))
        return found

    def _find_extremes(self, cell: Column, least: Column, most: Column) -> None:
        """Set min_ns and max_ns from the cells that counted (ascending); none lies outside of `least` and `most`."""
        low, high = self.column("min_ns"), self.column("max_ns")
        counted = self.column("count") > 0
        low[counted], high[counted] = _UNKNOWN_MINIMUM, _UNKNOWN_MAXIMUM
        owner = cell // BUCKETS
        first, last = np.diff(owner, prepend=-1) != 0, np.diff(owner, append=-1) != 0
        for column, at in ((low, first), (high, last)):
            node, middle = owner[at], bucket_middle_ns(cell[at] % BUCKETS).astype(np.int64)
            column[node] = np.clip(middle, least[node], most[node])

    def _cells(self) -> Column:
        """Every cell that counted anything, as node * BUCKETS + bucket, ascending."""
        # By way of booleans, and flat: five times as fast as np.nonzero of the table.
        return np.flatnonzero(self._histogram[: self._size].reshape(-1) != 0)

    def _take_amounts(self, batch: Batch) -> Batch:
        """Add up the FLOP and bytes given for single calls, and the calls without a count; gives what is left."""
        amounts = batch.are(FLAG_AMOUNTS)
        if amounts.any():
            part, batch = batch.only(amounts), batch.only(~amounts)
            self._add_rare("amounts", part.node, np.ones(len(part.node), np.int64))
            for unit, amount in (("flops", part.start_ns), ("bytes", part.end_ns)):
                given = amount != UNKNOWN_AMOUNT
                self._add_rare(unit, part.node[given], amount[given])
                self._add_rare(f"{unit}_given", part.node[given], np.ones(int(given.sum()), np.int64))
        uncounted = batch.node[(batch.flags & FLAG_UNCOUNTED) != 0]
        self._add_rare("uncounted", uncounted, np.ones(len(uncounted), np.int64))
        return batch

    def _take_loose(self, batch: Batch) -> None:
        loose = batch.only(batch.are(FLAG_LOOSE))
        self._add_rare("loose", loose.node, np.ones(len(loose.node), np.int64))
        self._add_rare("loose_ns", loose.node, loose.end_ns - loose.start_ns)

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

    def _cover(self, batch: Batch, step_of: Column) -> None:
        """Take note of when steps ran: of those that ran at the same time, the time counts once."""
        outermost = step_of[batch.node] == batch.node
        for step in distinct(batch.node[outermost]).tolist():
            here = batch.node == step
            start, end = batch.start_ns[here], batch.end_ns[here]
            for name, moment in (("first_ns", int(start.min())), ("last_ns", int(end.max()))):
                known = self._rare[name].get(step, moment)
                self._rare[name][step] = min(known, moment) if name == "first_ns" else max(known, moment)
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
        parts.append((starts[-MAX_KEPT_INTERVALS:], ends[-MAX_KEPT_INTERVALS:]))
        while len(parts) > 1 and sum(len(part[0]) for part in parts) > MAX_KEPT_INTERVALS:
            parts.pop(0)

    def _close_steps(self, batch: Batch, step_of: Column, part_of: Column) -> Column:
        """Close what lies in the steps that ended; gives the nodes concerned, which need not be in the batch.

        Where the parts of a step took more time than the step, which no nesting can, that is noted.

        Of steps that run at the same time, each has a lane, and its records are in order: what came in a lane since
        the last end of a step there is the next one's. What was deferred until after its step had ended is known by
        its time. In the last lane, which many steps may share, a step that ends closes what came so far, and one that
        was cancelled nothing.
        """
        lane = (batch.flags >> LANE_SHIFT) & (LANES - 1)
        is_cancelled = batch.are(FLAG_CANCELLED)
        in_books = (step_of[batch.node] >= 0) & ~batch.are(FLAG_LOOSE)
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
            follows = (found > 0) & (group[before] == group)  # a step of its lane that ended in this batch
            dropped = within & cancelled[end_of]
            ended_ns, was_cancelled = np.where(follows, end_ns[before], -1), follows & cancelled[before]
        else:
            within = dropped = follows = was_cancelled = np.zeros(len(inside), np.bool_)
            ended_ns = np.full(len(inside), -1)
        for one in distinct(group[~follows]).tolist():
            if one in self._ended:
                of_one = ~follows & (group == one)
                ended_ns = np.where(of_one, self._ended[one][0], ended_ns)
                was_cancelled = np.where(of_one, self._ended[one][1], was_cancelled)
        late = ~is_end & (end_ns <= ended_ns) & (end_ns - duration < ended_ns)
        dropped = np.where(late, was_cancelled, dropped)
        closing = (within | late) & ~dropped
        counted = closing & ~is_end & (part_of[node] == owner)
        room_ns = duration[ends]  # of each step that ended: what its parts leave of it
        ended_in = np.where(late, found - 1, found) if len(ends) else np.zeros(len(inside), np.int64)
        in_batch = counted & (follows | ~late)
        np.subtract.at(room_ns, ended_in[in_batch], duration[in_batch])
        self._note_late(group[counted & ~in_batch], duration[counted & ~in_batch])
        np.add.at(self._columns["closed_ns"], node[closing], duration[closing])
        self._add_rare("cancelled_ns", node[dropped], duration[dropped])
        concerned = [node[closing | dropped], owner[late]]
        for at, room in zip(ends.tolist(), room_ns.tolist(), strict=True):
            left_ns = room
            for carried, carried_ns in self._open.pop(int(group[at]), ()):
                if cancelled[at]:
                    self._add_rare("cancelled_ns", carried, carried_ns)
                else:
                    np.add.at(self._columns["closed_ns"], carried, carried_ns)
                    left_ns -= int(carried_ns[part_of[carried] == owner[at]].sum())
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
            self._keep_open(one, node[of_one], duration[of_one])
        while len(self._ended) > MAX_OPEN_GROUPS:
            del self._ended[next(iter(self._ended))]
        return np.concatenate(concerned)

    def _note_late(self, groups: Column, duration: Column) -> None:
        """Take what was deferred until after its step off what that step had left."""
        for group in distinct(groups).tolist():
            end_ns, is_cancelled, left_ns = self._ended[group]
            now_ns = left_ns - int(duration[groups == group].sum())
            if group % LANES != LANES - 1:
                self._note_over(group // LANES, left_ns, now_ns)
            self._ended[group] = end_ns, is_cancelled, now_ns

    def _note_over(self, step: int, before_ns: int, left_ns: int) -> None:
        """Note that what lay in one step took more than it, where it did not `before_ns`."""
        more_ns = max(0, -left_ns) - max(0, -before_ns)
        if more_ns:
            over, over_ns = self._rare["over"], self._rare["over_ns"]
            over[step] = over.get(step, 0) + (before_ns >= 0)
            over_ns[step] = over_ns.get(step, 0) + more_ns

    def _keep_open(self, group: int, node: Column, duration: Column) -> None:
        parts = self._open.setdefault(group, [])
        parts.append((node, duration))
        if len(parts) >= MAX_OPEN_PARTS:
            nodes, times = (np.concatenate(column) for column in zip(*parts, strict=True))
            which, where = np.unique(nodes, return_inverse=True)
            total = np.zeros(len(which), np.int64)
            np.add.at(total, where, times)
            parts[:] = [(which, total)]
        if len(self._open) > MAX_OPEN_GROUPS:
            del self._open[next(iter(self._open))]  # stays open for ever: no host has so many


def _ratio(over: NDArray[Any], under: NDArray[Any]) -> NDArray[np.float64]:
    """over / under, NaN where `under` is zero."""
    found = np.full(len(over), np.nan)
    np.divide(over, under, out=found, where=under != 0)
    return found
