"""Tests of a catalog (the file with nodes and messages of a process): a catalog is read as far as it is valid."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.protocol import catalog, codec
from cbtop.protocol.catalog import CatalogReader, CatalogWriter
from cbtop.protocol.errors import DecodeError
from cbtop.protocol.messages import Activity, Goodbye, Heartbeat, TraceNumber, TraceSummary
from tests.descriptors import descriptor_of


@pytest.fixture
def path(runtime: Path) -> Path:
    return runtime / "1-2-0.catalog"


def test_messages_come_back_in_order_and_once(path: Path) -> None:
    writer, said = CatalogWriter(path), [Activity("compiling", 0.5), Goodbye("done")]
    reader = CatalogReader(path)
    for message in said:
        writer.write(message)
        assert reader.read() == [message]
    assert reader.read() == []
    assert CatalogReader(path).read() == said
    writer.close()


def test_a_signal_handler_during_a_write_leaves_each_message_there_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, pwrite = CatalogWriter(path), os.pwrite
    handlers: list[Callable[[], object]] = []

    def interrupted(descriptor: int, data: bytes, offset: int) -> int:
        written = pwrite(descriptor, data, offset)
        if handlers:
            handlers.pop()()
        return written

    def fail() -> None:
        raise KeyError("of the host's handler")

    monkeypatch.setattr(os, "pwrite", interrupted)
    handlers.append(lambda: writer.write(Activity("in the handler")))
    writer.write(Activity("a"))
    handlers.append(fail)
    with pytest.raises(KeyError):
        writer.write(Activity("b"))
    writer.write(Activity("c"))
    assert CatalogReader(path).read() == [Activity(what) for what in ("a", "in the handler", "b", "c")]
    assert path.stat().st_size == writer.size_bytes
    assert not writer.is_behind
    writer.close()


def test_a_torn_tail_is_left_for_later(path: Path) -> None:
    writer = CatalogWriter(path)
    writer.write(Activity("a"))
    writer.write(Activity("b"))
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    reader = CatalogReader(path)
    assert reader.read() == [Activity("a")]
    path.write_bytes(whole)
    assert reader.read() == [Activity("b")]


def test_a_damaged_frame_is_an_error(path: Path) -> None:
    CatalogWriter(path).write(Activity("compiling"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DecodeError, match="damaged"):
        CatalogReader(path).read()


def test_a_daemons_message_has_no_place_in_a_catalog(path: Path) -> None:
    CatalogWriter(path).write(Heartbeat(0, ()))  # type: ignore[arg-type]
    with pytest.raises(DecodeError, match="Heartbeat has no place"):
        CatalogReader(path).read()


def test_past_its_bound_the_writer_takes_nothing_but_the_goodbye(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MAX_CATALOG_BYTES", 8192)
    writer = CatalogWriter(path)
    taken = sum(writer.write(Activity("compiling")) for _ in range(500))
    assert 0 < taken < 500
    assert writer.write(Goodbye("x" * codec.MAX_NAME_CHARS))
    assert path.stat().st_size == writer.size_bytes <= 8192
    assert len(CatalogReader(path).read()) == taken + 1
    writer.close()


def test_a_message_that_no_reader_would_take_is_not_taken(path: Path) -> None:
    writer = CatalogWriter(path)
    numbers = tuple(TraceNumber("x" * 256, "y" * 256, 1.0) for _ in range(2000))
    assert not writer.write(TraceSummary("MLT-01", "activations", "about", 1, numbers, ()))
    assert writer.write(Activity("compiling"))
    assert CatalogReader(path).read() == [Activity("compiling")]
    writer.close()


def test_a_file_that_took_the_catalogs_name_is_untouched_and_no_fd_is_lost(path: Path) -> None:
    writer = CatalogWriter(path)
    os.close(descriptor_of(path))
    path.rename(path.with_name("1-2-1.catalog"))
    path.write_bytes(b"theirs")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert writer.write(Activity("compiling"))
    assert (path.read_bytes(), len(os.listdir("/proc/self/fd"))) == (b"theirs", before)
    assert writer.is_behind
    assert writer.trouble is not None
    path.unlink()
    path.with_name("1-2-1.catalog").rename(path)
    assert writer.flush()
    assert CatalogReader(path).read() == [Activity("compiling")] * 5
    writer.close()


def test_what_a_full_disk_refused_follows_when_there_is_room(path: Path) -> None:
    writer, said = CatalogWriter(path), [Activity(f"step {number}") for number in range(9)]
    writer.write(said[0])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Let files grow by only 20 bytes, which is about half a frame.
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limit[1]))
    try:
        for message in said[1:8]:
            writer.write(message)
        assert CatalogReader(path).read() == said[:1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    writer.write(said[8])
    assert CatalogReader(path).read() == said
    assert not writer.is_behind


def test_closing_every_descriptor_harms_neither_the_catalog_nor_other_files(path: Path) -> None:
    writer = CatalogWriter(path)
    descriptor = descriptor_of(path)
    os.close(descriptor)
    with (path.parent / "theirs").open("wb") as theirs:
        assert theirs.fileno() == descriptor
        writer.write(Activity("compiling"))
        assert CatalogReader(path).read() == [Activity("compiling")]
        os.close(descriptor_of(path))
        with (path.parent / "theirs, too").open("wb"):
            writer.close()
    assert (path.parent / "theirs").read_bytes() == b""


def test_a_long_catalog_is_read_in_pieces(path: Path) -> None:
    writer, said = (
        CatalogWriter(path),
        [Activity("x" * codec.MAX_NAME_CHARS, number / 9000) for number in range(9000)],
    )
    for message in said:
        writer.write(message)
    reader, found = CatalogReader(path), []
    for _ in range(path.stat().st_size // catalog.PIECE_BYTES):
        found += reader.read_piece()
        assert reader.is_behind
    found += reader.read_piece()
    assert not reader.is_behind
    assert found == said == CatalogReader(path).read()


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_crash_the_reader(data: bytes) -> None:
    path = Path(os.environ["CBTOP_RUNTIME_DIR"]) / "fuzz.catalog"
    path.write_bytes(data)
    with contextlib.suppress(DecodeError):
        CatalogReader(path).read()
