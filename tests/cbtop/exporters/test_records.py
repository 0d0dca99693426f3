"""Tests of reading records for an export, in the order of their ends or starts.

Only a limited number is in memory at a time.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.exporters import EXPORTERS, records
from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.records import Records, TimedRecord
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.messages import Node
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import NodeKind
from tests.cbtop.exporters.made_processes import batch_of
from tests.representatives import first_by_default

SMALL = 64  # number of records that are sorted at a time in these tests; the real limit is 250,000
CHUNK = 32
CHUNKS = 200

timed = st.builds(
    lambda node, start, took, elements, *flags: TimedRecord(node, start, start + took, elements, *flags),
    st.integers(1, 3), st.integers(-20, 20), st.integers(0, 9), st.integers(-9, 9), st.booleans(), st.booleans(),
)  # fmt: skip


def sorting_key(record: TimedRecord) -> tuple[int, int, int]:
    return record.start_ns, -record.end_ns, record.node


@pytest.fixture
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_SORTED", SMALL)


@pytest.mark.usefixtures("few_at_a_time")
@given(st.lists(st.lists(timed, max_size=40), max_size=12))
def test_any_records_come_by_their_start_as_a_stable_sort_has_them(chunks: list[list[TimedRecord]]) -> None:
    walked = Records([lambda chunk=chunk: [batch_of(chunk)] for chunk in chunks])  # type: ignore[misc]
    everything = [record for chunk in chunks for record in chunk]
    assert list(walked) == everything
    assert list(walked.by_start()) == sorted(everything, key=sorting_key)
    assert len(walked) == len(everything)
    assert walked.begin_ns == min((record.start_ns for record in everything), default=0)


@pytest.mark.usefixtures("few_at_a_time")
@pytest.mark.parametrize("start_ns", [0, -(1 << 63), (1 << 63) - 1])
def test_more_records_of_one_moment_than_are_sorted_at_a_time_all_come(start_ns: int) -> None:
    same = [TimedRecord(1, start_ns, start_ns, number, False) for number in range(5 * SMALL)]
    assert list(Records([lambda: [batch_of(same)]]).by_start()) == same


class Source:
    """A recorded process that creates steps with one brick on demand, in chunks.

    It counts how many of its records are in memory at a time.
    """

    def __init__(self, out: Written) -> None:
        self.held = self.most_held = self.given = self.furthest_behind = 0
        self.is_walked = False
        self._out = out

    def chunk(self, number: int) -> Iterator[Batch]:
        if self.is_walked:
            self.furthest_behind = max(self.furthest_behind, number * CHUNK - self._out.bytes // LEAST_BYTES)
        batch = batch_of(list(self._records(number)))
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        weakref.finalize(batch.node, self._let_go)
        yield batch

    def _let_go(self) -> None:
        self.held -= 1

    def _records(self, number: int) -> Iterator[TimedRecord]:
        for at in range(number * CHUNK // 2, (number + 1) * CHUNK // 2):
            yield TimedRecord(2, 10 * at + 1, 10 * at + 9, 7, False)
            yield TimedRecord(1, 10 * at, 10 * at + 10, 7, False)


class Written(io.RawIOBase):
    """An output that counts bytes and discards them."""

    bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Sequence[int]) -> int:  # type: ignore[override]
        self.bytes += len(data)
        return len(data)


LEAST_BYTES = 20  # Every format needs at least this number of bytes for a record.
BUFFERED = 8192 // LEAST_BYTES  # number of records that can be in the output buffer of a text format


@pytest.mark.usefixtures("few_at_a_time")
@first_by_default("name", EXPORTERS, 3)
def test_every_format_holds_a_bounded_number_of_records(name: str) -> None:
    table, out = NodeTable(), Written()
    table.add(Node(1, None, NodeKind.STEP, "decode"))
    table.add(Node(2, 1, NodeKind.BRICK, "brick"))
    source = Source(out)
    chunks = Records([lambda number=number: source.chunk(number) for number in range(CHUNKS)])  # type: ignore[misc]
    source.is_walked = True
    EXPORTERS[name].write([RecordedProcess("made", 1, table, chunks)], out)  # type: ignore[arg-type]
    assert source.most_held <= 3
    # The format dot has no single records, and Parquet is compressed, so this minimum does not apply to them.
    if name not in ("dot", "parquet"):
        assert out.bytes >= LEAST_BYTES * CHUNK * CHUNKS
        assert source.furthest_behind <= 2 * SMALL + BUFFERED + CHUNK
