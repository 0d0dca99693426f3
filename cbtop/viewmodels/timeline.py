"""Make the timeline of a source's last steps: choose the records to show, and put them on lanes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cbtop.client.recent import Hole, RecentRecords
from cbtop.client.source_record import SourceRecord
from cbtop.exporters.records import TimedRecord
from cbtop.exporters.tracks import on_tracks
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.histograms import distinct
from cbtop.profiler.analysis.stats import sane
from cbtop.protocol.ring import FLAG_FAILED, FLAG_PLAIN, FLAG_UNCOUNTED, LANE_SHIFT, LANES
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.serving_messages import ServedRequest
from cbtop.protocol.vocabulary import LAUNCHES, NodeKind
from cbtop.viewmodels.lane_maker import GapNames, LaneMaker, is_step
from cbtop.viewmodels.lanes import (
    ADOPTED,
    BESIDE,
    BETWEEN_RECORDED,
    BETWEEN_STEPS,
    HOST,
    OUTSIDE,
    STEPS,
    Gap,
    Lane,
    TimelineSpan,
)
from cbtop.viewmodels.on_demand import Lazy, LazyValue
from cbtop.viewmodels.request_lanes import request_lanes

MAX_SPANS = 4_096  # At most this many records are in a timeline. One whole step is always shown, even if it has more.
MAX_LIKE_NEWEST = 256  # At most this many steps are in a timeline: as many as a wide screen has cells.
KINDS = (STEPS, HOST, ADOPTED, OUTSIDE)
# The newest step's lanes begin earlier than the step, by this share of its duration.
_BEFORE_NEWEST = 0.1
_ON_DEVICE = re.compile(r" on (?!cpu)\w")


@dataclass(frozen=True)
class TimelineView:
    """A timeline: the last steps of a source, of all phases.

    Times are in ns. `begin_ns` is on the clock of the source's host.
    """

    begin_ns: int
    length_ns: int
    newest_s: float | None  # Unix time when the newest step ended
    spans: int  # number of records on all lanes of the timeline
    older: int  # number of stored records before `begin_ns`, which are not shown
    # number of records that no lane can show, because their step has not ended or the step's record was lost
    unplaced: int
    missing: int  # number of records lost since the viewer receives records
    steps: int  # number of steps on all lanes of the timeline
    lanes: Lazy[tuple[Lane, ...]] = Lazy()
    # The lanes to show while the screen follows the newest step. A lane begins when nothing ran on it before the
    # step. Lanes and rows without records after that are left out.
    newest_lanes: Lazy[tuple[Lane, ...]] = Lazy()
    # The newest step with all its records, if possible of the shown phase.
    newest: Lazy[TimelineSpan | None] = Lazy()
    # durations of the last steps of the newest step's phase, by their end
    like_newest_ns: tuple[int, ...] = ()

    def newest_parts(self) -> list[tuple[Lane, TimelineSpan | Gap]]:
        """Return the newest step's parts (outermost bricks and gaps) on every lane, by their start."""
        if self.newest is None:
            return []
        begin_ns, end_ns = self.newest.start_ns, self.newest.end_ns
        parts: list[tuple[Lane, TimelineSpan | Gap]] = []
        for lane in self.lanes:
            parts += [(lane, span) for span in lane.rows[lane.bricks].spans]
            parts += [(lane, gap) for gap in lane.gaps]
        parts = [one for one in parts if begin_ns <= one[1].start_ns and one[1].end_ns <= end_ns]
        return sorted(parts, key=lambda one: (one[1].start_ns, one[1].end_ns))


def timeline_view(
    record: SourceRecord, phase: str | None, *, is_sample: bool, requests: Collection[ServedRequest] = ()
) -> TimelineView | None:
    """Return the timeline of `record`, or None without records. `is_sample` says that some steps left no records.

    `requests` become lanes. It is the same object until new records arrive.
    """
    of = record.recent.version, len(record.nodes), phase, is_sample
    known = _MADE.get(record.recent)
    if known is None or known[0] != of:
        known = _MADE[record.recent] = of, _made(record, phase, requests, is_sample=is_sample)
    return known[1]


_MADE: WeakKeyDictionary[RecentRecords, tuple[object, TimelineView | None]] = WeakKeyDictionary()


