"""The newest records of a source, as they came: what a timeline is made of."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from cbtop.protocol.messages import RecordBatch
from cbtop.protocol.record_batch import RecordTally, joined, unpack
from cbtop.protocol.ring import Batch

MAX_RECENT = 1 << 15  # records of a source
RECENT_BYTES = 40  # each
MAX_HOLES = 64


class Hole(NamedTuple):
    """Between these moments (monotonic ns) records ended that are not here."""

    begin_ns: int
    end_ns: int


class RecentRecords:
    """At most MAX_RECENT records in the order in which they ended, and where some are missing.

    `horizon_ns`: of what ended before it nothing is here. `missing` counts what was lost since then: overwritten,
    rejected, or lost on the way.
    """

    def __init__(self) -> None:
        self.horizon_ns = 0
        self.missing = 0
        self.version = 0  # it is other records where this is another
        self.holes: deque[Hole] = deque(maxlen=MAX_HOLES)
        self._parts: deque[Batch] = deque()
        self._count = 0
        self._newest_ns = 0
        self._tally = RecordTally()

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        """About what it takes."""
        return RECENT_BYTES * self._count

    def take(self, message: RecordBatch) -> None:
        """Keep what is new in `message`. Raises DecodeError where it is no batch."""
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
        """Let go of all of them, and of what is missing: what comes follows them."""
        self.shorten(0)
        self.missing = 0
        self.holes.clear()

    def shorten(self, length: int) -> None:
        """Keep the newest `length`."""
        self.version += self._count > length
        while self._count > length:
            first = self._parts.popleft()
            out = min(len(first.node), self._count - length)
            self._count -= out
            self.horizon_ns = max(self.horizon_ns, int(first.end_ns[:out].max()))
            if out < len(first.node):
                self._parts.appendleft(first.only(np.arange(len(first.node)) >= out))

    def records(self) -> Batch:
        """All of them."""
        together = joined(self._parts)
        self._parts = deque([together] if len(together.node) else [])
        return together
