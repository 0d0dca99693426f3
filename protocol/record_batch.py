"""Records packed into columns for the wire, and a receiver's count of records.

A batch begins with the end time of its first record (i64, little-endian). Then come the columns, packed by
`cbtop.protocol.columns`: node, flags, difference from the previous end time, duration and elements. Differences are
computed modulo 2^64, so every i64 is restored exactly. A record of a decode takes 12 to 18 bytes, and 32 in the ring.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cbtop.protocol.columns import pack_columns, unpack_columns
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.messages import Heartbeat, Message, Packed, RecordBatch, SourceState
from cbtop.protocol.ring import NODE_BITS
from cbtop.protocol.ring_reader import Batch

MAX_TALLIES = (
    1 << 14
)  # A receiver counts the records of this many sources. A daemon has at most 256 at the same time.
# At most this many records in a message. If a reader joins late, the ring contains more records than this.
MAX_BATCH_RECORDS = 1 << 16
_FIRST_END = struct.Struct("<q")


def pack(batch: Batch) -> Packed:
    """Pack the records of `batch`, in the order in which they ended."""
    if not len(batch.node):
        return Packed(b"")
    step = np.diff(batch.end_ns, prepend=batch.end_ns[:1])
    values = (batch.node, batch.flags >> NODE_BITS, step, batch.end_ns - batch.start_ns, batch.elements)
    return Packed(_FIRST_END.pack(int(batch.end_ns[0])) + pack_columns(values))


def unpack(message: RecordBatch) -> Batch:
    """Return the records of `message`.

    Raises DecodeError if its columns do not have the declared length or are too long.
    """
    count, data = message.count, message.columns
    if count > MAX_BATCH_RECORDS:
        raise DecodeError(f"{count} records in one batch; at most {MAX_BATCH_RECORDS} are taken")
    if len(data) < _FIRST_END.size and (count or data):
        raise DecodeError(f"{count} records in {len(data)} bytes")
    end_ns = _FIRST_END.unpack_from(data)[0] if count else 0
    columns = unpack_columns(memoryview(data)[_FIRST_END.size :], 5, max_length=count)
    if len(columns[0]) != count:
        raise DecodeError(f"{count} records said, {len(columns[0])} there")
    node, flags, step, duration, elements = columns
    end = np.cumsum(step) + np.array(end_ns, np.int64)
    return Batch(node, flags << NODE_BITS, end - duration, end, elements, overwritten=0)


def joined(parts: Sequence[Batch]) -> Batch:
    """Return the records of all `parts`, in order. `overwritten` is not added up."""
    names = ("node", "flags", "start_ns", "end_ns", "elements")
    none = np.zeros(0, np.int64)
    columns = {name: np.concatenate([none, *(getattr(part, name) for part in parts)]) for name in names}
    return Batch(**columns, overwritten=0)


def batches(source: str, first: int, produced: int, batch: Batch) -> Iterator[RecordBatch]:
    """Yield the records of `batch` as messages of bounded size.

    `batch` contains the records with the numbers from `first` to below `produced`, except lost ones.
    """
    count = len(batch.node)
    for at in range(0, max(count, 1), MAX_BATCH_RECORDS):
        chosen = slice(at, min(at + MAX_BATCH_RECORDS, count))
        part = Batch(
            batch.node[chosen],
            batch.flags[chosen],
            batch.start_ns[chosen],
            batch.end_ns[chosen],
            batch.elements[chosen],
            overwritten=0,
        )
        # Missing records are usually the oldest ones, so the first message counts all of them.
        until = produced - count + chosen.stop
        yield RecordBatch(source, first, until, chosen.stop - at, pack(part))
        first = until


@dataclass(slots=True)
class RecordTally:
    """A receiver's counts of the records of one source, computed from the records' numbers in the ring.

    `produced == before + taken + dropped + missed` always holds, even if the last batch was lost.
    """

    produced: int = 0  # number of records that the process has written, as last reported
    before: int | None = None  # records written before this receiver joined
    taken: int = 0
    # number of records that the daemon did not send: overwritten in the ring before the daemon read them, or rejected
    dropped: int = 0
    _gaps: int = 0
    _next: int = 0  # number of the first record that is not counted yet

    @property
    def missed(self) -> int:
        """Number of records that the daemon has read and this receiver has not received (yet)."""
        return self._gaps + self.produced - self._next

    def hear(self, produced: int) -> None:
        """Update `produced`, the number of written records."""
        self._begin(produced)
        self.produced = max(self.produced, produced)

    def take(self, message: RecordBatch) -> int:
        """Count a batch. Returns how many records at its beginning this receiver has counted before.

        A restarted daemon reads the ring from its oldest record, so it sends records a second time.
        """
        self._begin(message.first)
        self.produced = max(self.produced, message.produced)
        first_kept = message.produced - message.count
        known = min(max(0, self._next - first_kept), message.count)
        self.taken += message.count - known
        self._gaps += max(0, message.first - self._next)
        fresh = max(0, message.produced - max(self._next, message.first))
        self.dropped += fresh - (message.count - known)
        self._next = max(self._next, message.produced)
        return known

    def _begin(self, number: int) -> None:
        if self.before is None:
            self.before = self._next = self.produced = number


def tally(tallies: dict[str, RecordTally], message: Message) -> int:
    """Count the records that `message` reports.

    For a batch, returns how many of its first records were known already. Raises DecodeError if a batch cannot be
    unpacked, or if there are more than MAX_TALLIES sources.
    """
    match message:
        case RecordBatch():
            unpack(message)
            return _tally_of(tallies, message.source).take(message)
        case SourceState():
            _tally_of(tallies, message.source).hear(message.produced)
        case Heartbeat():
            for state in message.sources:
                tally(tallies, state)
        case _:
            pass
    return 0


def _tally_of(tallies: dict[str, RecordTally], source: str) -> RecordTally:
    if source not in tallies:
        if len(tallies) >= MAX_TALLIES:
            raise DecodeError(f"more than {MAX_TALLIES} sources")
        tallies[source] = RecordTally()
    return tallies[source]