def _made(
    record: SourceRecord, phase: str | None, requests: Collection[ServedRequest], *, is_sample: bool
) -> TimelineView | None:
    recent, nodes = record.recent, record.nodes
    if not len(recent):
        return None
    batch = recent.records()
    batch = batch.only(sane(batch, len(nodes)))
    if not len(batch.node):
        return None
    found = _Records(batch, nodes)
    newest = found.newest_whole(recent, phase)
    begin_ns = found.begin(recent, newest)
    chosen = found.batch.start_ns >= begin_ns
    placed = chosen & found.is_placed
    if not placed.any():
        return None
    length_ns = int(found.batch.end_ns[placed].max()) - begin_ns
    holes = [hole for hole in (Hole(0, recent.horizon_ns), *recent.holes) if hole.end_ns > begin_ns]
    between = BETWEEN_RECORDED if is_sample else BETWEEN_STEPS
    make = _Lanes(found, placed, begin_ns, length_ns, holes, between)
    served = request_lanes(requests, begin_ns, length_ns)
    lanes = LazyValue(lambda: _titled([*make.all(), *served]))
    newest_lanes, newest_s = lanes, None
    like_newest_ns: tuple[int, ...] = ()
    newest_span: LazyValue[TimelineSpan | None] = LazyValue(lambda: None)
    if newest is not None:
        node, start_ns, end_ns = (int(column[newest]) for column in (batch.node, batch.start_ns, batch.end_ns))
        since_ns = start_ns - _BEFORE_NEWEST * (end_ns - start_ns)
        newest_lanes = LazyValue(lambda: _titled([*make.about(since_ns), *served]))
        newest_span = LazyValue(lambda: _span_of(newest_lanes.value(), node, start_ns - begin_ns))
        like_newest_ns = found.lengths_ns(placed & (batch.node == node))
        if record.hello is not None:
            newest_s = (record.hello.realtime_ns + end_ns - record.hello.monotonic_ns) / 1e9
    return TimelineView(
        begin_ns=begin_ns,
        length_ns=length_ns,
        newest_s=newest_s,
        spans=int(placed.sum()),
        older=int((~chosen).sum()),
        unplaced=int((chosen & ~found.is_placed).sum()),
        missing=recent.missing,
        steps=int((placed & found.is_step).sum()),
        like_newest_ns=like_newest_ns,
        lanes=lanes,
        newest_lanes=newest_lanes,
        newest=newest_span,
    )


def _span_of(lanes: Sequence[Lane], node: int, start_ns: int) -> TimelineSpan:
    spans = (span for lane in lanes for row in lane.rows for span in row.spans)
    return next(span for span in spans if (span.node, span.start_ns) == (node, start_ns))


