"""Tests of recordings: each frame is read as it was written, however the writer ended.

A file that is no recording is rejected with one line.
"""

from __future__ import annotations

import os
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.protocol import codec, recording
from cbtop.protocol.errors import DecodeError, ProtocolError, RecordingError, VersionError
from cbtop.protocol.messages import PROTOCOL_MAJOR, DaemonHello, Heartbeat, Message, SourceGone
from cbtop.protocol.recording import FrameKind, RecordingOrigin, RecordingReader, RecordingWriter, encode_frame
from tests.descriptors import descriptor_of

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ORIGIN = RecordingOrigin("here", 1_000, 1_700_000_000_000_000_000)
HELLO = DaemonHello(2, 0, 1, "here", "boot", "0.1.0", 0, 0)
MAX_BYTES = 1 << 20


def frame(kind: FrameKind, time_ns: int, *messages: Message) -> bytes:
    return encode_frame(kind, time_ns, [codec.encode(message) for message in messages])


def record(path: Path, count: int = 10, *, close: bool = True) -> list[tuple[int, int, list[Message]]]:
    """Write a recording with `count` frames. Every fourth frame is a keyframe.

    Returns the written frames.
    """
    writer, written = RecordingWriter(path, ORIGIN, MAX_BYTES), []
    for number in range(count):
        kind = FrameKind.KEYFRAME if number % 4 == 0 else FrameKind.LIVE
        messages: list[Message] = [HELLO, Heartbeat(number, ())] if number % 4 == 0 else [SourceGone(f"s{number}")]
        assert writer.append(frame(kind, number * 100, *messages))
        written.append((int(kind), number * 100, messages))
    if close:
        writer.close()
    return written


@contextmanager
def opened(path: Path) -> Iterator[RecordingReader]:
    reader = RecordingReader(path)
    try:
        yield reader
    finally:
        reader.close()


def found(reader: RecordingReader, offset: int = 0) -> list[tuple[int, int, list[Message]]]:
    return [(f.kind, f.time_ns, list(f.messages())) for f in reader.frames(offset) if f.kind != FrameKind.INDEX]


@given(st.lists(st.binary(max_size=300), max_size=40))
def test_a_frame_of_messages_made_one_by_one_is_a_list_in_zstd(messages: list[bytes]) -> None:
    whole = encode_frame(FrameKind.LIVE, 7, iter(messages))
    assert msgpack.unpackb(zstd.decompress(whole[20:])) == messages


@pytest.mark.parametrize("closed", [True, False])
def test_frames_come_back_and_the_index_is_rebuilt_where_there_is_none(tmp_path: Path, closed: bool) -> None:
    written = record(tmp_path / "r.cbtop", close=closed)
    with opened(tmp_path / "r.cbtop") as reader:
        assert found(reader) == written
        assert reader.origin == ORIGIN
        assert reader.is_closed == closed
        assert [time_ns for time_ns, _ in reader.keyframes] == [0, 400, 800]
        assert (reader.begin_ns, reader.end_ns, reader.damaged) == (0, 900, 0)
        assert found(reader, reader.keyframe_before(799)) == written[4:]
        assert found(reader, reader.keyframe_before(-5)) == written
        assert [f.time_ns for f in reader.frames(0, (FrameKind.KEYFRAME,))] == [0, 400, 800]


def test_a_file_cut_anywhere_loses_the_frame_that_was_cut_and_no_other(tmp_path: Path) -> None:
    path, cut = tmp_path / "whole.cbtop", tmp_path / "cut.cbtop"
    written = record(path, close=False)
    data = path.read_bytes()
    with opened(path) as reader:
        ends = [*(f.offset for f in reader.frames()), len(data)][1:]
    for size in range(96, len(data)):
        cut.write_bytes(data[:size])
        with opened(cut) as reader:
            assert found(reader) == written[: sum(end <= size for end in ends)]


def test_a_tail_that_was_never_filled_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "r.cbtop"
    written = record(path, close=False)
    last = len(frame(FrameKind.LIVE, 900, SourceGone("s9")))
    path.write_bytes(path.read_bytes()[: -last + 26] + bytes(last - 26))
    with opened(path) as reader:
        assert found(reader) == written[:-1]
        assert reader.end_ns == 800


def test_a_damaged_frame_is_counted_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.cbtop"
    written = record(path)
    with opened(path) as reader:
        third = list(reader.frames())[2]
    data = bytearray(path.read_bytes())
    data[third.offset + 30] ^= 1
    path.write_bytes(data)
    with opened(path) as reader:
        assert found(reader) == written[:2] + written[3:]
        assert reader.damaged == 1


