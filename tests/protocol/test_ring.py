"""The ring loses nothing it does not count, whoever writes and whenever the reader comes."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbtop.protocol.errors import RingError
from cbtop.protocol.ring import (
    CURSOR_WORD,
    FIRST_SLOT_WORD,
    FLAG_FAILED,
    HEADER_BYTES,
    MAX_NODE,
    NO_NODE,
    RECORD_BYTES,
    SLOT_WORDS,
    SLOTS,
    InFlight,
    RingReader,
    RingWriter,
)


@pytest.fixture
def path(runtime: Path) -> Path:
    return runtime / "1-2-0.ring"


def test_a_record_comes_back_whole(path: Path) -> None:
    writer = RingWriter(path)
    writer.record(7 | FLAG_FAILED, 100, 250, 4096)
    batch = RingReader(path).read()
    columns = (batch.node, batch.flags, batch.start_ns, batch.end_ns, batch.elements)
    assert [column.tolist() for column in columns] == [[7], [FLAG_FAILED], [100], [250], [4096]]
    assert batch.overwritten == 0


@settings(max_examples=60)
@given(bursts=st.lists(st.integers(0, 40), max_size=12))
def test_what_was_written_is_read_once_in_order_or_counted_as_overwritten(bursts: list[int]) -> None:
    path = Path(os.environ["CBTOP_RUNTIME_DIR"]) / f"1-{time.time_ns()}-0.ring"
    writer = RingWriter(path, 8 * RECORD_BYTES)
    reader = RingReader(path)
    written = seen = lost = 0
    for burst in bursts:
        for _ in range(burst):
            writer.record(1, written, written, 0)
            written += 1
        batch = reader.read()
        lost += batch.overwritten
        assert batch.start_ns.tolist() == list(range(seen + lost, written))
        seen += len(batch.start_ns)
        assert seen + lost == written == writer.produced
    path.unlink()


def test_eight_threads_lose_and_corrupt_nothing(path: Path) -> None:
    writer, each = RingWriter(path), 5000

    def write(node: int) -> None:
        for number in range(each):
            writer.record(node, number, number + node, node * number)

    threads = [threading.Thread(target=write, args=(node,)) for node in range(1, 9)]
    for thread in threads:
        thread.start()
    reader, found = RingReader(path), []
    while any(thread.is_alive() for thread in threads) or reader.read_to < reader.produced:
        batch = reader.read()
        assert batch.overwritten == 0
        found += list(
            zip(
                batch.node.tolist(),
                batch.start_ns.tolist(),
                batch.end_ns.tolist(),
                batch.elements.tolist(),
                strict=True,
            )
        )
    assert sorted(found) == [(n, i, i + n, n * i) for n in range(1, 9) for i in range(each)]


def test_elements_that_are_no_integer_cost_the_record_but_not_the_host(path: Path) -> None:
    writer = RingWriter(path)
    writer.record(1, 0, 1, 3.5)  # type: ignore[arg-type]
    writer.record(1, 0, 1, 1 << 70)
    writer.record(1, 0, 1, 2)
    assert RingReader(path).read().node.tolist() == [NO_NODE, NO_NODE, 1]


def test_a_slot_that_was_begun_and_not_completed_is_waited_for_then_given_up(path: Path) -> None:
    writer = RingWriter(path)
    for number in range(3):
        writer.record(1, number, number, 0)
    _overwrite(path, HEADER_BYTES + RECORD_BYTES + 24, 0)  # the second record's tag: not yet stored
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
    _overwrite(path, CURSOR_WORD * 8, -5)
    with pytest.raises(RingError, match="went back"):
        reader.read()


@pytest.mark.parametrize(
    ("at", "value", "complaint"),
    [(0, 0, "not a ring"), (8, 99, "version 99"), (24, 1 << 40, "not that long"), (24, 3, "not that long")],
)
def test_a_header_that_lies_is_refused(path: Path, at: int, value: int, complaint: str) -> None:
    RingWriter(path)
    _overwrite(path, at, value)
    with pytest.raises(RingError, match=complaint):
        RingReader(path)


def test_a_file_that_is_no_ring_is_refused(path: Path) -> None:
    for content in (b"", b"hello", bytes(HEADER_BYTES)):
        path.write_bytes(content)
        with pytest.raises(RingError):
            RingReader(path)


def test_the_ring_is_the_users_alone(path: Path) -> None:
    RingWriter(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_an_error_at_the_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(RingError, match="No space left"):
        RingWriter(path)
    assert list(path.parent.iterdir()) == []


def test_a_killed_writer_loses_no_complete_record(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from cbtop.protocol.ring import RingWriter\n"
        f"w = RingWriter(Path({str(path)!r})); n = 0\n"
        "while True:\n"
        "    w.record(1, n, n, 0); n += 1\n"
        "    if n == 1000: print('go', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
    reader = RingReader(path)
    batch = reader.read(final=True)
    produced = reader.produced
    assert produced >= 1000
    assert len(batch.node) + batch.overwritten in (produced, produced + 1)
    assert batch.start_ns.tolist() == list(range(batch.overwritten, batch.overwritten + len(batch.node)))


def test_what_a_thread_is_in_is_read_from_its_slot(path: Path) -> None:
    RingWriter(path)
    reader = RingReader(path)
    assert reader.in_flight() == []
    _write_slot(path, 0, 77, 5, 1000)
    _write_slot(path, SLOTS - 1, 78, MAX_NODE, 0)
    _write_slot(path, 3, 79, NO_NODE, 0)
    assert reader.in_flight() == [InFlight(77, 5, 1000), InFlight(78, MAX_NODE, None)]


@pytest.mark.parametrize(
    "slot", [(0, 5, 1), (-1, 5, 1), (1 << 40, 5, 1), (7, -1, 1), (7, MAX_NODE + 1, 1), (7, 5, -1)]
)
def test_a_slot_that_no_writer_would_write_is_left_out(path: Path, slot: tuple[int, int, int]) -> None:
    RingWriter(path)
    _write_slot(path, 0, *slot)
    _write_slot(path, 1, 8, 5, 1)
    assert RingReader(path).in_flight() == [InFlight(8, 5, 1)]


def test_slots_of_a_file_that_was_cut_short_are_not_touched(path: Path) -> None:
    RingWriter(path)
    reader = RingReader(path)
    os.truncate(path, 0)
    with pytest.raises(RingError, match="cut short"):
        reader.in_flight()


def _write_slot(path: Path, slot: int, *words: int) -> None:
    for index, word in enumerate(words):
        _overwrite(path, 8 * (FIRST_SLOT_WORD + slot * SLOT_WORDS + index), word)


def _overwrite(path: Path, at: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<q", value))
