"""Tests of hostile bytes: each decoder rejects such bytes with its own error and within its limit of memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cbtop.protocol import codec
from cbtop.protocol.attributes import FunctionAttributes, KernelAttributes, TransferAttributes, Work
from cbtop.protocol.catalog import CatalogReader, CatalogWriter
from cbtop.protocol.errors import DecodeError, RingError
from cbtop.protocol.messages import Activity, HostHello, Message, Node, SourceCatalog, SourceState, StatsUpdate
from cbtop.protocol.ring import CURSOR_WORD, HEADER_BYTES, MAX_WRITERS_INSIDE, RECORD_BYTES, RingWriter
from cbtop.protocol.ring_reader import RingReader
from cbtop.protocol.vocabulary import NodeKind, SourceStatus

HELLO = HostHello(2, 0, 1, 2, "here", "", "forged", "3", "python", 1, 1)
NODE = Node(
    1, None, NodeKind.BRICK, "RmsNorm", work=Work(flops_per_call=4.0), kernel=KernelAttributes(grid=(1, 2, 3))
)
FRAMES = [
    codec.encode(message)
    for message in (
        HELLO,
        NODE,
        SourceCatalog("a:1:2:3", True, (HELLO, NODE, Activity("compiling", 0.5))),
        SourceState("a:1:2:3", SourceStatus.LIVE, "", 1, 1, 0, 0, 0, 0),
        StatsUpdate("a:1:2:3", 1, 1, 1, *(bytes(8) for _ in range(len(dataclasses.fields(StatsUpdate)) - 4))),
    )
]
I64 = st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from([0, 1, -1, (1 << 63) - 1, -(1 << 63), 1 << 62])
GROUPS = (Work, KernelAttributes, FunctionAttributes, TransferAttributes)
KINDS = get_args(Message)
FIELDS = sorted({field.name for kind in (*KINDS, *GROUPS) for field in dataclasses.fields(kind)})
LENGTHS = [0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF]
# msgpack types that are followed by a length
WIDE = [0xC4, 0xC5, 0xC6, 0xC7, 0xC8, 0xC9, 0xD9, 0xDA, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF]


@st.composite
def mutated(draw: st.DrawFn, frames: list[bytes]) -> bytes:
    """Generate a damaged frame: a few bits are flipped, bytes are removed or inserted, or a length is wrong."""
    data = bytearray(draw(st.sampled_from(frames)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "put in", "length"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at : at + draw(st.integers(1, len(data) + 1))]
            case "put in":
                data[at:at] = draw(st.binary(max_size=12))
            case "length":
                length = struct.pack(">I", draw(st.sampled_from(LENGTHS)))
                data[at : at + 5] = bytes([draw(st.sampled_from(WIDE))]) + length
    return bytes(data)


texts, numbers = st.text(max_size=8), I64 | st.integers(0, (1 << 64) - 1) | st.floats()
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts | st.binary(max_size=4), inner, max_size=5),
    max_leaves=12,
)


@given(mutated(FRAMES))
def test_a_frame_with_bits_turned_is_a_message_or_an_error(data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        codec.decode(data)


@given(
    kind=st.sampled_from(sorted(kind.__name__ for kind in KINDS)),
    fields=st.dictionaries(st.sampled_from(FIELDS), anything),
)
def test_any_value_in_any_field_is_a_message_or_an_error(kind: str, fields: dict[str, Any]) -> None:
    with contextlib.suppress(DecodeError):
        codec.decode(msgpack.packb({"k": kind} | fields))


def nested(depth: int) -> bytes:
    """Return a message that contains `depth` catalogs, one inside another."""
    message: dict[str, Any] = {"k": "Goodbye", "reason": ""}
    for _ in range(depth):
        message = {"k": "SourceCatalog", "source": "", "complete": True, "messages": [message]}
    return bytes(msgpack.packb(message))


def many(item: bytes) -> bytes:
    """Return a frame of 8 MiB with lists. Each list contains `item` 65,535 times."""
    whole = b"\xdc\xff\xff" + item * 65_535
    lists = (8 << 20) // len(whole)
    return b"\xdc" + struct.pack(">H", lists) + whole * lists


BOMBS = {
    "a list said to be of four billion": b"\xdd\xff\xff\xff\xff",
    "a map said to be of four billion": b"\xdf\xff\xff\xff\xff",
    "bytes said to be of four billion": b"\xc6\xff\xff\xff\xff",
    "text said to be of four billion": b"\xdb\xff\xff\xff\xff",
    "lists in lists": b"\x91" * 500_000 + b"\xc0",
    "maps in maps": b"\x81\xa1k" * 500_000 + b"\xc0",
    "catalogs in catalogs": nested(300),
    "empty lists without end": many(b"\x90"),
    "empty maps without end": many(b"\x80"),
    "short texts without end": many(b"\xa2ab"),
    "numbers without end": many(b"\xcd\x7f\xff"),
    "a foreign type": b"\xc7\x08\x01" + bytes(8),
    "a time": b"\xd6\xff" + bytes(4),
    "keys that are no text": b"\x81\xc0\xc0",
}
BYTES_A_PART = 100  # memory of one decoded part: its place in a list, and the object itself; a map takes 72 bytes


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_an_error_and_takes_no_more_memory_than_its_bound(
    bomb: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Use a smaller limit, because it takes long to count allocations.
    monkeypatch.setattr(codec, "MAX_PARTS", 100_000)
    with peak_of() as peak, pytest.raises(DecodeError):
        codec.decode(bomb)
    # A list is allocated before its items are counted, so one list may exceed the limit.
    assert peak() < BYTES_A_PART * (100_000 + 65_535)


@pytest.mark.slow
def test_a_catalog_of_bombs_takes_no_more_memory_than_a_piece(runtime: Path) -> None:
    path = runtime / "1-2-0.catalog"
    said = msgpack.packb({"k": "Weather", "lists": [[]] * 20_000})
    path.write_bytes((struct.pack("<II", len(said), zlib.crc32(said)) + said) * 20)
    with peak_of() as peak:
        assert CatalogReader(path).read() == []
    assert peak() < 8 << 20


@given(data=st.data())
def test_a_catalog_with_bits_turned_is_read_as_far_as_it_is_whole(data: st.DataObject) -> None:
    path = Path(os.environ["CBTOP_RUNTIME_DIR"]) / "fuzz.catalog"
    path.unlink(missing_ok=True)
    writer = CatalogWriter(path)
    for message in (HELLO, NODE, Activity("compiling")):
        writer.write(message)
    writer.close()
    path.write_bytes(data.draw(mutated([path.read_bytes()])))
    reader = CatalogReader(path)
    with contextlib.suppress(DecodeError):
        reader.read()
    reader.close()


@given(words=st.dictionaries(st.integers(0, 9), I64, max_size=3), size=st.integers(0, 3 * HEADER_BYTES))
@example(words={3: 1 << 58}, size=HEADER_BYTES + 32 * RECORD_BYTES)
@example(words={3: -32}, size=HEADER_BYTES + 32 * RECORD_BYTES)
def test_a_header_that_lies_is_an_error(words: dict[int, int], size: int) -> None:
    path = forged_ring(32)
    with path.open("r+b") as file:
        for word, value in words.items():
            file.seek(8 * word)
            file.write(struct.pack("<q", value))
        file.truncate(size)
    with contextlib.suppress(RingError):
        reader = RingReader(path)
        reader.read(final=True)
        reader.close()


@given(
    capacity=st.sampled_from([1, 8, 32, 256]),
    cursors=st.lists(I64, min_size=1, max_size=4),
    slots=st.lists(st.tuples(st.integers(0, 255), st.tuples(I64, I64, I64, I64)), max_size=8),
    final=st.booleans(),
)
@example(capacity=32, cursors=[(1 << 63) - 1], slots=[], final=False)
@example(capacity=32, cursors=[(1 << 63) - 1], slots=[], final=True)
@example(capacity=8, cursors=[1 << 62, 3, -1], slots=[], final=True)
def test_a_cursor_that_jumps_and_records_of_noise_are_an_error_or_counted(
    capacity: int, cursors: list[int], slots: list[tuple[int, tuple[int, int, int, int]]], final: bool
) -> None:
    path = forged_ring(capacity)
    reader = RingReader(path)
    received = overwritten = 0
    try:
        for cursor in cursors:
            with path.open("r+b") as file:
                file.seek(8 * CURSOR_WORD)
                file.write(struct.pack("<q", cursor))
                for slot, words in slots:
                    file.seek(HEADER_BYTES + RECORD_BYTES * (slot % capacity))
                    file.write(struct.pack("<4q", *words))
            batch = reader.read(final=final)
            assert len(batch.node) <= capacity
            received, overwritten = received + len(batch.node), overwritten + batch.overwritten
            assert reader.read_to == received + overwritten
    except RingError:
        pass
    finally:
        reader.close()


@pytest.mark.parametrize("cursor", [(1 << 40) + (1 << 20), (1 << 31) + (1 << 20), 10 * MAX_WRITERS_INSIDE])
def test_a_cursor_far_beyond_what_was_written_is_an_error_that_says_so(cursor: int) -> None:
    path = forged_ring(2 * MAX_WRITERS_INSIDE)
    reader = RingReader(path)
    reader.read()
    with path.open("r+b") as file:
        file.seek(8 * CURSOR_WORD)
        file.write(struct.pack("<q", cursor))
    with pytest.raises(RingError, match=f"{cursor} records.* nothing was written"):
        reader.read()


def forged_ring(capacity: int) -> Path:
    path = Path(os.environ["CBTOP_RUNTIME_DIR"]) / "1-2-0.ring"
    path.unlink(missing_ok=True)
    writer = RingWriter(path, capacity * RECORD_BYTES)
    for number in range(5):
        writer.record(1, number, number + 1, 1)
    return path


@contextlib.contextmanager
def peak_of() -> Any:
    """Measure how much memory is allocated in this context.

    Yields a function that returns the peak in bytes.
    """
    tracemalloc.start()
    found = 0
    answer: Callable[[], int] = lambda: found  # noqa: E731
    try:
        yield answer
    finally:
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
