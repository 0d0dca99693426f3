"""Tests of the reader of a ring.

Whatever is in the file, the reader finds the available records and counts the lost records.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtop.protocol import ring_reader
from cbtop.protocol.errors import RingError
from cbtop.protocol.open_file import OpenFile
from cbtop.protocol.ring import (
    CURSOR_WORD,
    FLAG_AMOUNTS,
    HEADER_BYTES,
    HELD,
    MAX_NODE,
    NO_NODE,
    RECORD_BYTES,
    SLOTS,
    RingWriter,
)
from cbtop.protocol.ring_reader import MAX_RECORDS, InFlight, RingReader
from tests.descriptors import descriptors_of
from tests.protocol.ring_words import overwrite, write_slot


@pytest.fixture
def path(runtime: Path) -> Path:
    return runtime / "1-2-0.ring"


def test_a_ring_is_filling_once_an_eighth_is_unread_also_in_later_laps(path: Path) -> None:
    writer = RingWriter(path, 64 * RECORD_BYTES)
    reader = RingReader(path)
    for _ in range(20):
        found = []
        for _ in range(9):
            found.append(reader.is_filling)
            writer.record(7, 100, 250, 1)
        assert [*found, reader.is_filling] == [False] * 9 + [True]
        reader.read()
    for _ in range(200):
        writer.record(7, 100, 250, 1)
    assert reader.is_filling  # The 200 records have overwritten the ring three times.
    os.truncate(path, HEADER_BYTES)
    with pytest.raises(RingError, match="cut short"):
        assert reader.is_filling


def test_a_slot_that_was_begun_and_not_completed_is_waited_for_then_given_up(path: Path) -> None:
    writer = RingWriter(path)
    for number in range(3):
        writer.record(1, number, number, 0)
    # Remove the tag of the second record, as if the writer had not stored it yet.
    overwrite(path, HEADER_BYTES + RECORD_BYTES + 24, 0)
    now_s = [0.0]
    reader = RingReader(path, clock_s=lambda: now_s[0])
    assert reader.read().start_ns.tolist() == [0]
    assert reader.read().start_ns.tolist() == []
    now_s[0] = 10.0
    late = reader.read()
    assert (late.start_ns.tolist(), late.overwritten) == ([2], 1)
    final = RingReader(path).read(final=True)
    assert (final.start_ns.tolist(), final.overwritten) == ([0, 2], 1)


def test_a_cursor_that_goes_back_is_an_error(path: Path) -> None:
    writer = RingWriter(path)
    writer.record(1, 0, 0, 0)
    reader = RingReader(path)
    reader.read()
    overwrite(path, CURSOR_WORD * 8, -5)
    with pytest.raises(RingError, match="went back"):
        reader.read()


@pytest.mark.parametrize(
    ("at", "value", "complaint"),
    [(0, 0, "not a ring"), (8, 99, "version 99"), (24, 1 << 40, "not that long"), (24, 3, "not that long")],
)
def test_a_header_that_lies_is_refused(path: Path, at: int, value: int, complaint: str) -> None:
    RingWriter(path)
    overwrite(path, at, value)
    with pytest.raises(RingError, match=complaint):
        RingReader(path)


def test_a_file_that_is_no_ring_is_refused(path: Path) -> None:
    for content in (b"", b"hello", bytes(HEADER_BYTES)):
        path.write_bytes(content)
        with pytest.raises(RingError):
            RingReader(path)


def test_what_a_thread_is_in_is_read_from_its_slot(path: Path) -> None:
    RingWriter(path)
    reader = RingReader(path)
    assert reader.in_flight() == []
    write_slot(path, 0, 77, 5, 1000, 48_000)
    write_slot(path, SLOTS - 1, 78, MAX_NODE, 0, -7)
    write_slot(path, 3, 79, NO_NODE, 0)
    assert reader.in_flight() == [InFlight(77, 5, 1000, 48_000), InFlight(78, MAX_NODE, None, 0)]


def test_a_thread_in_nothing_is_told_from_one_in_an_unnamed_step(path: Path) -> None:
    RingWriter(path)
    write_slot(path, 0, 77, NO_NODE, 0)
    write_slot(path, 1, 78, HELD, 1000)
    reader = RingReader(path)
    assert reader.threads() == [InFlight(77, NO_NODE, None), InFlight(78, HELD, 1000)]
    assert reader.in_flight() == []


@pytest.mark.parametrize(
    "slot", [(0, 5, 1), (-1, 5, 1), (1 << 40, 5, 1), (7, HELD - 1, 1), (7, MAX_NODE + 1, 1), (7, 5, -1)]
)
def test_a_slot_that_no_writer_would_write_is_left_out(path: Path, slot: tuple[int, int, int]) -> None:
    RingWriter(path)
    write_slot(path, 0, *slot)
    write_slot(path, 1, 8, 5, 1)
    assert RingReader(path).threads() == RingReader(path).in_flight() == [InFlight(8, 5, 1)]


@pytest.mark.parametrize("size_bytes", [0, 100, HEADER_BYTES, HEADER_BYTES + 512 * RECORD_BYTES])
def test_a_file_that_was_cut_short_is_an_error_and_no_signal(path: Path, size_bytes: int) -> None:
    writer = RingWriter(path, 1024 * RECORD_BYTES)
    reader, late = RingReader(path), RingReader(path)
    for number in range(900):
        writer.record(1, number, number, 0)
    assert len(late.read().node) == 900
    os.truncate(path, size_bytes)
    for look in (reader.read, late.read, lambda: reader.produced, reader.newest_end_ns):
        with contextlib.suppress(RingError):  # A call that does not read the part that was cut off may succeed.
            look()
    with pytest.raises(RingError, match="cut short"):
        reader.read()
    if not size_bytes:
        with pytest.raises(RingError, match="cut short"):
            reader.in_flight()


def test_a_file_cut_short_between_two_copies_is_an_error_and_not_a_signal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(2):
        path.unlink(missing_ok=True)
        writer, reader = RingWriter(path), RingReader(path)
        writer.record(1, 2, 3, 4)
        fences = iter([lambda: None] * at + [lambda: os.truncate(path, 0)] * 2)
        with monkeypatch.context() as patched:
            patched.setattr(ring_reader, "fence", lambda fences=fences: next(fences)())
            with pytest.raises(RingError, match="cut short"):
                reader.read()


def test_whose_descriptor_was_closed_and_given_to_another_file_is_an_error(path: Path) -> None:
    writer = RingWriter(path)
    before = descriptors_of(path)
    reader = RingReader(path)
    writer.record(1, 2, 3, 4)
    (descriptor,) = descriptors_of(path) - before
    other = os.open(__file__, os.O_RDONLY)
    os.dup2(other, descriptor)
    os.close(other)
    with pytest.raises(RingError, match="closed under its reader"):
        reader.read()
    os.close(descriptor)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.integers(0, 200), cursor=st.integers(0, 1), amounts=st.booleans())
def test_the_newest_time_is_found_at_any_ring_position_and_cursor(
    path: Path, records: int, cursor: int, amounts: bool
) -> None:
    path.unlink(missing_ok=True)
    writer = RingWriter(path, 64 * RECORD_BYTES)
    for number in range(records):
        writer.record(1, number, number + 1, 0)
    if amounts and records:
        writer.record(1 | FLAG_AMOUNTS, 1 << 50, 1 << 60, 0)
    if cursor:  # In a ring of the compiled hot path, this word has the number of written records.
        overwrite(path, CURSOR_WORD * 8, records + (amounts and records > 0))
    reader = RingReader(path)
    assert reader.newest_end_ns() == (records or None)
    reader.close()


@pytest.mark.parametrize("end_ns", [-1, 0])
def test_a_time_before_all_clocks_began_is_none(path: Path, end_ns: int) -> None:
    RingWriter(path).record(1, end_ns - 1, end_ns, 1)
    assert RingReader(path).newest_end_ns() is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cursor=st.integers(-(1 << 63), (1 << 63) - 1),
    slots=st.lists(st.tuples(st.integers(0, 63), *[st.integers(-(1 << 63), (1 << 63) - 1)] * 4), max_size=8),
)
def test_of_a_ring_that_lies_the_newest_time_is_some_number_or_an_error(
    path: Path, cursor: int, slots: list[tuple[int, ...]]
) -> None:
    path.unlink(missing_ok=True)
    writer = RingWriter(path, 64 * RECORD_BYTES)
    writer.record(1, 2, 3, 4)
    for slot, *words in slots:
        struct.pack_into("<4q", writer.memory, HEADER_BYTES + slot * RECORD_BYTES, *words)
    overwrite(path, CURSOR_WORD * 8, cursor)
    reader = RingReader(path)
    with contextlib.suppress(RingError):
        assert isinstance(reader.newest_end_ns(), int | None)
    reader.close()


@pytest.mark.parametrize("number", [0, 1])
def test_an_incomplete_record_is_awaited_wherever_a_reader_begins(path: Path, number: int) -> None:
    writer = RingWriter(path)
    for at in range(number + 1):
        writer.record(1, at, at, 0)
    # Remove the tag of one record, so that it looks incomplete.
    overwrite(path, HEADER_BYTES + number * RECORD_BYTES + 24, 0)
    writer.record(1, number + 1, number + 1, 0)
    reader = RingReader(path, clock_s=lambda: 1_000.0)
    assert reader.read().start_ns.tolist() == list(range(number))
    assert reader.read().overwritten == 0


def test_the_newest_time_is_of_this_lap_where_the_last_one_left_later_ones(path: Path) -> None:
    """Times can decrease, because records of bricks may be written before those of their step."""
    writer = RingWriter(path, 256 * RECORD_BYTES)
    for number in range(256 + 50):
        writer.record(1, 0, 10_000 - number, 0)
    assert RingReader(path).newest_end_ns() == 10_000 - (256 + 50 - 64)


def test_the_newest_time_takes_few_reads_however_large_the_ring_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RingWriter(path)
    for number in range(1_000):
        writer.record(1, number, number + 1, 0)
    reader, reads = RingReader(path), list[int]()
    read_at = OpenFile.read_at
    monkeypatch.setattr(
        OpenFile, "read_at", lambda file, at, size_bytes: reads.append(at) or read_at(file, at, size_bytes)
    )
    assert reader.newest_end_ns() == 1_000
    assert len(reads) < 25  # A binary search in a ring of 8 MiB needs 18 reads.


def test_what_nobody_asked_for_is_not_read_ahead(path: Path) -> None:
    """The file of a ring is sparse, so the reader must not read ahead.

    It took 0.4 ms to read a part that was never written, and this allocated memory around it.
    """
    RingWriter(path)
    advice: list[tuple[object, ...]] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "posix_fadvise", lambda *said: advice.append(said[1:]))
        RingReader(path)
    assert advice == [(0, 0, os.POSIX_FADV_RANDOM)]


@pytest.mark.parametrize("cursor", [0, MAX_RECORDS])
def test_a_cursor_that_is_none_or_as_far_as_one_goes_has_no_newest_time(path: Path, cursor: int) -> None:
    RingWriter(path)
    overwrite(path, CURSOR_WORD * 8, cursor)
    assert RingReader(path).newest_end_ns() is None
