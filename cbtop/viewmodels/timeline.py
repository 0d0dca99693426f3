"""The last steps, record by record, on lanes: what ran when, and what lay between.

What a lane is
- Threads are not recorded. What ran one after the other, or inside of each other, takes one lane; a step that ran
  while another did takes the next, and so does what ran beside its like inside one step.
- What other threads or tasks did for a step (adopted work), what ran outside of steps, and what the host timed of a
  step that its device timed have lanes of their own.
- On every lane the outermost bricks and the gaps between them add up to the whole timeline, to the nanosecond.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cbtop.client.recent import Hole, RecentRecords
from cbtop.client.store import SourceRecord
from cbtop.exporters.records import TimedRecord
from cbtop.exporters.tracks import on_tracks
from cbtop.profiler.books import BETWEEN_LAYERS, INSIDE_LAYERS
from cbtop.profiler.graph.node_table import NodeTable
from cbtop.profiler.graph.nodes import display_name
from cbtop.profiler.stats import sane
from cbtop.protocol.ring import FLAG_FAILED, FLAG_PLAIN, FLAG_UNCOUNTED, LANE_SHIFT, LANES, Batch
from cbtop.protocol.vocabulary import LAUNCHES, BrickCategory, NodeKind

MAX_SPANS = 4_096  # so many records are shown, or one whole step of more
# The gaps that the books do not name.
BETWEEN_STEPS, BETWEEN_RECORDED = "between steps", "between recorded steps"
NOT_LOOKED_INTO = "not recorded inside"  # a step that was timed as a whole
UNATTRIBUTED = "unattributed"
NOTHING = "no brick recorded"
ELSEWHERE = "a step on another lane"
AFTER = "after the last step"
UNNAMED = "unnamed gap"  # records are missing there: what ran is not known
# Lanes
BRICKS = "bricks"  # of the parts of a lane, what is no gap
STEPS, BESIDE, HOST, ADOPTED, OUTSIDE = "steps", "beside steps", "host", "adopted", "outside steps"
KINDS = (STEPS, HOST, ADOPTED, OUTSIDE)
_ON_DEVICE = re.compile(r" on (?!cpu)\w")


@dataclass(frozen=True, slots=True)
class Span:
    """One record. `start_ns` counts from where the timeline begins; `level` is its row: steps, layers, bricks."""

    start_ns: int
    duration_ns: int
    level: int
    node: int
    name: str
    kind: NodeKind
    category: BrickCategory | None
    where: tuple[str, ...]  # what it lies in, from the step down
    backend: str
    elements: int | None  # None: not counted
    is_failed: bool = False
    is_plain: bool = False  # a step that was timed as a whole

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Gap:
    """Time in which no brick of a lane ran."""

    start_ns: int
    duration_ns: int
    name: str
    where: tuple[str, ...] = ()  # what it lies in, from the step down

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Row:
    """Spans of one lane that lie side by side, by their start."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """Rows from the steps down; the spans of the row number `bricks` and the `gaps` add up to the whole timeline."""

    name: str
    backends: tuple[str, ...]
    rows: tuple[Row, ...]
    gaps: tuple[Gap, ...]
    bricks: int  # the row of the outermost bricks

    def parts_ns(self, begin_ns: int, end_ns: int) -> dict[str, int]:
        """What the time from one moment to another is: `bricks`, and its gaps by their names, the longest first."""
        found = {BRICKS: 0}
        parts: list[Span | Gap] = [*self.rows[self.bricks].spans, *self.gaps]
        for part in parts:
            inside_ns = min(part.end_ns, end_ns) - max(part.start_ns, begin_ns)
            if inside_ns > 0:
                name = part.name if isinstance(part, Gap) else BRICKS
                found[name] = found.get(name, 0) + inside_ns
        return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True)
class TimelineView:
    """The last steps of a source, of all phases. Times are ns; `begin_ns` is on the clock of its host."""

    begin_ns: int
    length_ns: int
    lanes: tuple[Lane, ...]
    newest: Span | None  # the newest step that was recorded whole, of the phase that is shown if there is one
    newest_s: float | None  # Unix time of its end
    spans: int  # drawn
    older: int  # records that are here and began before
    unplaced: int  # records in steps that have not ended, or whose own record is missing
    missing: int  # records that were lost since the timeline was followed
    steps: int  # drawn

    def newest_parts(self) -> list[tuple[Lane, Span | Gap]]:
        """The outermost bricks in the newest step and the gaps between them, on every lane, by their start."""
        if self.newest is None:
            return []
        begin_ns, end_ns = self.newest.start_ns, self.newest.end_ns
        parts: list[tuple[Lane, Span | Gap]] = []
        for lane in self.lanes:
            parts += [(lane, span) for span in lane.rows[lane.bricks].spans]
            parts += [(lane, gap) for gap in lane.gaps]
        parts = [one for one in parts if begin_ns <= one[1].start_ns and one[1].end_ns <= end_ns]
        return sorted(parts, key=lambda one: (one[1].start_ns, one[1].end_ns))


def timeline_view(record: SourceRecord, phase: str | None, *, is_sample: bool) -> TimelineView | None:
    """The last steps of `record`; None where no record has come. `is_sample`: steps may have left nothing.

    It is the same object for as long as nothing has come.
    """
    of = record.recent.version, len(record.nodes), phase, is_sample
    known = _MADE.get(record.recent)
    if known is None or known[0] != of:
        known = _MADE[record.recent] = of, _made(record, phase, is_sample=is_sample)
    return known[1]


_MADE: WeakKeyDictionary[RecentRecords, tuple[object, TimelineView | None]] = WeakKeyDictionary()


def _made(record: SourceRecord, phase: str | None, *, is_sample: bool) -> TimelineView | None:
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
    end_ns = int(found.batch.end_ns[placed].max())
    holes = [Hole(0, recent.horizon_ns), *recent.holes]
    between = BETWEEN_RECORDED if is_sample else BETWEEN_STEPS
    lanes = tuple(_lanes(found, placed, begin_ns, end_ns - begin_ns, holes, between))
    spans = [span for lane in lanes for row in lane.rows for span in row.spans]
    newest_span, newest_s = None, None
    if newest is not None:
        node, start_ns = int(found.batch.node[newest]), int(found.batch.start_ns[newest]) - begin_ns
        newest_span = next(span for span in spans if (span.node, span.start_ns) == (node, start_ns))
        if record.hello is not None:
            end = begin_ns + newest_span.end_ns
            newest_s = (record.hello.realtime_ns + end - record.hello.monotonic_ns) / 1e9
    return TimelineView(
        begin_ns=begin_ns,
        length_ns=end_ns - begin_ns,
        lanes=lanes,
        newest=newest_span,
        newest_s=newest_s,
        spans=len(spans),
        older=int((~chosen).sum()),
        unplaced=int((chosen & ~found.is_placed).sum()),
        missing=recent.missing,
        steps=sum(_is_step(nodes, span.node) for span in spans),
    )


class _Records:
    """The records that are kept, in columns, and what each lies in."""

    def __init__(self, batch: Batch, nodes: NodeTable) -> None:
        self.batch = batch
        self.nodes = nodes
        self.is_plain = batch.are(FLAG_PLAIN)
        self.lane = np.where(self.is_plain, 0, batch.flags >> LANE_SHIFT & LANES - 1)
        self.step_of = nodes.column("step_of")[batch.node]
        self.is_step = self.step_of == batch.node
        self.is_placed = self._placed()

    def _placed(self) -> NDArray[np.bool_]:
        """Which are steps, lie in one that is here, or in none."""
        found: NDArray[np.bool_] = self.is_step | (self.step_of < 0)
        start_ns, end_ns = self.batch.start_ns, self.batch.end_ns
        whole = self.is_step & ~self.is_plain
        group = self.step_of * LANES + self.lane
        for one in np.unique(group[~found]):
            steps = np.flatnonzero(whole & (group == one))
            inside = np.flatnonzero(~found & (group == one))
            if len(steps):
                steps = steps[np.argsort(start_ns[steps], kind="stable")]
                # Of those that began before it, one has ended after it: in the shared lane several may run.
                until_ns = np.maximum.accumulate(end_ns[steps])
                at = np.searchsorted(start_ns[steps], start_ns[inside], "right") - 1
                found[inside] = (at >= 0) & (end_ns[inside] <= until_ns[np.maximum(at, 0)])
        return found

    def newest_whole(self, recent: RecentRecords, phase: str | None) -> int | None:
        """The newest step that lies whole in what is here: a recorded one of `phase`, or else another."""
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
        """From when on records are shown: from the start of a step, where there is one."""
        start_ns = np.sort(self.batch.start_ns)
        enough_ns = int(start_ns[max(0, len(start_ns) - MAX_SPANS)])
        steps = self.batch.start_ns[self.is_step & (self.batch.start_ns >= max(enough_ns, recent.horizon_ns))]
        begin_ns = int(steps.min()) if len(steps) else max(enough_ns, int(start_ns[0]))
        return begin_ns if newest is None else min(begin_ns, int(self.batch.start_ns[newest]))


def _lanes(
    found: _Records, placed: NDArray[np.bool_], begin_ns: int, length_ns: int, holes: Sequence[Hole], between: str
) -> Iterator[Lane]:
    """Every lane, those of steps first."""
    nodes = found.nodes
    ran = _together(found, placed & found.is_step, begin_ns)
    groups = _groups(found, placed)
    named: dict[str, int] = {}
    for kind, number in sorted(groups, key=lambda key: (KINDS.index(key[0]), key[1])):
        tracks: dict[int, list[tuple[int, TimedRecord]]] = {}
        for track, depth, record in on_tracks(nodes, groups[kind, number]):
            tracks.setdefault(track, []).append((depth, record))
        for _, records in sorted(tracks.items()):
            has_steps = any(_is_step(nodes, record.node) for _, record in records)
            name = BESIDE if kind == STEPS and not has_steps else kind
            named[name] = named.get(name, 0) + 1
            title = name if named[name] == 1 else f"{name} {named[name]}"
            names = _GapNames(nodes, ran if has_steps else None, between, begin_ns, holes)
            yield _LaneMaker(nodes, begin_ns, names, has_steps=has_steps).lane(title, records, length_ns)


def _groups(found: _Records, placed: NDArray[np.bool_]) -> dict[tuple[str, int], list[TimedRecord]]:
    """The records that may share lanes, by what they are and the lane that they carry; each group by start."""
    batch, nodes = found.batch, found.nodes
    at = np.flatnonzero(placed)
    at = at[np.lexsort((batch.node[at], -batch.end_ns[at], batch.start_ns[at]))]
    told = (batch.node, batch.start_ns, batch.end_ns, batch.elements, batch.flags)
    columns = (column[at].tolist() for column in (*told, found.is_plain, found.lane))
    on_device = {node for node in np.unique(batch.node[at]).tolist() if _ON_DEVICE.search(_timed_by(nodes, node))}
    device_steps = {nodes.step_of[node] for node in on_device}
    kinds: dict[int, str] = {}
    groups: dict[tuple[str, int], list[TimedRecord]] = {}
    for node, start_ns, end_ns, elements, flags, is_plain, lane in zip(*columns, strict=True):
        kind = kinds.get(node)
        if kind is None:
            step = nodes.step_of[node]
            is_host = bool(nodes[node].backend) and node not in on_device and step in device_steps
            inside = HOST if is_host else STEPS if step > 0 else OUTSIDE
            kind = kinds[node] = ADOPTED if _is_adopted(nodes, node) else inside
        counted = None if flags & FLAG_UNCOUNTED else elements
        record = TimedRecord(node, start_ns, end_ns, counted, bool(flags & FLAG_FAILED), is_plain)
        groups.setdefault((kind, 0 if kind == OUTSIDE else lane), []).append(record)
    return groups


class _LaneMaker:
    """Makes a lane of the records of one track."""

    def __init__(self, nodes: NodeTable, begin_ns: int, names: _GapNames, *, has_steps: bool) -> None:
        self._nodes = nodes
        self._begin_ns = begin_ns
        self._names = names
        self._has_steps = has_steps
        self._told_ns = 0  # up to here all is in a brick or a gap
        self._gaps: list[Gap] = []

    def lane(self, name: str, records: Sequence[tuple[int, TimedRecord]], length_ns: int) -> Lane:
        """The lane of `records`, each with the number of those that it lies in."""
        layers = self._layers(records)
        bricks = self._has_steps + layers
        rows: dict[int, list[Span]] = {}
        open_: list[Span] = []  # what the next record may lie in, from the outside in
        for depth, record in records:
            self._close(open_, depth, bricks)
            start_ns, node = record.start_ns - self._begin_ns, self._nodes[record.node]
            is_in_brick = bool(open_) and open_[-1].level >= bricks
            if not is_in_brick:
                self._gap(start_ns, open_)
            level = len(open_) if self._is_container(node.id, open_, bricks) else bricks + sum(
                one.level >= bricks for one in open_
            )  # fmt: skip
            span = Span(
                start_ns,
                record.end_ns - record.start_ns,
                level,
                node.id,
                display_name(node),
                node.kind,
                node.category,
                tuple(one.name for one in open_),
                node.backend,
                record.elements,
                record.failed,
                record.plain,
            )
            rows.setdefault(level, []).append(span)
            if level == bricks:
                self._told_ns = span.end_ns
            open_.append(span)
        self._close(open_, 0, bricks)
        self._gap(length_ns, [])
        backends = sorted({span.backend for spans in rows.values() for span in spans if span.backend})
        titles = ["steps"] * self._has_steps + ["layers"] * layers + [BRICKS]
        titles += ["in bricks"] * (max(rows) + 1 - len(titles))
        drawn = (Row(title, tuple(rows.get(level, ()))) for level, title in enumerate(titles))
        return Lane(name, tuple(backends), tuple(drawn), tuple(self._gaps), bricks)

    def _layers(self, records: Sequence[tuple[int, TimedRecord]]) -> int:
        """How many layers lie in each other at most, in no brick."""
        deepest, open_ = 0, list[bool]()  # whether each is a step or a layer, in nothing else
        for depth, record in records:
            del open_[depth:]
            kind = self._nodes[record.node].kind
            open_.append(all(open_) and (kind is NodeKind.LAYER or _is_step(self._nodes, record.node)))
            deepest = max(deepest, sum(open_) - self._has_steps)
        return deepest

    def _is_container(self, node: int, open_: Sequence[Span], bricks: int) -> bool:
        is_one = self._nodes[node].kind is NodeKind.LAYER or _is_step(self._nodes, node)
        return is_one and all(one.level < bricks for one in open_)

    def _close(self, open_: list[Span], depth: int, bricks: int) -> None:
        """Let go of all but the first `depth`; what is left of a step or layer is a gap."""
        while len(open_) > depth:
            if open_[-1].level < bricks:
                self._gap(open_[-1].end_ns, open_)
            open_.pop()

    def _gap(self, until_ns: int, around: Sequence[Span]) -> None:
        """Nothing ran in the time until then that is not told yet, inside of `around`."""
        if until_ns > self._told_ns:
            self._gaps += self._names.of(self._told_ns, until_ns, around)
            self._told_ns = until_ns


@dataclass(frozen=True, slots=True)
class _GapNames:
    """What the gaps of a lane are called. `ran`: when steps ran, of any lane; None on a lane without steps."""

    nodes: NodeTable
    ran: Sequence[tuple[int, int]] | None
    between: str
    begin_ns: int
    holes: Sequence[Hole]

    def of(self, start_ns: int, end_ns: int, around: Sequence[Span]) -> Iterator[Gap]:
        """The gaps that this time is, inside of `around`."""
        where = tuple(span.name for span in around)
        begin, end = self.begin_ns + start_ns, self.begin_ns + end_ns
        if any(hole.begin_ns < end and begin < hole.end_ns for hole in self.holes):
            yield Gap(start_ns, end_ns - start_ns, UNNAMED, where)
        elif around:
            yield Gap(start_ns, end_ns - start_ns, self._inside(around[-1]), where)
        elif self.ran is None:
            yield Gap(start_ns, end_ns - start_ns, NOTHING)
        else:
            yield from self._between(start_ns, end_ns, self.ran)

    def _inside(self, innermost: Span) -> str:
        if innermost.kind is NodeKind.STEP:
            return NOT_LOOKED_INTO if innermost.is_plain else UNATTRIBUTED
        holds_layers = any(child.kind is NodeKind.LAYER for child in self.nodes.children[innermost.node])
        return BETWEEN_LAYERS if holds_layers else INSIDE_LAYERS

    def _between(self, start_ns: int, end_ns: int, ran: Sequence[tuple[int, int]]) -> Iterator[Gap]:
        """Between steps, where none of any lane ran; whether one runs since the last one is not known."""
        at = start_ns
        for step_ns, until_ns in ran[max(0, bisect_right(ran, (start_ns, 0)) - 1) :]:
            if step_ns >= end_ns:
                break
            if step_ns > at:
                yield Gap(at, step_ns - at, self.between)
                at = step_ns
            if until_ns > at:
                yield Gap(at, min(until_ns, end_ns) - at, ELSEWHERE)
                at = min(until_ns, end_ns)
        if at < end_ns:
            yield Gap(at, end_ns - at, self.between if ran and at < ran[-1][0] else AFTER)


def _together(found: _Records, steps: NDArray[np.bool_], begin_ns: int) -> list[tuple[int, int]]:
    """When any step ran: disjoint, by their start."""
    at = np.flatnonzero(steps)
    at = at[np.argsort(found.batch.start_ns[at], kind="stable")]
    ran: list[tuple[int, int]] = []
    starts, ends = (column[at].tolist() for column in (found.batch.start_ns, found.batch.end_ns))
    for start_ns, end_ns in zip(starts, ends, strict=True):
        start_ns, end_ns = start_ns - begin_ns, end_ns - begin_ns
        if ran and start_ns <= ran[-1][1]:
            ran[-1] = ran[-1][0], max(ran[-1][1], end_ns)
        else:
            ran.append((start_ns, end_ns))
    return ran


def _is_step(nodes: NodeTable, node: int) -> bool:
    return nodes.step_of[node] == node


def _is_adopted(nodes: NodeTable, node: int) -> bool:
    """Whether another thread or task than the step's ran it."""
    at = node
    while at and nodes.kind_of[at] != NodeKind.ADOPTED:
        at = nodes.parent_of[at]
    return at > 0


def _timed_by(nodes: NodeTable, node: int) -> str:
    """The backend of what a device timed; empty where the host timed launches."""
    backend = nodes[node].backend
    return "" if backend.endswith(LAUNCHES) else backend