class _Records:
    """A source's stored records as columns, and the step around each record."""

    def __init__(self, batch: Batch, nodes: NodeTable) -> None:
        self.batch = batch
        self.nodes = nodes
        self.is_plain = batch.are(FLAG_PLAIN)
        self.lane = np.where(self.is_plain, 0, batch.flags >> LANE_SHIFT & LANES - 1)
        self.step_of = nodes.column("step_of")[batch.node]
        self.is_step = self.step_of == batch.node
        self.is_placed = self._placed()

    def _placed(self) -> NDArray[np.bool_]:
        """Return a mask of the records that fit on a lane: steps, records in a known step, and records outside of
        steps.
        """
        found: NDArray[np.bool_] = self.is_step | (self.step_of < 0)
        start_ns, end_ns = self.batch.start_ns, self.batch.end_ns
        whole = self.is_step & ~self.is_plain
        group = self.step_of * LANES + self.lane
        for one in distinct(group[~found]).tolist():
            steps = np.flatnonzero(whole & (group == one))
            inside = np.flatnonzero(~found & (group == one))
            if len(steps):
                steps = steps[np.argsort(start_ns[steps], kind="stable")]
                # Steps may overlap in the shared lane. There, a record counts as part of a known step if some step
                # began before it and ends after it.
                until_ns = np.maximum.accumulate(end_ns[steps])
                at = np.searchsorted(start_ns[steps], start_ns[inside], "right") - 1
                found[inside] = (at >= 0) & (end_ns[inside] <= until_ns[np.maximum(at, 0)])
        return found

    def newest_whole(self, recent: RecentRecords, phase: str | None) -> int | None:
        """Return the index of the newest step with all its records, or None.

        Steps with recorded bricks are preferred, and among them steps of `phase`.
        """
        whole = self.is_step & (self.batch.start_ns >= recent.horizon_ns)
        for hole in recent.holes:
            whole &= (self.batch.end_ns < hole.begin_ns) | (self.batch.start_ns > hole.end_ns)
        of_phase = [node.id for node in self.nodes.children[None] if display_name(node) == phase]
        is_asked = np.isin(self.batch.node, of_phase)
        for chosen in (whole & ~self.is_plain & is_asked, whole & ~self.is_plain, whole):
            if (at := np.flatnonzero(chosen)).size:
                return int(at[self.batch.end_ns[at].argmax()])
        return None

    def begin(self, recent: RecentRecords, newest: int | None) -> int:
        """Return the start of the shown time, if possible the start of a step."""
        start_ns = np.sort(self.batch.start_ns)
        enough_ns = int(start_ns[max(0, len(start_ns) - MAX_SPANS)])
        steps = self.batch.start_ns[self.is_step & (self.batch.start_ns >= max(enough_ns, recent.horizon_ns))]
        begin_ns = int(steps.min()) if len(steps) else max(enough_ns, int(start_ns[0]))
        return begin_ns if newest is None else min(begin_ns, int(self.batch.start_ns[newest]))

    def lengths_ns(self, chosen: NDArray[np.bool_]) -> tuple[int, ...]:
        """Return the durations of the last records in `chosen`, by their end."""
        at = np.flatnonzero(chosen)
        at = at[np.argsort(self.batch.end_ns[at], kind="stable")][-MAX_LIKE_NEWEST:]
        return tuple((self.batch.end_ns[at] - self.batch.start_ns[at]).tolist())

    def quiet_from(self, at: NDArray[np.int64], moment_ns: float) -> tuple[NDArray[np.int64], int]:
        """Return the records of `at` after a pause, and when this pause began. `at` is sorted by start.

        It is the last pause before `moment_ns`. No record runs during the pause, so the other records nest as before.
        Without a pause, returns all records and 0.
        """
        start_ns = self.batch.start_ns[at]
        ended_ns = np.maximum.accumulate(self.batch.end_ns[at])[:-1]
        # `<` and not `<=`, because a record of zero length may be inside one that ends at the same moment.
        quiet = np.flatnonzero((ended_ns < start_ns[1:]) & (ended_ns <= moment_ns))
        return (at[quiet[-1] + 1 :], int(ended_ns[quiet[-1]])) if len(quiet) else (at, 0)


