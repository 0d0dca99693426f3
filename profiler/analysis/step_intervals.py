"""When steps ran, as intervals of time."""

from __future__ import annotations

import numpy as np

from cbtop.profiler.analysis.histograms import Column, distinct
from cbtop.profiler.analysis.node_columns import ANY_STEP
from cbtop.profiler.analysis.sparse_columns import SparseColumns
from cbtop.protocol.ring_reader import Batch

# In sums of squares, a step has at most this many tokens, so that the sums do not overflow.
MOST_SQUARED = 1 << 32
# Store at least this many of the newest intervals per step node. A step that is recorded after all of them may count
# its overlap with other steps twice.
MAX_KEPT_INTERVALS = 1 << 12
MAX_SAID_INTERVALS = 1 << 10  # maximum number of intervals in one message
MAX_PARTS = 64  # join the arrays of a step node's intervals if there are more than this
NONE = np.zeros(0, np.int64)


class StepIntervals:
    """The disjoint intervals when steps ran, by step node. ANY_STEP has the intervals of all steps together."""

    def __init__(self) -> None:
        self._intervals: dict[int, list[tuple[Column, Column]]] = {}  # starts and ends

    def since(self, from_ns: int, most: int) -> tuple[Column, Column, Column]:
        """Return the intervals when steps ran, as columns: node, begin in ns, length in ns.

        A node's intervals are disjoint and ascending, and end at `from_ns` or later. At most `most` are returned for
        all nodes together. If there are more, each node's earliest intervals are left out.
        """
        found = [(NONE, NONE, NONE)]
        for step, parts in sorted(self._intervals.items()):
            columns = zip(*(part for part in parts if part[1][-1] >= from_ns), strict=True)
            begin, end = [np.concatenate(column) for column in columns] or (NONE, NONE)
            first = max(int(np.searchsorted(end, from_ns)), len(end) - most)
            begin, end = begin[first:], end[first:]
            most -= len(end)
            found.append((np.full(len(end), step), begin, end - begin))
        node, begin, length = (np.concatenate(column) for column in zip(*found, strict=True))
        return node, begin, length

    def cover(self, batch: Batch, step_of: Column, sparse: SparseColumns) -> None:
        """Add the steps of `batch` to the intervals, to the time with running steps, and to the sums of squared
        tokens.

        Time counts once if several steps ran at the same time.
        """
        if len(batch.node):
            first_ns = int(batch.start_ns.min())
            sparse["first_ns"][ANY_STEP] = min(sparse["first_ns"].get(ANY_STEP, first_ns), first_ns)
        outermost = step_of[batch.node] == batch.node
        for step in distinct(batch.node[outermost]).tolist():
            here = batch.node == step
            start, end = batch.start_ns[here], batch.end_ns[here]
            for name, moment in (("first_ns", int(start.min())), ("last_ns", int(end.max()))):
                known = sparse[name].get(step, moment)
                sparse[name][step] = min(known, moment) if name == "first_ns" else max(known, moment)
            tokens = np.minimum(batch.elements[here], MOST_SQUARED).astype(np.float64)
            if squared := int(np.dot(tokens, tokens)):
                sparse["squared_tokens"][step] = sparse["squared_tokens"].get(step, 0) + squared
            self._cover_step(step, start, end, sparse)
        if outermost.any():
            self._cover_step(ANY_STEP, batch.start_ns[outermost], batch.end_ns[outermost], sparse)

    def _cover_step(self, step: int, start: Column, end: Column, sparse: SparseColumns) -> None:
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
        sparse["union_ns"][step] = sparse["union_ns"].get(step, 0) + more
        if len(parts) >= MAX_PARTS:  # join the parts, which are ascending and disjoint
            older = tuple(np.concatenate(column)[-MAX_KEPT_INTERVALS:] for column in zip(*parts, strict=True))
            parts[:] = [(older[0], older[1])]
        parts.append((starts[-MAX_KEPT_INTERVALS:], ends[-MAX_KEPT_INTERVALS:]))
        while len(parts) > 1 and sum(len(part[0]) for part in parts) > 2 * MAX_KEPT_INTERVALS:
            parts.pop(0)
