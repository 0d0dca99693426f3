"""Number the steps of a process, and find the step of each call."""

# Rules
# - Steps are numbered from 1 by their ends. A cancelled step has no number.
# - A call belongs to the next step that ends in its lane. A late call belongs to the previous step: it ended before
#   this step did, and does not fit into the next.
# - Steps without their own lane share the last lane. The step of a call there is unknown.
# - A step's sequences and cached positions follow directly after it.
# - A record waits until its step has ended. If more than MAX_WAITING wait, all of them are passed on without a step.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbtop.exporters.base import RecordedProcess
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.record_batch import joined
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_CANCELLED, FLAG_LOOSE, FLAG_PLAIN, LANE_SHIFT, LANES
from cbtop.protocol.ring_reader import Batch

MAX_WAITING = 1 << 18
NO_STEP = 0
UNKNOWN = -1
MAX_GROUPS = 4_096  # The last steps of at most this many step nodes and lanes are stored.

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NumberedCalls:
    """Calls with the numbers of their steps. NO_STEP: outside of steps, or unknown.

    For a step's record, `sequences` is its number of sequences, and `cached` the cached positions of each before the
    step. UNKNOWN if they are not reported, and for other records.
    """

    calls: Batch
    step: Column
    sequences: Column
    cached: Column

    def only(self, chosen: NDArray[np.bool_]) -> NumberedCalls:
        """Return the calls that the mask `chosen` selects."""
        return NumberedCalls(self.calls.only(chosen), self.step[chosen], self.sequences[chosen], self.cached[chosen])


@dataclass(frozen=True, slots=True)
class _Ended:
    """The last step that ended in a lane: its number, and when it ended."""

    number: int
    end_ns: int


def numbered(recorded: RecordedProcess) -> Iterator[NumberedCalls]:
    """Yield all calls of `recorded`, in order. At most MAX_WAITING records and one batch of records are in memory."""
    yield from _Numbering(recorded.nodes).of(recorded.records.batches())


class _Numbering:
    def __init__(self, table: NodeTable) -> None:
        self._step_of = table.column("step_of")
        self._count = 0
        self._last: dict[int, _Ended] = {}  # for each step node and lane: the last step that ended in the lane

    def of(self, batches: Iterable[Batch]) -> Iterator[NumberedCalls]:
        waiting: list[Batch] = []
        for batch in batches:
            together = joined([*waiting, batch])
            found, rest = self._numbered(together, is_last=len(together.node) > MAX_WAITING)
            waiting = [rest]
            yield found
        yield self._numbered(joined(waiting), is_last=True)[0]

    def _numbered(self, batch: Batch, *, is_last: bool) -> tuple[NumberedCalls, Batch]:
        """Return two parts of `batch`: the calls at the beginning that have a known step, and the rest.

        If `is_last`, all calls are in the first part.
        """
        step_of = self._step_of[batch.node]
        is_step = step_of == batch.node
        odd = batch.are(FLAG_AMOUNTS) | batch.are(FLAG_LOOSE)
        ends = np.flatnonzero(is_step & ~odd)
        is_counted = ~batch.are(FLAG_CANCELLED)[ends]
        of_end = np.where(is_counted, self._count + np.cumsum(is_counted), NO_STEP)
        lane = (batch.flags >> LANE_SHIFT) & (LANES - 1)
        inside = ~is_step & ~odd & (step_of > 0) & (lane != LANES - 1)
        step = np.full(len(batch.node), NO_STEP)
        step[ends] = of_end
        group = step_of * LANES + lane
        has_parts = ends[~batch.are(FLAG_PLAIN)[ends]]
        is_open = np.zeros(len(batch.node), np.bool_)
        for one in np.unique(group[inside]).tolist():
            here = np.flatnonzero(inside & (group == one))
            step[here], is_open[here] = self._steps_of(batch, here, has_parts[group[has_parts] == one], step, one)
        # Leave out the last step, because the record with its amounts may still follow.
        limit = len(batch.node) if is_last else min(_first(is_open), int(ends[-1]) if len(ends) else len(batch.node))
        sequences, cached = self._amounts(batch, ends, is_step)
        self._remember(batch, group, has_parts[has_parts < limit], step)
        self._count += int(np.count_nonzero(is_counted & (ends < limit)))
        taken = np.arange(len(batch.node)) < limit
        calls = taken & ~batch.are(FLAG_AMOUNTS) & ~batch.are(FLAG_CANCELLED)
        return NumberedCalls(batch, step, sequences, cached).only(calls), batch.only(~taken)

    def _steps_of(
        self, batch: Batch, here: Column, ends: Column, step: Column, group: int
    ) -> tuple[Column, NDArray[np.bool_]]:
        """Return for each call in `here` the number of its step, and whether it must wait, because the step has not
        ended yet.

        `ends` are the ends of steps in the same lane.
        """
        last = self._last.get(group, _Ended(NO_STEP, UNKNOWN))
        numbers = np.concatenate(([last.number], step[ends], [NO_STEP]))
        ended_ns = np.concatenate(([last.end_ns], batch.end_ns[ends]))
        # No call may seem to be in the step after the last ended one, so that gets the largest start time.
        begun_ns = np.concatenate((batch.start_ns[ends], [np.iinfo(np.int64).max]))
        at = np.searchsorted(ends, here)
        start_ns, end_ns, before_ns = batch.start_ns[here], batch.end_ns[here], ended_ns[at]
        is_late = (end_ns <= before_ns) & (start_ns < before_ns) & (start_ns < begun_ns[at])
        return numbers[np.where(is_late, at, at + 1)], ~is_late & (at == len(ends))

    def _amounts(self, batch: Batch, ends: Column, is_step: NDArray[np.bool_]) -> tuple[Column, Column]:
        sequences, cached = np.full(len(batch.node), UNKNOWN), np.full(len(batch.node), UNKNOWN)
        said = np.flatnonzero(batch.are(FLAG_AMOUNTS) & is_step)
        before = np.searchsorted(ends, said) - 1
        said, before = said[before >= 0], before[before >= 0]
        own = batch.node[ends[before]] == batch.node[said]
        sequences[ends[before[own]]] = batch.start_ns[said[own]]
        cached[ends[before[own]]] = batch.end_ns[said[own]]
        return sequences, cached

    def _remember(self, batch: Batch, group: Column, ends: Column, step: Column) -> None:
        for one, at in dict(zip(group[ends].tolist(), ends.tolist(), strict=True)).items():
            self._last.pop(one, None)
            self._last[one] = _Ended(int(step[at]), int(batch.end_ns[at]))
        while len(self._last) > MAX_GROUPS:
            del self._last[next(iter(self._last))]


def _first(mask: NDArray[np.bool_]) -> int:
    """Return the index of the first True in `mask`, or the length of `mask` if it has no True."""
    return int(mask.argmax()) if mask.any() else len(mask)
