"""Records laid out on tracks on which they nest, as flame charts want them."""

# Threads are not recorded, so a track is no thread. What ran on one thread nests and takes one track; a record
# that overlaps another without lying inside it ran beside it, and takes the next track that has room.

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.records import TimedRecord
from cbtop.profiler.graph.node_table import NodeTable


def laid_out(recorded: RecordedProcess) -> Iterator[tuple[int, TimedRecord]]:
    """Every record with the number of its track (0, 1, …), by start; what contains comes before what it contains."""
    for track, _, record in on_tracks(recorded.nodes, recorded.records.by_start()):
        yield track, record


def on_tracks(nodes: NodeTable, by_start: Iterable[TimedRecord]) -> Iterator[tuple[int, int, TimedRecord]]:
    """The same, of records that come by their start; with each, in how many others of its track it lies."""
    open_on: list[list[TimedRecord]] = []  # a track's last record and what it lies inside, the outermost first
    for record in by_start:
        room = (track for track, around in enumerate(open_on) if _make_room(nodes, record, around))
        chosen = next(room, len(open_on))
        if chosen == len(open_on):
            open_on.append([])
        depth = len(open_on[chosen])
        open_on[chosen].append(record)
        yield chosen, depth, record


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


def _make_room(nodes: NodeTable, record: TimedRecord, around: list[TimedRecord]) -> bool:
    """Close what has ended when `record` begins; gives whether it fits into what is still open."""
    while around and around[-1].end_ns <= record.start_ns and not _fits(nodes, record, around[-1]):
        around.pop()
    return not around or _fits(nodes, record, around[-1])


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
