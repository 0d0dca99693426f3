"""Tests of the ring: the ring counts every lost record, whoever writes and whenever it is read."""

from __future__ import annotations

import errno
import gc
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
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtop.protocol import ring as ring_module
from cbtop.protocol import ring_reader
from cbtop.protocol.errors import RingError
from cbtop.protocol.ring import (
    FLAG_FAILED,
    FLAG_LOOSE,
    FLAG_PLAIN,
    FLAG_UNCOUNTED,
    HEADER_BYTES,
    LANE_SHIFT,
    MADV_POPULATE_WRITE,
    NEVER_WRITTEN,
    RECORD,
    RECORD_BYTES,
    RingWriter,
    pack_in_order,
)
from cbtop.protocol.ring_reader import InFlight, RingReader
from tests.protocol.ring_words import overwrite

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
    """A slot of a ring in memory with weak ordering, which processors other than x86 have.

    Between two fences of the writer, stores become visible in any order. Between two fences of the reader, each word
    is loaded at its own time.
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
        # If a word differs between two readings, it was stored at some time between them.
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
        """Give each word the value of a random moment. The reader sees these values until its next fence."""
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
        patched.setattr(ring_reader, "fence", memory.load)
        reader = RingReader(path)
        batch = reader.read(final=data.draw(st.booleans()))
    columns = (batch.node, batch.start_ns, batch.end_ns, batch.elements)
    found = list(zip(*(column.tolist() for column in columns), strict=True))
    assert found in ([], [(1, 10, 11, 12)], [(2, 20, 21, 22)])
    assert len(found) + batch.overwritten == reader.read_to
    reader.close()
    path.unlink()


def test_the_ring_is_the_users_alone(path: Path) -> None:
    RingWriter(path)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(sys.platform != "linux", reason="what is mapped is told by Linux alone")
def test_every_page_is_mapped_before_the_first_record_so_no_step_waits(path: Path) -> None:
    try:
        mmap.mmap(-1, mmap.PAGESIZE).madvise(MADV_POPULATE_WRITE, 0, mmap.PAGESIZE)
    except OSError:
        pytest.skip("Linux before 5.14 maps them as they are written")
    ring = RingWriter(path, 1 << 20)
    _, _, mapped = Path("/proc/self/smaps").read_text().partition(f"{ring.path}\n")
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


def test_a_closed_ring_is_freed_without_collecting_garbage(path: Path) -> None:
    writer = RingWriter(path, 8192 * RECORD_BYTES)
    memory, record = weakref.ref(writer.memory), writer.record
    gc.disable()
    try:
        writer.close()
        del writer
        record(1, 1, 1, 0)  # a thread is still writing
        assert memory() is not None
        del record
        assert memory() is None
    finally:
        gc.enable()


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


def test_where_the_file_system_copies_on_write_no_ring_is_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "copies_on_write", lambda _descriptor: True)
    with pytest.raises(RingError, match=r"copies on write.*set CBTOP_RUNTIME_DIR to a directory of a tmpfs"):
        RingWriter(path)
    assert list(path.parent.iterdir()) == []


def test_a_file_has_the_layout_that_its_version_stands_for(path: Path) -> None:
    """Check the layout of version 2, because other releases read it.

    The ring has a failed record in lane 3 without a count of elements, a plain step, and the slot of the second
    thread.
    """
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
        overwrite(path, (24 + 8 + at) * 8, word)
    assert RingReader(path).in_flight() == [InFlight(77, 7, 500)]


def test_no_elements_are_a_count_also_where_a_lap_begins(path: Path) -> None:
    writer = RingWriter(path, 8 * RECORD_BYTES)
    for _ in range(9):
        writer.record(1, 5, 6, 0)
    assert set(RingReader(path).read().flags.tolist()) == {0}
