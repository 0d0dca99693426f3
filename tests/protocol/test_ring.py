"""The ring loses nothing it does not count, whoever writes and whenever the reader comes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import runpy
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtop.protocol import ring as ring_module
from cbtop.protocol.errors import RingError
from cbtop.protocol.open_file import OpenFile
from cbtop.protocol.ring import (
    CURSOR_WORD,
    FIRST_SLOT_WORD,
    FLAG_AMOUNTS,
    FLAG_FAILED,
    FLAG_LOOSE,
    FLAG_PLAIN,
    FLAG_UNCOUNTED,
    HEADER_BYTES,
    HELD,
    LANE_SHIFT,
    MADV_POPULATE_WRITE,
    MAX_NODE,
    MAX_RECORDS,
    NEVER_WRITTEN,
    NO_NODE,
    RECORD,
    RECORD_BYTES,
    SLOT_WORDS,
    SLOTS,
    InFlight,
    RingReader,
    RingWriter,
    pack_in_order,
)

Pack = Callable[..., None]
either_writer = pytest.mark.parametrize("pack", [RECORD.pack_into, pack_in_order], ids=["x86", "elsewhere"])


@pytest.fixture
def path(runtime: Path) -> Path:
    return runtime / "1-2-0.ring"


@pytest.fixture
def pack() -> Pack:
    return RECORD.pack_into


@pytest.fixture(autouse=True)
def chosen(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "pack_record", pack)


@either_writer
def test_a_record_comes_back_whole(path: Path) -> None:
    writer = RingWriter(path)
    writer.record(7 | FLAG_FAILED, 100, 250, 4096)
    batch = RingReader(path).read()
    columns = (batch.node, batch.flags, batch.start_ns, batch.end_ns, batch.elements)
    assert [column.tolist() for column in columns] == [[7], [FLAG_FAILED], [100], [250], [4096]]
    assert batch.overwritten == 0


@either_writer
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        assert seen + lost == written == reader.produced
    path.unlink()


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
    assert reader.is_filling  # it was written round three times
    os.truncate(path, HEADER_BYTES)
    with pytest.raises(RingError, match="cut short"):
        assert reader.is_filling


@either_writer
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


@either_writer
def test_elements_that_are_no_count_are_left_out_of_a_record_that_says_so(path: Path) -> None:
    writer = RingWriter(path)
    for elements in (3.5, 1 << 70, -1, 1 << 63, 2):
        writer.record(1, 0, 1, elements)  # type: ignore[arg-type]
    batch = RingReader(path).read()
    assert (batch.node.tolist(), batch.elements.tolist()) == ([1] * 5, [0, 0, 0, 0, 2])
    assert batch.flags.tolist() == [FLAG_UNCOUNTED] * 4 + [0]


@pytest.mark.parametrize("start_ns", [7, "seven"])
@either_writer
def test_whoever_writes_a_record_takes_the_old_tag_away_first(pack: Pack, start_ns: int) -> None:
    memory = bytearray(b"\xff" * RECORD_BYTES)
    with pytest.raises(struct.error):
        pack(memory, 0, start_ns, 8, "nine", 5, 1)
    assert struct.unpack_from("<q", memory, 24) == (NEVER_WRITTEN,)


@either_writer
def test_nothing_is_written_outside_the_memory(pack: Pack) -> None:
    for memory, at in ((bytearray(), -1), (bytearray(RECORD_BYTES), ring_module.LAP_DUE)):
        with pytest.raises(struct.error):
            pack(memory, at, 1, 2, 3, 4, 5)
        assert not any(memory)


@pytest.mark.parametrize(("machine", "name"), [("x86_64", "pack_into"), ("aarch64", "pack_in_order")])
def test_the_machine_decides_how_a_record_is_written(
    machine: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    chosen = runpy.run_path(str(ring_module.__file__))["pack_record"]
    assert chosen.__name__ == name


class WeakMemory:
    """A slot in a memory that keeps stores in order at fences only, as a processor that is not x86 may.

    Between two fences of the writer its stores become visible in any order. Between two fences of the reader each
    word is loaded at a time of its own.
    """

    def __init__(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, draw: Callable[[st.SearchStrategy[int]], int]
    ) -> None:
        self.draw = draw
        seen: list[tuple[int, ...]] = []
        writer = RingWriter(path, RECORD_BYTES)
        writer.record(1, 10, 11, 12)

        def look() -> None:
            seen.append(struct.unpack_from("<4q", writer.memory, HEADER_BYTES))

        look()
        with monkeypatch.context() as patched:
            patched.setattr(ring_module, "fence", look)
            writer.record(2, 20, 21, 22)
        look()
        # What changed between two looks was stored between them: when in there, nobody knows.
        self.words = [[(0, value)] for value in seen[0]]
        for stage, (before, after) in enumerate(pairwise(seen)):
            for word, (old, new) in enumerate(zip(before, after, strict=True)):
                if old != new:
                    self.words[word].append((100 * stage + draw(st.integers(1, 100)), new))
        self.end = 100 * len(seen)
        self.memory = writer.memory
        self.now = 0
        self.load()

    def load(self) -> None:
        """Let the reader's next loads see any moment up to its next fence."""
        until = draw_between(self.draw, self.now, self.end)
        for word, history in enumerate(self.words):
            at = draw_between(self.draw, self.now, until)
            value = [value for stored, value in history if stored <= at][-1]
            struct.pack_into("<q", self.memory, HEADER_BYTES + 8 * word, value)
        self.now = until