class _Lanes:
    """Makes the lanes of a timeline, those with steps first."""

    def __init__(
        self,
        found: _Records,
        placed: NDArray[np.bool_],
        begin_ns: int,
        length_ns: int,
        holes: Sequence[Hole],
        between: str,
    ) -> None:
        self._found, self._placed = found, placed
        self._begin_ns, self._length_ns, self._holes, self._between = begin_ns, length_ns, holes, between

    def all(self) -> Iterator[Lane]:
        """Yield the lanes with all records that fit on a lane."""
        for kind, at in self._groups:
            yield from self._of(kind, at, 0)

    def about(self, moment_ns: float) -> Iterator[Lane]:
        """Yield the lanes. Each begins at the last moment before `moment_ns` when nothing ran on it."""
        for kind, at in self._groups:
            near, since_ns = self._found.quiet_from(at, moment_ns)
            since_ns = max(0, since_ns - self._begin_ns)
            yield from self._of(kind, near, since_ns)

    def _of(self, kind: str, at: NDArray[np.int64], since_ns: int) -> Iterator[Lane]:
        """Yield lanes with the records at the indices `at`, which are sorted by start and may share lanes."""
        nodes, begin_ns = self._found.nodes, self._begin_ns
        tracks: dict[int, list[tuple[int, TimedRecord]]] = {}
        for track, depth, record in on_tracks(nodes, self._timed(at)):
            tracks.setdefault(track, []).append((depth, record))
        for _, records in sorted(tracks.items()):
            has_steps = any(is_step(nodes, record.node) for _, record in records)
            name = BESIDE if kind == STEPS and not has_steps else kind
            ran = self._ran if has_steps else None
            names = GapNames(nodes, ran, self._cut_short, self._between, begin_ns, self._holes)
            maker = LaneMaker(nodes, begin_ns, names, since_ns, has_steps=has_steps)
            yield maker.lane(name, records, self._length_ns)

    def _timed(self, at: NDArray[np.int64]) -> Iterator[TimedRecord]:
        batch = self._found.batch
        told = (batch.node, batch.start_ns, batch.end_ns, batch.elements, batch.flags, self._found.is_plain)
        columns = (column[at].tolist() for column in told)
        for node, start_ns, end_ns, elements, flags, is_plain in zip(*columns, strict=True):
            counted = None if flags & FLAG_UNCOUNTED else elements
            yield TimedRecord(node, start_ns, end_ns, counted, bool(flags & FLAG_FAILED), is_plain)

    @cached_property
    def _groups(self) -> list[tuple[str, NDArray[np.int64]]]:
        """Return the groups of records that may share lanes, as (kind of the group, records sorted by start)."""
        batch = self._found.batch
        at = np.flatnonzero(self._placed)
        at = at[np.lexsort((batch.node[at], -batch.end_ns[at], batch.start_ns[at]))]
        nodes, ran = self._found.nodes, distinct(batch.node[at])
        kind = nodes.made_of("timeline kinds", None, ran, lambda: _kind_of(nodes, ran.tolist()))[batch.node[at]]
        group = kind * LANES + np.where(kind == KINDS.index(OUTSIDE), 0, self._found.lane[at])
        return [(KINDS[one // LANES], at[group == one]) for one in distinct(group).tolist()]

    @cached_property
    def _ran(self) -> list[tuple[int, int]]:
        return _together(self._found, self._placed & self._found.is_step, self._begin_ns)

    @cached_property
    def _cut_short(self) -> list[tuple[int, int]]:
        chosen = ~self._placed & (self._found.batch.start_ns >= self._begin_ns)
        return _together(self._found, chosen, self._begin_ns)


def _kind_of(nodes: NodeTable, ran: Sequence[int]) -> NDArray[np.int64]:
    """Return the index of the kind (in KINDS) of each node id for the nodes that ran."""
    on_device = {node for node in ran if _ON_DEVICE.search(_timed_by(nodes, node))}
    device_steps = {nodes.step_of[node] for node in on_device}
    kinds = np.zeros(len(nodes) + 1, np.int64)
    for node in ran:
        step = nodes.step_of[node]
        is_host = bool(nodes[node].backend) and node not in on_device and step in device_steps
        inside = HOST if is_host else STEPS if step > 0 else OUTSIDE
        kinds[node] = KINDS.index(ADOPTED if _is_adopted(nodes, node) else inside)
    return kinds


def _titled(lanes: Iterable[Lane]) -> tuple[Lane, ...]:
    """Return a copy of the lanes, with numbers in names that occur more than once."""
    named: Counter[str] = Counter()
    found = []
    for lane in lanes:
        named[lane.name] += 1
        found.append(lane if named[lane.name] == 1 else replace(lane, name=f"{lane.name} {named[lane.name]}"))
    return tuple(found)


def _together(found: _Records, chosen: NDArray[np.bool_], begin_ns: int) -> list[tuple[int, int]]:
    """Return when any of the chosen records ran, as sorted and disjoint ranges."""
    at = np.flatnonzero(chosen)
    if not len(at):
        return []
    at = at[np.argsort(found.batch.start_ns[at], kind="stable")]
    start_ns, reached_ns = found.batch.start_ns[at], np.maximum.accumulate(found.batch.end_ns[at])
    apart = start_ns[1:] > reached_ns[:-1]
    begins, ends = start_ns[np.append(True, apart)], reached_ns[np.append(apart, True)]
    return list(zip((begins - begin_ns).tolist(), (ends - begin_ns).tolist(), strict=True))


def _is_adopted(nodes: NodeTable, node: int) -> bool:
    """Return whether the node ran in a different thread or task than its step."""
    at = node
    while at and nodes.kind_of[at] != NodeKind.ADOPTED:
        at = nodes.parent_of[at]
    return at > 0


def _timed_by(nodes: NodeTable, node: int) -> str:
    """Return the backend that timed the node. "" if the host timed only its launches."""
    backend = nodes[node].backend
    return "" if backend.endswith(LAUNCHES) else backend
