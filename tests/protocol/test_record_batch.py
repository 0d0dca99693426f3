"""Tests of batches of records: the records are unchanged after packing into columns.

Records that are lost on the way are counted.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.profiler import BrickProfiler
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.messages import Packed, RecordBatch
from cbtop.protocol.record_batch import MAX_BATCH_RECORDS, RecordTally, batches, pack, unpack
from cbtop.protocol.ring import FLAG_FAILED, NODE_BITS
from cbtop.protocol.ring_reader import Batch, RingReader
from cbtop.protocol.vocabulary import BrickId

i64 = st.integers(-(1 << 63), (1 << 63) - 1)
COLUMNS = ("node", "flags", "start_ns", "end_ns", "elements")


def batch_of(rows: list[tuple[int, int, int, int, int]]) -> Batch:
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    return Batch(columns[0], columns[1] << NODE_BITS, columns[2], columns[3], columns[4], overwritten=0)


def same(found: Batch, wanted: Batch) -> bool:
    return all(getattr(found, name).tolist() == getattr(wanted, name).tolist() for name in COLUMNS)


@given(st.lists(st.tuples(st.integers(0, 1 << 23), st.integers(0, 255), i64, i64, i64), max_size=40))
def test_any_records_come_back(rows: list[tuple[int, int, int, int, int]]) -> None:
    batch = batch_of(rows)
    assert same(unpack(RecordBatch("s", 0, len(rows), len(rows), pack(batch))), batch)


def test_records_of_a_step_take_no_more_than_24_bytes(runtime: Path) -> None:
    clock_ns = itertools.count(10**15, 15_000).__next__
    profiler = BrickProfiler(recorder=RingRecorder(runtime), clock_ns=clock_ns)
    for _ in range(20):
        with profiler.step("decode", tokens=1):
            for layer in range(24):
                with profiler.layer(layer), profiler.brick(BrickId.DOWN_PROJECTION, 200_000):
                    pass
    (ring,) = runtime.glob("*.ring")
    batch = RingReader(ring).read()
    assert len(batch.node) > 256
    assert len(pack(batch)) / len(batch.node) <= 24


@given(st.integers(0, 1 << 40), st.binary(max_size=80))
def test_columns_of_a_length_not_declared_are_refused_before_unpacking(count: int, columns: bytes) -> None:
    with contextlib.suppress(DecodeError):
        found = unpack(RecordBatch("s", 0, count, count, Packed(columns)))
        assert len(found.node) == count <= len(columns)


def test_a_column_of_no_known_width_is_refused() -> None:
    with pytest.raises(DecodeError, match="bytes wide"):
        unpack(RecordBatch("s", 0, 1, 1, Packed(struct.pack("<q5B", 0, 0, 1, 1, 1, 1) + bytes(4))))


def test_a_large_read_becomes_messages_of_bounded_size() -> None:
    count = 2 * MAX_BATCH_RECORDS + 5
    numbers = np.arange(count, dtype=np.int64)
    batch = Batch(numbers, numbers << NODE_BITS, numbers, numbers, numbers, overwritten=7)
    parts = list(batches("s", 10, 10 + count + 7, batch))
    assert [part.count for part in parts] == [MAX_BATCH_RECORDS, MAX_BATCH_RECORDS, 5]
    tally = RecordTally()
    assert [tally.take(part) for part in parts] == [0, 0, 0]
    assert (tally.before, tally.taken, tally.dropped, tally.missed) == (10, count, 7, 0)
    assert [n for part in parts for n in unpack(part).node.tolist()] == numbers.tolist()


@given(turns=st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.booleans(), st.booleans()), max_size=12))
def test_produced_is_what_came_before_and_what_is_here_and_what_is_lost(
    turns: list[tuple[int, bool, bool, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A test of random turns.

    In each turn, some records are written, the batch and the heartbeat may be lost, and a new daemon may start.
    """
    directory = tmp_path_factory.mktemp("ring")
    # The ring has room for only sixteen records, so records are often overwritten before they are read.
    recorder = RingRecorder(directory, 512)
    recorder.record(FLAG_FAILED | 1, 0, 0, 0)
    (path,) = directory.glob("*.ring")
    reader, tally, here, written = RingReader(path), RecordTally(), set[int](), 1
    told = 0
    for count, batch_arrives, heartbeat_arrives, restarts in turns:
        for _ in range(count):
            recorder.record(1, 0, 1, written)
            written += 1
        if restarts:
            reader.close()
            reader, told = RingReader(path), 0
        batch = reader.read()
        for message in batches("s", told, reader.read_to, batch):
            if batch_arrives:
                known = tally.take(message)
                fresh = set(unpack(message).elements[known:].tolist())
                assert not fresh & here
                here |= fresh
        told = reader.read_to
        if heartbeat_arrives:
            tally.hear(reader.read_to)
            assert tally.produced == reader.read_to == written
        assert tally.produced == (tally.before or 0) + tally.taken + tally.dropped + tally.missed
        assert tally.taken == len(here)
    reader.close()
    recorder.close("done")
