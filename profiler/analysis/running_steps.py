"""Collects the times of a step's bricks and other parts while it runs, and adds them to `closed_ns` when it ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.histograms import Column, distinct
from cbtop.profiler.analysis.sparse_columns import SparseColumns
from cbtop.protocol.ring import FLAG_CANCELLED, FLAG_LOOSE, FLAG_PLAIN, LANE_SHIFT, LANES
from cbtop.protocol.ring_reader import Batch

MAX_OPEN_GROUPS = 4096  # most groups of parts: one for each running step and lane; a real host has sixteen lanes
MAX_OPEN_PARTS = 64  # add up the stored parts of a running step after this many batches


@dataclass(frozen=True, slots=True)
class _Inside:
    """The records of a batch that belong to steps. They are grouped by step and lane. In a group, they are in order
    of arrival.
    """

    node: Column
    step: Column  # the step around the record's node, or the node itself if it is a step
    group: Column  # a number for the record's step and lane
    outer: Column  # the parent node, if its time includes this record's time
    start_ns: Column
    end_ns: Column
    duration_ns: Column
    is_cancelled: NDArray[np.bool_]
    is_end: NDArray[np.bool_]  # True for a record of a step, which ends this step


@dataclass(frozen=True, slots=True)
class _Fate:
    """What happens to the time of each record: it is added to `closed_ns`, dropped, or stored until the step ends."""

    ended_in: Column  # the record that ends this step, as an index into the ends of this batch
    follows: NDArray[np.bool_]  # whether a step of the same lane has ended earlier in this batch
    late: NDArray[np.bool_]  # whether the record came after its step had ended
    dropped: NDArray[np.bool_]  # whether the record's step was cancelled
    closing: NDArray[np.bool_]
    still_open: NDArray[np.bool_]


class RunningSteps:
    """The bricks and other parts of running steps, grouped by step and lane.

    Steps that run at the same time have different lanes, and a lane's records are in order. So records after the end
    of a step belong to the lane's next step. A record that came too late is recognised by its time. Many steps may
    share the last lane. There, the end of a step closes all earlier parts, and the end of a cancelled step closes
    none.
    """

    def __init__(self) -> None:
        # Group -> the end of its last step, whether this step was cancelled, and how long it ran outside of its
        # parts.
        self._ended: dict[int, tuple[int, bool, int]] = {}
        # Group -> node ids, and two rows of times: the whole time of each part, and its overlap with earlier parts.
        self._open: dict[int, list[tuple[Column, NDArray[np.int64]]]] = {}
        # Group -> outer node -> start and end of its last part.
        self._last: dict[int, dict[int, tuple[int, int]]] = {}

    def is_open(self, step: int, lane: int) -> bool:
        """Return whether a step of this node is running in this lane and has a part that has ended."""
        return step * LANES + lane in self._open

    def close(
        self, batch: Batch, step_of: Column, part_of: Column, closed_ns: Column, sparse: SparseColumns
    ) -> Column:
        """Add the times of all ended steps' parts to `closed_ns`.

        Counts the excess of parts that took longer than their step. It shows an error, because nested calls cannot
        take longer than the call around them. Also counts how long parts of one node ran at the same time, for
        example on two streams.

        Returns the changed nodes, some of which may not be in the batch.
        """
        inside = _inside(batch, step_of, part_of)
        ends = np.flatnonzero(inside.is_end)
        fate = self._fate(inside, ends)
        node, duration_ns, closing = inside.node, inside.duration_ns, fate.closing
        shared_ns = self._shared_ns(inside, _instances(inside, fate, len(ends)), fate.follows)
        left_ns = self._left_ns(inside, fate, ends, shared_ns, sparse)
        np.add.at(closed_ns, node[closing], duration_ns[closing])
        sparse.add("cancelled_ns", node[fate.dropped], duration_ns[fate.dropped])
        shared = closing & (shared_ns > 0)
        sparse.add("overlap_ns", inside.outer[shared], shared_ns[shared])
        concerned = [node[closing | fate.dropped], inside.step[fate.late], inside.outer[shared]]
        for at, room_ns in zip(ends.tolist(), left_ns.tolist(), strict=True):
            concerned += self._end(inside, at, room_ns, part_of, closed_ns, sparse)
        for group in distinct(inside.group[fate.still_open]).tolist():
            here = fate.still_open & (inside.group == group)
            self._keep_open(group, node[here], np.stack([duration_ns[here], shared_ns[here]]))
            self._keep_last(group, inside.outer[here], inside.start_ns[here], inside.end_ns[here])
        while len(self._ended) > MAX_OPEN_GROUPS:
            del self._ended[next(iter(self._ended))]
        return np.concatenate(concerned)

    def _fate(self, inside: _Inside, ends: Column) -> _Fate:
        """Find for each record the record that ends its step. It may be in an earlier batch."""
        group, end_ns = inside.group, inside.end_ns
        if len(ends):
            found = np.searchsorted(ends, np.arange(len(group)))
            end_of, before = ends[np.minimum(found, len(ends) - 1)], ends[np.maximum(found - 1, 0)]
            within = (found < len(ends)) & (group[end_of] == group)
            lies_in = within & (inside.start_ns >= inside.start_ns[end_of]) & (end_ns <= end_ns[end_of])
            # Whether a step of the same lane ended earlier in this batch.
            follows = (found > 0) & (group[before] == group)
            dropped = within & inside.is_cancelled[end_of]
            ended_ns, was_cancelled = np.where(follows, end_ns[before], -1), follows & inside.is_cancelled[before]
        else:
            found = np.zeros(len(group), np.int64)
            within = lies_in = dropped = follows = was_cancelled = np.zeros(len(group), np.bool_)
            ended_ns = np.full(len(group), -1)
        for one in distinct(group[~follows]).tolist():
            if one in self._ended:
                of_one = ~follows & (group == one)
                ended_ns = np.where(of_one, self._ended[one][0], ended_ns)
                was_cancelled = np.where(of_one, self._ended[one][1], was_cancelled)
        late = ~inside.is_end & ~lies_in & (end_ns <= ended_ns) & (inside.start_ns < ended_ns)
        dropped = np.where(late, was_cancelled, dropped)
        return _Fate(
            ended_in=np.where(late, found - 1, found),
            follows=follows,
            late=late,
            dropped=dropped,
            closing=(within | late) & ~dropped,
            still_open=~(within | late),
        )

    def _left_ns(
        self, inside: _Inside, fate: _Fate, ends: Column, shared_ns: Column, sparse: SparseColumns
    ) -> Column:
        """Return how much of each ended step's time is outside of its parts in this batch.

        If parts of an earlier step arrive only in this batch, the value of that step is corrected, too.
        """
        found = inside.duration_ns[ends]
        counted = fate.closing & ~inside.is_end & (inside.outer == inside.step)
        in_batch = counted & (fate.follows | ~fate.late)
        alone_ns = inside.duration_ns - shared_ns
        np.subtract.at(found, fate.ended_in[in_batch], alone_ns[in_batch])
        before = counted & ~in_batch
        self._note_late(inside.group[before], alone_ns[before], sparse)
        return found

    def _end(
        self, inside: _Inside, at: int, left_ns: int, part_of: Column, closed_ns: Column, sparse: SparseColumns
    ) -> list[Column]:
        """End the step that the record at index `at` ends, and add up its parts from earlier batches. Returns the
        changed nodes.
        """
        group, step = int(inside.group[at]), int(inside.step[at])
        is_cancelled = bool(inside.is_cancelled[at])
        concerned = []
        self._last.pop(group, None)
        for node, (part_ns, shared_ns) in self._open.pop(group, ()):
            if is_cancelled:
                sparse.add("cancelled_ns", node, part_ns)
            else:
                np.add.at(closed_ns, node, part_ns)
                left_ns -= int((part_ns - shared_ns)[part_of[node] == step].sum())
                shared = shared_ns > 0
                sparse.add("overlap_ns", part_of[node[shared]], shared_ns[shared])
                concerned.append(part_of[node[shared]])
            concerned.append(node)
        if group % LANES == LANES - 1:
            sparse.add("crowded", inside.step[at : at + 1], np.ones(1, np.int64))
        elif not is_cancelled:
            _note_over(sparse, step, 0, left_ns)
        self._ended[group] = int(inside.end_ns[at]), is_cancelled, left_ns
        return concerned

    def _shared_ns(self, inside: _Inside, instance: Column, follows: NDArray[np.bool_]) -> Column:
        """Return how long each record overlaps earlier parts of the same `outer` node in the same step.

        0 in the shared lane, where records of different steps cannot be told apart. Steps of one lane may overlap
        if each is one call of a library, in several threads. Their parts do not overlap then.
        """
        group, outer, start_ns, end_ns = inside.group, inside.outer, inside.start_ns, inside.end_ns
        found = np.zeros(len(group), np.int64)
        parts = np.flatnonzero((outer > 0) & (group % LANES != LANES - 1))
        if not len(parts):
            return found
        key = instance[parts] * (int(outer.max()) + 1) + outer[parts]
        order = np.argsort(key, kind="stable")
        at, key = parts[order], key[order]
        begun, ended = start_ns[at], end_ns[at]
        is_first = np.append(True, key[1:] != key[:-1])
        firsts, is_beside = np.flatnonzero(is_first), ~is_first & np.append(False, begun[1:] < ended[:-1])
        which = np.logical_or.reduceat(is_beside, firsts)
        nothing = 0, 0
        before = [nothing] * len(firsts)
        if self._last:
            stored = np.where(follows[at[firsts]], -1, group[at[firsts]])  # -1: its step began in this batch
            around = zip(stored.tolist(), outer[at[firsts]].tolist(), strict=True)
            before = [self._last.get(one, {}).get(node, nothing) for one, node in around]
            which |= np.array([ended_ns for _, ended_ns in before]) > np.minimum.reduceat(begun, firsts)
        lasts = np.append(firsts[1:], len(at))
        for one in np.flatnonzero(which).tolist():
            here = at[firsts[one] : lasts[one]]
            here = here[np.argsort(start_ns[here], kind="stable")]
            times = zip(start_ns[here].tolist(), end_ns[here].tolist(), strict=True)
            found[here] = list(_covered_ns(times, *before[one]))
        return found

    def _keep_last(self, group: int, outer: Column, start_ns: Column, end_ns: Column) -> None:
        """Store the last part of each outer node of a running step, because parts of a later batch may overlap it."""
        known = self._last.setdefault(group, {})
        order = np.lexsort((end_ns, outer))
        for at in order[np.flatnonzero(np.append(outer[order][1:] != outer[order][:-1], True))].tolist():
            one, times = int(outer[at]), (int(start_ns[at]), int(end_ns[at]))
            known[one] = max(known.get(one, (0, 0)), times, key=lambda each: each[1])
        if len(self._last) > MAX_OPEN_GROUPS:
            del self._last[next(iter(self._last))]

    def _note_late(self, groups: Column, duration: Column, sparse: SparseColumns) -> None:
        """Handle parts that arrived after their step had ended: subtract them from the stored time outside of its
        parts.
        """
        for group in distinct(groups).tolist():
            end_ns, is_cancelled, left_ns = self._ended[group]
            now_ns = left_ns - int(duration[groups == group].sum())
            if group % LANES != LANES - 1:
                _note_over(sparse, group // LANES, left_ns, now_ns)
            self._ended[group] = end_ns, is_cancelled, now_ns

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
            # A real host has fewer running steps, so drop the parts of the oldest one.
            del self._open[next(iter(self._open))]


def _instances(inside: _Inside, fate: _Fate, ends: int) -> Column:
    """Return a number for the step of each record, the same for all records of one step in a batch with `ends`."""
    is_known = (fate.closing | fate.dropped) & (fate.follows | ~fate.late)
    return np.where(is_known, fate.ended_in, ends + inside.group)


def _inside(batch: Batch, step_of: Column, part_of: Column) -> _Inside:
    lane = (batch.flags >> LANE_SHIFT) & (LANES - 1)
    is_cancelled = batch.are(FLAG_CANCELLED)
    in_books = (step_of[batch.node] >= 0) & ~batch.are(FLAG_LOOSE) & ~batch.are(FLAG_PLAIN)
    inside = np.flatnonzero(in_books & ~(is_cancelled & (lane == LANES - 1)))
    step = step_of[batch.node[inside]]
    group = step * LANES + lane[inside]
    order = np.argsort(group, kind="stable")
    inside = inside[order]
    step, node = step[order], batch.node[inside]
    start_ns, end_ns = batch.start_ns[inside], batch.end_ns[inside]
    return _Inside(
        node=node,
        step=step,
        group=group[order],
        outer=part_of[node],
        start_ns=start_ns,
        end_ns=end_ns,
        duration_ns=end_ns - start_ns,
        is_cancelled=is_cancelled[inside],
        is_end=node == step,
    )


def _note_over(sparse: SparseColumns, step: int, before_ns: int, left_ns: int) -> None:
    """Count by how much a step's parts take longer than the step (the excess).

    `left_ns` is the step's time outside of its parts. It is negative if there is an excess. `before_ns` is its
    earlier value, so that only the increase is counted.
    """
    more_ns = max(0, -left_ns) - max(0, -before_ns)
    if more_ns:
        over, over_ns = sparse["over"], sparse["over_ns"]
        over[step] = over.get(step, 0) + (before_ns >= 0)
        over_ns[step] = over_ns.get(step, 0) + more_ns


def _covered_ns(times_ns: Iterable[tuple[int, int]], begun_ns: int, ended_ns: int) -> Iterator[int]:
    """Yield how much of each interval is covered by earlier ones and by `begun_ns` to `ended_ns`. The intervals are
    in order of their starts.
    """
    reached_ns = 0
    for start_ns, end_ns in times_ns:
        in_these_ns = max(0, min(end_ns, reached_ns) - start_ns)
        yield in_these_ns + max(0, min(end_ns, ended_ns) - max(start_ns, begun_ns, reached_ns))
        reached_ns = max(reached_ns, end_ns)
