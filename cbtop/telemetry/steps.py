"""Sample one whole step of each process, with all records, for traces."""

# The daemon sends single records only while a step is sampled. In between, neither it nor this service has any cost.

from __future__ import annotations

import threading
import time

import numpy as np

from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol import codec
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.keys import ViewerKeys
from cbtop.protocol.messages import RecordBatch
from cbtop.protocol.publisher import LIVE, RECORDS
from cbtop.protocol.record_batch import joined, unpack
from cbtop.protocol.ring import FLAG_PLAIN, LANE_SHIFT
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.subscriber import Subscriber
from cbtop.protocol.vocabulary import SourceStatus

SAMPLE_S = 5.0  # Wait at most this many seconds for a step to begin and end.
POLL_MS = 50
MAX_HELD_RECORDS = 1 << 18  # While waiting for a step, at most this many records are stored per source.
# A step with more records is skipped, because a part of it would mislead.
MAX_STEP_RECORDS = 4_096


def sample_steps(endpoint: str, keys: ViewerKeys | None, stop: threading.Event) -> list[tuple[SourceRecord, Batch]]:
    """Return the next whole step of each live process of the daemon at `endpoint`, with its source.

    Returns after SAMPLE_S, or when `stop` is set. Processes without a whole step are then missing.
    """
    store = Store()
    waiting: dict[str, GaplessRecords] = {}
    found: dict[str, Batch] = {}
    deadline_s = time.monotonic() + SAMPLE_S
    subscriber = Subscriber(endpoint, keys, topics=(RECORDS, LIVE))
    try:
        while not stop.is_set() and time.monotonic() < deadline_s:
            try:
                _topic, frames = subscriber.receive_frames(POLL_MS)
            except DecodeError:
                continue
            for frame in frames:
                try:
                    message = codec.decode(frame)
                    if message is None:
                        continue
                    store.apply(message)
                    if isinstance(message, RecordBatch) and message.source not in found:
                        waiting.setdefault(message.source, GaplessRecords()).take(message)
                except DecodeError:
                    # The link counts messages that cannot be decoded, and their records are missing as a gap.
                    continue
            for key in waiting.keys() - found.keys():
                if key in store.sources and (step := waiting[key].step(store.sources[key].nodes)) is not None:
                    found[key] = step
            live = [key for key, record in store.sources.items() if record.state is None or _is_live(record)]
            if store.daemon and found.keys() >= set(live):
                break
    finally:
        subscriber.close()
    return [(store.sources[key], step) for key, step in found.items() if key in store.sources]


def whole_step(batch: Batch, nodes: NodeTable) -> Batch | None:
    """Return the records of the first whole step in `batch` that can be a trace, or None.

    It begins after the end of the batch's first record, and has recorded bricks and at most MAX_STEP_RECORDS records.
    """
    known = batch.only((batch.node >= 1) & (batch.node <= len(nodes)) & ~batch.are(FLAG_PLAIN)).calls()
    if not len(known.node):
        return None
    step_of = np.array(nodes.step_of, np.int64)[known.node]
    lane = known.flags >> LANE_SHIFT
    for at in np.flatnonzero((step_of == known.node) & (known.start_ns > known.end_ns[0])).tolist():
        inside = (step_of == known.node[at]) & (lane == lane[at])
        inside &= (known.start_ns >= known.start_ns[at]) & (known.end_ns <= known.end_ns[at])
        if inside.sum() <= MAX_STEP_RECORDS:
            return known.only(inside)
    return None


class GaplessRecords:
    """The records of one source since its last gap (missing records).

    The records are stored until they contain a whole step.
    """

    def __init__(self) -> None:
        self._held: list[Batch] = []
        self.count = 0
        self._next: int | None = None

    def take(self, message: RecordBatch) -> None:
        is_whole = message.produced - message.first == message.count
        if message.first != self._next or not is_whole or self.count > MAX_HELD_RECORDS:
            self._held, self.count = [], 0
        self._next = message.produced
        if message.count:
            self._held.append(unpack(message))
            self.count += message.count

    def step(self, nodes: NodeTable) -> Batch | None:
        return whole_step(joined(self._held), nodes) if self._held else None


def _is_live(record: SourceRecord) -> bool:
    return record.state is not None and record.state.state is SourceStatus.LIVE
