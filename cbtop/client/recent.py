"""Keep the newest records of a process in order of arrival for the screen's timeline."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from cbtop.protocol.messages import RecordBatch
from cbtop.protocol.record_batch import RecordTally, joined, unpack
from cbtop.protocol.ring_reader import Batch

MAX_RECENT = 1 << 15  # Store at most this many newest records per source.
RECENT_BYTES = 40  # approximate memory per record in bytes
MAX_HOLES = 64


class Hole(NamedTuple):
    """A time range (monotonic ns) with missing records."""

    begin_ns: int
    end_ns: int


class RecentRecords:
    """Keeps the newest MAX_RECENT records in the order of their ends, and the time ranges with missing records.

    Records that ended before `horizon_ns` are dropped. `missing` counts later ones that did not arrive: they were
    overwritten, rejected, or lost on the way.
    """

    def __init__(self) -> None:
        self.horizon_ns = 0
        self.missing = 0
        self.version = 0  # changes whenever the stored records change
        self.holes: deque[Hole] = deque(maxlen=MAX_HOLES)
        self._parts: deque[Batch] = deque()
        self._count = 0
        self._newest_ns = 0
        self._tally = RecordTally()

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        """Approximate memory used."""
        return RECENT_BYTES * self._count

    def take(self, message: RecordBatch) -> None:
        """Add the records in `message` to the newest records. Raises DecodeError if the message is malformed."""
        batch = unpack(message)
        self.version += 1
        is_first, before = self._tally.before is None, self._tally.missed + self._tally.dropped
        known = self._tally.take(message)
        if known:
            batch = batch.only(np.arange(len(batch.node)) >= known)
        lost = self._tally.missed + self._tally.dropped - before
        calls = batch.calls()
        if not len(calls.node):
            self.missing += lost
            return
        if is_first:
            self._newest_ns = self.horizon_ns = int(calls.end_ns[0]) if message.produced > message.count else 0
        elif lost:
            self.missing += lost
            self.holes.append(Hole(self._newest_ns, max(self._newest_ns, int(calls.end_ns[0]))))
        self._newest_ns = max(self._newest_ns, int(calls.end_ns.max()))
        self._parts.append(calls)
        self._count += len(calls.node)
        self.shorten(MAX_RECENT)

    def forget(self) -> None:
        """Drop all records, and set the count of missing records to zero."""
        self.shorten(0)
        self.missing = 0
        self.holes.clear()

    def shorten(self, length: int) -> None:
        """Keep only the newest `length` records, and drop the others."""
        self.version += self._count > length
        while self._count > length:
            first = self._parts.popleft()
            out = min(len(first.node), self._count - length)
            self._count -= out
            self.horizon_ns = max(self.horizon_ns, int(first.end_ns[:out].max()))
            if out < len(first.node):
                self._parts.appendleft(first.only(np.arange(len(first.node)) >= out))

    def records(self) -> Batch:
        """Return all records."""
        together = joined(self._parts)
        self._parts = deque([together] if len(together.node) else [])
        return together
