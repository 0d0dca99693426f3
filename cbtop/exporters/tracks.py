"""Records laid out on tracks on which they nest, as flame charts want them."""

# Threads are not recorded, so a track is no thread. What ran on one thread nests and takes one track; a record
# that overlaps another without lying inside it ran beside it, and takes another track: where what it ran in is open,
# else the first that has room.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.records import TimedRecord
from cbtop.profiler.graph.node_table import NodeTable


def laid_out(recorded: RecordedProcess) -> Iterator[tuple[int, TimedRecord]]:
    """Every record with the number of its track (0, 1, …), by start; what contains comes before what it contains."""
    for track, _, record in on_tracks(recorded.nodes, recorded.records.by_start()):
        yield track, record


def on_tracks(nodes: NodeTable, by_start: Iterable[TimedRecord]) -> Iterator[tuple[int, int, TimedRecord]]:
    """The same, of records that come by their start; with each, in how many others of its track it lies."""
    open_on: list[list[_Open]] = []  # a track's last record and what it lies inside, the outermost first
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
    """What happens on a track, in order: whether a record opens or closes, the record, and when."""
    around: list[TimedRecord] = []
    for record in track:
        for ended in ended_before(record, around):
            yield False, ended, ended.end_ns
        around.append(record)
        yield True, record, record.start_ns
    for ended in reversed(around):
        yield False, ended, ended.end_ns


def ended_before(record: TimedRecord, around: list[TimedRecord]) -> Iterator[TimedRecord]:
    """Take away from what is open on a track, `around`, what ends before `record` begins."""
    while around and around[-1].end_ns <= record.start_ns:
        yield around.pop()


class _Open(NamedTuple):
    """A record that has not ended, and of which nodes it holds how many."""

    record: TimedRecord
    held: dict[int, int]


class _Room(NamedTuple):
    """Where a record finds room on a track; the least is the likeliest to be its own place.

    Of tasks that interleave, several may be in what a record ran in. That is the likeliest which holds the fewest
    records of its node by now, and of these the one that ends first, for fewer others fit into it.
    """

    is_outside: bool  # nothing is open there
    is_far: bool  # what is open there is not what the record lies in next
    held: int
    end_ns: int
    depth: int  # so many of those open stay so


_OUTSIDE = _Room(True, False, 0, 0, 0)
_NO_ROOM = _Room(True, True, 0, 0, 0)


def _room(nodes: NodeTable, record: TimedRecord, around: Sequence[_Open]) -> _Room:
    """Where it lies once all that has ended there is closed: no room where it does not fit into what is open."""
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
    """Whether `record` lies inside `around`, in time and in the graph. What took no time fits into any time.

    In a plain step lies nothing: what ran at that time is another step's.
    """
    if record.end_ns > around.end_ns or around.plain:
        return False
    if record.start_ns == record.end_ns and around.start_ns < around.end_ns:
        return True
    outer = nodes[record.node].parent
    while outer is not None and outer > around.node:
        outer = nodes[outer].parent
    return outer == around.node