@given(st.data())
def test_a_closed_recording_with_any_bytes_cut_out_is_reported_as_damaged(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("hole") / "r.cbtop"
    written = record(path)
    content = path.read_bytes()
    with opened(path) as reader:
        heads = [one.offset for one in reader.frames()]
    # The file is cut anywhere, often at the end of a whole frame.
    ends = st.sampled_from(heads) | st.integers(heads[0], heads[-1])
    begin, end = sorted((data.draw(ends), data.draw(ends.filter(lambda at: at < heads[-1]))))
    end += begin == end
    path.write_bytes(content[:begin] + content[end:])
    with opened(path) as reader:
        assert (reader.is_closed, reader.damaged > 0) == (True, True)
        assert all(one in written for one in found(reader))


def test_an_unclosed_recording_is_damaged_if_no_recorder_wrote_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "r.cbtop"
    record(path, close=False)
    content = path.read_bytes()
    with opened(path) as reader:
        third, fourth = [one.offset for one in reader.frames()][2:4]
    for hole, damaged in ((content[:third] + b"\xff" * 40, True), (content[: fourth - 3], False)):
        path.write_bytes(hole)
        with opened(path) as reader:
            assert (reader.is_closed, reader.damaged > 0) == (False, damaged)
            assert len(found(reader)) == 2


def test_it_is_for_its_owner_alone_and_never_replaces_a_file_unasked(tmp_path: Path) -> None:
    path = tmp_path / "r.cbtop"
    record(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(RecordingError, match="exists; pass --force"):
        RecordingWriter(path, ORIGIN, MAX_BYTES)
    path.chmod(0o644)
    RecordingWriter(path, ORIGIN, MAX_BYTES, overwrite=True).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with opened(path) as reader:
        assert found(reader) == []


def test_it_ends_at_its_bound(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "r.cbtop", ORIGIN, 500)
    taken = 0
    while writer.append(frame(FrameKind.KEYFRAME, taken, HELLO)):
        taken += 1
    writer.close()
    with opened(tmp_path / "r.cbtop") as reader:
        assert len(found(reader)) == taken > 0


def test_a_full_disk_is_said_in_one_line_and_leaves_a_file_that_opens(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = RecordingWriter(tmp_path / "r.cbtop", ORIGIN, MAX_BYTES)
    taken = 0
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        while writer.size_bytes + 300 < 1000:
            writer.append(frame(FrameKind.KEYFRAME, taken, HELLO))
            taken += 1
        with pytest.raises(RecordingError, match="it ends after"):
            writer.append(encode_frame(FrameKind.KEYFRAME, taken, [os.urandom(600)]))
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    with opened(tmp_path / "r.cbtop") as reader:
        assert len(found(reader)) == taken > 0


def test_what_is_no_frame_is_not_appended(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "r.cbtop", ORIGIN, MAX_BYTES)
    for bad in (b"", b"x" * 100, frame(FrameKind.LIVE, 0, HELLO)[:-1] + b"!"):
        with pytest.raises(DecodeError, match="damaged frame"):
            writer.append(bad)


def with_version(path: Path, major: int, minor: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into("<HH", data, 8, major, minor)
    path.write_bytes(data)


def test_a_newer_minor_version_opens_and_what_it_adds_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "r.cbtop"
    writer = RecordingWriter(path, ORIGIN, MAX_BYTES)
    news = msgpack.packb({"k": "Weather", "sun": True})
    gone = msgpack.packb({"k": "SourceGone", "source": "s", "mood": "fine"})
    writer.append(encode_frame(FrameKind.LIVE, 1, [news, gone]))
    payload = b"?" * 9
    writer.append(recording.frame_bytes(99, 2, payload))
    os.close(descriptor_of(path))
    with_version(path, PROTOCOL_MAJOR, 7)
    with opened(path) as reader:
        assert reader.version == f"{PROTOCOL_MAJOR}.7"
        assert [f.kind for f in reader.frames()] == [FrameKind.LIVE, 99]
        assert list(next(reader.frames()).messages()) == [SourceGone("s")]


def test_another_major_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "r.cbtop"
    record(path)
    with_version(path, 1, 3)
    with pytest.raises(VersionError, match=r"protocol 1\.3, this cbtop reads 2\.x"):
        RecordingReader(path)


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.cbtop"
    for data in (b"", b"CBTOPRNG" + bytes(100)):
        path.write_bytes(data)
        with pytest.raises(RecordingError, match="not a recording"):
            RecordingReader(path)
    with pytest.raises(RecordingError, match="No such file"):
        RecordingReader(tmp_path / "none.cbtop")
    with pytest.raises(RecordingError, match="not a regular file"):
        RecordingReader(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecordingError, match="not a regular file"):
        RecordingReader(tmp_path / "pipe")


def test_a_frame_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_PAYLOAD_BYTES", 1 << 20)
    bomb = encode_frame(FrameKind.LIVE, 0, [bytes(2 << 20)])
    with pytest.raises(DecodeError, match="more than"):
        list(recording.Frame(0, 0, 0, bomb[recording.FRAME_HEAD.size :]).messages())


@given(data=st.data())
def test_a_recording_with_any_bytes_changed_opens_or_is_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("hostile") / "r.cbtop"
    record(path, 6, close=data.draw(st.booleans()))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        with opened(path) as reader:
            for entry in reader.frames():
                try:
                    list(entry.messages())
                except DecodeError:
                    continue
    except ProtocolError:
        return
