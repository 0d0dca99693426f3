"""Export to Perfetto's own format, a stream of protobuf packets. ui.perfetto.dev opens it.

The fields are described at https://perfetto.dev/docs/reference/trace-packet-proto and
https://perfetto.dev/docs/reference/synthetic-track-event.

In protobuf (https://protobuf.dev/programming-guides/encoding), a tag precedes each field: number << 3 | type. Type 0
is an integer in groups of seven bits, the lowest first. Type 2 is a length, then that many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import BinaryIO

from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.records import TimedRecord
from cbtop.exporters.tracks import ended_before, laid_out
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.protocol.vocabulary import NodeKind

# field numbers in the protobuf messages Trace and TracePacket
PACKET, TIMESTAMP, SEQUENCE_ID, TRACK_EVENT, INTERNED, SEQUENCE_FLAGS, DEFAULTS, DESCRIPTOR, CLOCKS = (
    1, 8, 10, 11, 12, 13, 59, 60, 6,
)  # fmt: skip
# Field numbers: first of the clock in the packet defaults, then of two fields in a clock snapshot.
CLOCK_ID, CLOCK, PRIMARY_CLOCK = 58, 1, 2
UUID, NAME, PROCESS, PARENT = 1, 2, 3, 5  # field numbers of the protobuf message TrackDescriptor
PID, PROCESS_NAME = 1, 6  # field numbers in the protobuf message ProcessDescriptor
ANNOTATION, CATEGORY, EVENT_TYPE, NAME_ID, TRACK = 4, 3, 9, 10, 11  # field numbers of the protobuf message TrackEvent
# Field numbers of the protobuf message InternedData. Each of these fields has entries with an id (field 1) and a name
# (field 2).
CATEGORIES, EVENT_NAMES, ANNOTATION_NAMES = 1, 2, 3
ANNOTATION_NAME, BOOL, UINT = 1, 2, 3  # field numbers of the protobuf message DebugAnnotation

SLICE_BEGIN, SLICE_END = 1, 2
STATE_CLEARED, NEEDS_STATE = 1, 2
MONOTONIC = 3  # Perfetto's number of the host clock that the times of records are read from
SEQUENCE = 1
ELEMENTS, FAILED, PLAIN = 1, 2, 3  # ids under which the names of cbtop's annotations are interned
MASK = (1 << 64) - 1


def write_perfetto(processes: Sequence[RecordedProcess], out: BinaryIO) -> None:
    """Write each process with its tracks.

    Each record is a slice with its number of elements. Each name is written only once.
    """
    uuids, first_names = count(1), count(1, 1 << 32)
    begin_ns = min((recorded.records.begin_ns for recorded in processes if len(recorded.records)), default=0)
    clock = _message(CLOCK, _integer(1, MONOTONIC) + _integer(2, begin_ns))
    _write(out, _message(CLOCKS, clock + _integer(PRIMARY_CLOCK, MONOTONIC)))
    named = [(recorded, next(first_names)) for recorded in processes]
    defaults = _message(DEFAULTS, _integer(CLOCK_ID, MONOTONIC))
    _write(out, _integer(SEQUENCE_FLAGS, STATE_CLEARED) + defaults + _message(INTERNED, _names(named)))
    for recorded, first_name in named:
        process = next(uuids)
        who = _integer(PID, recorded.pid) + _text(PROCESS_NAME, recorded.process)
        _write(out, _message(DESCRIPTOR, _integer(UUID, process) + _message(PROCESS, who)))
        for packet in _slices(recorded, process, uuids, first_name):
            _write(out, packet)


def _slices(recorded: RecordedProcess, process: int, uuids: Iterator[int], first_name: int) -> Iterator[bytes]:
    """Yield the packets with the tracks of a process and their events.

    The packet of a track comes before the track's events. The events are in order of time.
    """
    # for each track: the track's uuid, and its records that have not ended yet
    tracks: list[tuple[int, list[TimedRecord]]] = []
    for track, record in laid_out(recorded):
        if track == len(tracks):
            tracks.append((next(uuids), []))
            about = _integer(UUID, tracks[track][0]) + _integer(PARENT, process) + _text(NAME, f"track {track + 1}")
            yield _message(DESCRIPTOR, about)
        uuid, around = tracks[track]
        for ended in ended_before(record, around):
            yield _end(ended, uuid)
        around.append(record)
        yield _begin(record, uuid, recorded.nodes[record.node].kind, first_name)
    for uuid, around in tracks:
        for ended in reversed(around):
            yield _end(ended, uuid)


def _begin(record: TimedRecord, uuid: int, kind: NodeKind, first_name: int) -> bytes:
    event = _begins(uuid, first_name + record.node, kind)
    if record.elements is not None:
        event += _message(ANNOTATION, ELEMENTS_NAMED + _integer(UINT, record.elements))
    for name, holds in ((FAILED, record.failed), (PLAIN, record.plain)):
        if holds:
            event += _message(ANNOTATION, _integer(ANNOTATION_NAME, name) + _integer(BOOL, 1))
    return _event(record.start_ns, event)


# A trace has few different messages. Caching their encoded form halves the time to write the trace.
@lru_cache(maxsize=1 << 12)
def _begins(uuid: int, name_id: int, kind: NodeKind) -> bytes:
    event = _integer(EVENT_TYPE, SLICE_BEGIN) + _integer(TRACK, uuid)
    return event + _integer(NAME_ID, name_id) + _integer(CATEGORY, kind + 1)


def _end(record: TimedRecord, uuid: int) -> bytes:
    return _event(record.end_ns, _ends(uuid))


@lru_cache(maxsize=1 << 12)
def _ends(uuid: int) -> bytes:
    return _integer(EVENT_TYPE, SLICE_END) + _integer(TRACK, uuid)


def _event(at_ns: int, event: bytes) -> bytes:
    return _integer(TIMESTAMP, at_ns) + STATE_NEEDED + _message(TRACK_EVENT, event)


def _names(named: Sequence[tuple[RecordedProcess, int]]) -> bytes:
    """Return the encoded names of the trace. Each name has an id, and events refer to names by these ids."""
    said = b"".join(_named(CATEGORIES, kind + 1, kind.name.lower()) for kind in NodeKind)
    for number, name in ((ELEMENTS, "elements"), (FAILED, "failed"), (PLAIN, "plain")):
        said += _named(ANNOTATION_NAMES, number, name)
    nodes = ((first + node.id, display_name(node)) for recorded, first in named for node in recorded.nodes.nodes)
    return said + b"".join(_named(EVENT_NAMES, name_id, name) for name_id, name in nodes)


def _named(field: int, name_id: int, name: str) -> bytes:
    return _message(field, _integer(1, name_id) + _text(2, name))


def _write(out: BinaryIO, packet: bytes) -> None:
    out.write(_message(PACKET, SEQUENCE_NAMED + packet))


def _integer(field: int, value: int) -> bytes:
    return _tag(field << 3) + _varint(value & MASK)


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode("utf-8", "replace"))


def _message(field: int, payload: bytes) -> bytes:
    return _tag(field << 3 | 2) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    if value <= 0x7F:
        return bytes((value,))
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


_tag = lru_cache(_varint)
SEQUENCE_NAMED = _integer(SEQUENCE_ID, SEQUENCE)
STATE_NEEDED = _integer(SEQUENCE_FLAGS, NEEDS_STATE)
ELEMENTS_NAMED = _integer(ANNOTATION_NAME, ELEMENTS)
