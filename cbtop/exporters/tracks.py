"""Assign the records of a process to tracks. The records of a track must nest, because flame charts require this."""

# Threads are not recorded, so a track is not a thread. Records of one thread nest, so they share a track. Records
# that overlap without nesting ran in parallel. The later one gets a track on which its parent is open, or else the
# first track with room.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.records import TimedRecord
from cbtop.profiler.analysis.graph.node_table import NodeTable


def laid_out(recorded: RecordedProcess) -> Iterator[tuple[int, TimedRecord]]:
    """Yield (track, record) for every record, in the order of start. Tracks are numbered from 0.

    A record comes before the records that it contains.
    """
    for track, _, record in on_tracks(recorded.nodes, recorded.records.by_start()):
        yield track, record


def on_tracks(nodes: NodeTable, by_start: Iterable[TimedRecord]) -> Iterator[tuple[int, int, TimedRecord]]:
    """Yield (track, depth, record) for each record of `by_start`. The depth is the number of records around the
    record on its track.
    """
    # Track -> its open records, of which each is inside the previous one, and its last record at the end.
    open_on: list[list[_Open]] = []
    for record in by_start:
        best, chosen = _NO_ROOM, len(open_on)
        for track, around in enumerate(open_on):
            room = _room(nodes, record, around)
            if room < best:
                best, chosen = room, track
        if chosen == len(open_on):
            open_on.append([])
        around = open_on[chosen]
        del around[best.depth :]
        if around:
            held = around[-1].held
            held[record.node] = held.get(record.node, 0) + 1
        around.append(_Open(record, {}))
        yield chosen, best.depth, record


def events_of(track: Iterable[TimedRecord]) -> Iterator[tuple[bool, TimedRecord, int]]:
    """Yield (is_opening, record, time) for each event of a track, in order of time."""
    around: list[TimedRecord] = []
    for record in track:
        for ended in ended_before(record, around):
            yield False, ended, ended.end_ns
        around.append(record)
        yield True, record, record.start_ns
    for ended in reversed(around):
        yield False, ended, ended.end_ns


def ended_before(record: TimedRecord, around: list[TimedRecord]) -> Iterator[TimedRecord]:
    """Remove each record that ends before `record` begins from the end of `around`, and yield the removed records."""
    while around and around[-1].end_ns <= record.start_ns:
        yield around.pop()


class _Open(NamedTuple):
    """A record that has not ended yet, and how many records of each node it already contains."""

    record: TimedRecord
    held: dict[int, int]


class _Room(NamedTuple):
    """A possible position of a record on a track. The smallest tuple is the best one.

    If tasks interleave, the record's parent may be open on several tracks. The best track has the fewest records of
    the same node inside the parent. If equal, the parent that ends first is best, because fewer other records fit
    into it.
    """

    is_outside: bool  # whether no record is open on the track
    is_far: bool  # whether the innermost open record on the track is a different record than the parent
    held: int
    end_ns: int
    depth: int  # number of records that stay open on the track


_OUTSIDE = _Room(True, False, 0, 0, 0)
_NO_ROOM = _Room(True, True, 0, 0, 0)


def _room(nodes: NodeTable, record: TimedRecord, around: Sequence[_Open]) -> _Room:
    """Return the position for `record` on a track with the open records `around`. The position shows how well the
    record fits.

    Ended records are closed first. Returns _NO_ROOM if the record overlaps an open record without nesting.
    """
    depth = len(around)
    while depth:
        outer, held = around[depth - 1]
        if record.end_ns > outer.end_ns > record.start_ns:
            return _NO_ROOM
        if _fits(nodes, record, outer):
            is_far = nodes[record.node].parent != outer.node
            return _Room(False, is_far, held.get(record.node, 0), outer.end_ns, depth)
        if outer.end_ns > record.start_ns:
            return _NO_ROOM
        depth -= 1
    return _OUTSIDE


def _fits(nodes: NodeTable, record: TimedRecord, around: TimedRecord) -> bool:
    """Return whether `record` is inside `around`, in time and in the graph. A record of zero length fits anywhere.

    Nothing fits into a step that was timed as a whole, because its content was not recorded. Records during its time
    belong to another step.
    """
    if record.end_ns > around.end_ns or around.plain:
        return False
    if record.start_ns == record.end_ns and around.start_ns < around.end_ns:
        return True
    outer = nodes[record.node].parent
    while outer is not None and outer > around.node:
        outer = nodes[outer].parent
    return outer == around.node