def draw_between(draw: Callable[[st.SearchStrategy[int]], int], low: int, high: int) -> int:
    return draw(st.integers(low, high))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_record_is_whole_or_not_counted_if_stores_and_loads_are_reordered(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    path = Path(os.environ["CBTOP_RUNTIME_DIR"]) / f"1-{time.time_ns()}-0.ring"
    with monkeypatch.context() as patched:
        patched.setattr(ring_module, "pack_record", pack_in_order)
        memory = WeakMemory(path, patched, data.draw)
        patched.setattr(ring_module, "fence", memory.load)
        reader = RingReader(path)
        batch = reader.read(final=data.draw(st.booleans()))
    columns = (batch.node, batch.start_ns, batch.end_ns, batch.elements)
    found = list(zip(*(column.tolist() for column in columns), strict=True))
    assert found in ([], [(1, 10, 11, 12)], [(2, 20, 21, 22)])
    assert len(found) + batch.overwritten == reader.read_to
    reader.close()
    path.unlink()


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


@pytest.mark.skipif(sys.platform != "linux", reason="what is mapped is told by Linux alone")
def test_every_page_is_mapped_before_the_first_record_so_no_step_waits(path: Path) -> None:
    ring = RingWriter(path, 1 << 20)
    try:
        ring._memory.madvise(MADV_POPULATE_WRITE, 0, mmap.PAGESIZE)
    except OSError:
        pytest.skip("Linux before 5.14 maps them as they are written")
    _, _, mapped = Path("/proc/self/smaps").read_text().partition(f"{path}\n")
    resident = next(line.split() for line in mapped.splitlines() if line.startswith("Rss:"))
    assert resident == ["Rss:", str(((1 << 20) + HEADER_BYTES) >> 10), "kB"]


@pytest.mark.parametrize("reason", [errno.EINVAL, errno.ENOMEM])
def test_where_the_system_maps_no_pages_ahead_a_ring_is_made_all_the_same(
    path: Path, reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(reason, "no")

    monkeypatch.setattr("cbtop.protocol.ring.mmap.mmap", Memory)
    ring = RingWriter(path, 1 << 12)
    ring.record(5, 1, 2, 3)
    assert RingReader(path).read().node.tolist() == [5]


def test_a_full_disk_is_an_error_at_the_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(RingError, match="No space left"):
        RingWriter(path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("size_bytes", [RECORD_BYTES, 1 << 20, 4 << 20])
def test_where_the_system_cannot_allocate_a_file_it_is_written_whole(
    path: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    RingWriter(path, size_bytes).record(1, 2, 3, 4)
    assert path.stat().st_blocks * 512 >= HEADER_BYTES + size_bytes
    assert RingReader(path).read().elements.tolist() == [4]


@pytest.mark.parametrize("trouble", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_a_file_system_cannot_allocate_a_file_it_is_written_whole(
    path: Path, trouble: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(trouble, os.strerror(trouble))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    RingWriter(path).record(1, 2, 3, 4)
    assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_a_full_disk_is_an_error_at_the_start_even_without_posix_fallocate(path: Path) -> None:
    script = (
        "import os, resource, signal, sys; from pathlib import Path\n"
        "from cbtop.protocol.errors import RingError; from cbtop.protocol.ring import RingWriter\n"
        "del os.posix_fallocate\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try: RingWriter(Path(sys.argv[1]), 2 << 20)\n"
        "except RingError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert "File too large" in done.stdout
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("word", [-1, (1 << 62) + 1])
def test_how_many_announcements_were_left_out_is_read_and_checked(path: Path, word: int) -> None:
    writer, reader = RingWriter(path), RingReader(path)
    assert reader.left_out == 0
    writer.set_left_out(7)
    assert reader.left_out == 7
    writer.set_left_out(word)
    with pytest.raises(RingError, match="left out"):
        _ = reader.left_out


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
    _write_slot(path, 0, 77, 5, 1000, 48_000)
    _write_slot(path, SLOTS - 1, 78, MAX_NODE, 0, -7)
    _write_slot(path, 3, 79, NO_NODE, 0)
    assert reader.in_flight() == [InFlight(77, 5, 1000, 48_000), InFlight(78, MAX_NODE, None, 0)]


def test_a_thread_in_nothing_is_told_from_one_in_an_unnamed_step(path: Path) -> None:
    RingWriter(path)
    _write_slot(path, 0, 77, NO_NODE, 0)
    _write_slot(path, 1, 78, HELD, 1000)
    reader = RingReader(path)
    assert reader.threads() == [InFlight(77, NO_NODE, None), InFlight(78, HELD, 1000)]
    assert reader.in_flight() == []


@pytest.mark.parametrize(
    "slot", [(0, 5, 1), (-1, 5, 1), (1 << 40, 5, 1), (7, HELD - 1, 1), (7, MAX_NODE + 1, 1), (7, 5, -1)]
)
def test_a_slot_that_no_writer_would_write_is_left_out(path: Path, slot: tuple[int, int, int]) -> None:
    RingWriter(path)
    _write_slot(path, 0, *slot)
    _write_slot(path, 1, 8, 5, 1)
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
        with contextlib.suppress(RingError):  # who asks for nothing that is gone may get it
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
            patched.setattr(ring_module, "fence", lambda fences=fences: next(fences)())
            with pytest.raises(RingError, match="cut short"):
                reader.read()


def test_whose_descriptor_was_closed_and_given_to_another_file_is_an_error(path: Path) -> None:
    writer, reader = RingWriter(path), RingReader(path)
    writer.record(1, 2, 3, 4)
    descriptor = reader._file._descriptor
    other = os.open(__file__, os.O_RDONLY)
    os.dup2(other, descriptor)
    os.close(other)
    with pytest.raises(RingError, match="closed under its reader"):
        reader.read()
    os.close(descriptor)


@pytest.mark.parametrize("records", [0, 1, 1000, 5000, 8191])
def test_a_closed_ring_keeps_its_records_and_frees_the_unused_room(path: Path, records: int) -> None:
    writer = RingWriter(path, 8192 * RECORD_BYTES)
    for number in range(records):
        writer.record(1, number, number, 0)
    reader = RingReader(path)
    assert not reader.is_closed
    writer.close()
    assert reader.is_closed
    assert reader.read(final=True).start_ns.tolist() == list(range(records))
    status = path.stat()
    assert status.st_size == HEADER_BYTES + 8192 * RECORD_BYTES
    used_bytes = HEADER_BYTES + (records + 64) * RECORD_BYTES
    assert status.st_blocks * 512 <= min(status.st_size, used_bytes) + 2 * mmap.PAGESIZE


def test_a_ring_that_was_written_round_keeps_all_of_it(path: Path) -> None:
    for records in (8192, 8193, 20_000):
        path.unlink(missing_ok=True)
        writer = RingWriter(path, 8192 * RECORD_BYTES)
        for number in range(records):
            writer.record(1, number, number, 0)
        writer.close()
        batch = RingReader(path).read(final=True)
        assert batch.start_ns.tolist() == list(range(records - 8192, records))


def test_where_the_system_knows_no_holes_a_ring_is_closed_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(mmap, "MADV_REMOVE")
    RingWriter(path).close()
    assert RingReader(path).is_closed


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
    if cursor:  # as the compiled hot path leaves it
        _overwrite(path, CURSOR_WORD * 8, records + (amounts and records > 0))
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
    _overwrite(path, CURSOR_WORD * 8, cursor)
    reader = RingReader(path)
    with contextlib.suppress(RingError):
        assert isinstance(reader.newest_end_ns(), int | None)
    reader.close()


def test_where_the_file_system_copies_on_write_no_ring_is_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "copies_on_write", lambda _descriptor: True)
    with pytest.raises(RingError, match=r"copies on write.*set CBTOP_RUNTIME_DIR to a directory of a tmpfs"):
        RingWriter(path)
    assert list(path.parent.iterdir()) == []


def _write_slot(path: Path, slot: int, *words: int) -> None:
    for index, word in enumerate(words):
        _overwrite(path, 8 * (FIRST_SLOT_WORD + slot * SLOT_WORDS + index), word)


def _overwrite(path: Path, at: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<q", value))


def test_a_file_has_the_layout_that_its_version_stands_for(path: Path) -> None:
    """Of version 2, in numbers: a process of another release reads it. A record that failed and gave no count of its
    elements, in lane 3, then a plain step; and the slot of the second thread."""
    writer = RingWriter(path, 8 * RECORD_BYTES)
    writer.record(7 | FLAG_FAILED | FLAG_UNCOUNTED | 3 << LANE_SHIFT, 100, 250, 4096)
    writer.record(9 | FLAG_PLAIN, 300, 400, 1)
    writer.record(9 | FLAG_LOOSE, 300, 400, 1)
    data = bytearray(path.read_bytes())
    assert (data[:8], struct.unpack_from("<qqq", data, 8)) == (b"CBTOPRNG", (2, 32, 8))
    assert struct.unpack_from("<qqqq", data, 4096) == (100, 250, 4096, 1 << 32 | 3 << 28 | 0x05 << 24 | 7)
    assert struct.unpack_from("<qqqq", data, 4128) == (300, 400, 1, 2 << 32 | 1 << 28 | 0x08 << 24 | 9)
    assert struct.unpack_from("<q", data, 4184)[0] == 3 << 32 | 0x0A << 24 | 9
    for at, word in enumerate((77, 7, 500)):
        _overwrite(path, (24 + 8 + at) * 8, word)
    assert RingReader(path).in_flight() == [InFlight(77, 7, 500)]


@pytest.mark.parametrize("number", [0, 1])
def test_an_incomplete_record_is_awaited_wherever_a_reader_begins(path: Path, number: int) -> None:
    writer = RingWriter(path)
    for at in range(number + 1):
        writer.record(1, at, at, 0)
    _overwrite(path, HEADER_BYTES + number * RECORD_BYTES + 24, 0)  # its tag
    writer.record(1, number + 1, number + 1, 0)
    reader = RingReader(path, clock_s=lambda: 1_000.0)
    assert reader.read().start_ns.tolist() == list(range(number))
    assert reader.read().overwritten == 0


def test_the_newest_time_is_of_this_lap_where_the_last_one_left_later_ones(path: Path) -> None:
    """As of brick records written before those of the step that they lie in: times need not grow."""
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
    assert len(reads) < 25  # 18 halve a ring of 8 MiB


def test_what_nobody_asked_for_is_not_read_ahead(path: Path) -> None:
    """A ring is sparse: a record of what was never written took 0.4 ms, and the memory of all around it."""
    RingWriter(path)
    advice: list[tuple[object, ...]] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "posix_fadvise", lambda *said: advice.append(said[1:]))
        RingReader(path)
    assert advice == [(0, 0, os.POSIX_FADV_RANDOM)]


@pytest.mark.parametrize("cursor", [0, MAX_RECORDS])
def test_a_cursor_that_is_none_or_as_far_as_one_goes_has_no_newest_time(path: Path, cursor: int) -> None:
    RingWriter(path)
    _overwrite(path, CURSOR_WORD * 8, cursor)
    assert RingReader(path).newest_end_ns() is None


def test_no_elements_are_a_count_also_where_a_lap_begins(path: Path) -> None:
    writer = RingWriter(path, 8 * RECORD_BYTES)
    for _ in range(9):
        writer.record(1, 5, 6, 0)
    assert set(RingReader(path).read().flags.tolist()) == {0}
