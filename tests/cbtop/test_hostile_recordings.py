"""Tests of hostile recordings: valid frames are shown and exported, and damaged frames are counted.

The memory stays bounded.
"""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zlib
from pathlib import Path
from typing import get_args
from unittest import mock

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbtop.client.source_record import MAX_PHASES
from cbtop.client.store import Store
from cbtop.exporters import EXPORTERS, recorded
from cbtop.exporters.recorded import processes_of_recording
from cbtop.feeds.replay import ReplayFeed
from cbtop.protocol import announcements, codec, recording
from cbtop.protocol.errors import LimitError, RecordingError, VersionError
from cbtop.protocol.messages import (
    DaemonHello,
    HostHello,
    Message,
    Node,
    Packed,
    RecordBatch,
    SourceCatalog,
    SourceGone,
    StatsUpdate,
    WireMessage,
)
from cbtop.protocol.record_batch import MAX_BATCH_RECORDS
from cbtop.protocol.recording import (
    FrameKind,
    RecordingOrigin,
    RecordingReader,
    RecordingWriter,
    encode_frame,
    frame_bytes,
)
from cbtop.protocol.vocabulary import NodeKind
from cbtop.reports.json import json_report
from cbtop.reports.text import SECTIONS, text_report
from tests.cbtop.made_recordings import made_recording
from tests.descriptors import descriptor_of
from tests.integration.hosts import cbtop
from tests.protocol.test_codec import instances
from tests.protocol.test_hostile import I64, many, mutated, peak_of
from tests.representatives import first_by_default

HEADER, HEAD = recording.HEADER.size, recording.FRAME_HEAD.size
HELLO = HostHello(2, 0, 7, 1, "here", "", "forged", "3", "python", 1, 1)
NODE = Node(1, None, NodeKind.STEP, "decode")
SAID = SourceCatalog("a", True, (HELLO, NODE))
MIB = 1 << 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of a complete recording of two seconds, including its index."""
    directory = tmp_path_factory.mktemp("whole")
    made_recording(directory, directory / "run.cbtop", 2, keyframe_every=1)
    return (directory / "run.cbtop").read_bytes()


@pytest.fixture
def path(runtime: Path) -> Path:
    return runtime / "run.cbtop"


def written(path: Path, *frames: bytes, close: bool = False) -> Path:
    """Write a recording of `frames`, which may be invalid."""
    writer = RecordingWriter(path, RecordingOrigin("here", 0, 0), 1 << 40, overwrite=True)
    if close:
        for frame in frames:
            writer.append(frame)
        writer.close()
    else:
        os.close(descriptor_of(path))
        with path.open("ab") as file:
            file.writelines(frames)
    return path


def live(time_ns: int, *messages: Message) -> bytes:
    return encode_frame(FrameKind.LIVE, time_ns, [codec.encode(message) for message in messages])


def shown_and_exported(path: Path) -> tuple[int, int, int]:
    """Replay and export the file. Return the number of frames shown, damaged frames, and exported records."""
    with ReplayFeed(path, clock_s=lambda: 0.0) as feed:
        for at_s in (feed.duration_s / 2, 0.0):
            feed.seek(at_s)
    with ReplayFeed(path, clock_s=lambda: 0.0) as feed:
        feed.seek(feed.duration_s)
        views = [view for source in feed.sources() if (view := feed.view(source.key))]
        text_report(views, list(SECTIONS), feed.replay())
        json.loads(json_report(views, feed.replay()))
        assert feed.damage == 0 or "damaged" in feed.status()
        shown, damage = feed.playback.touched - len(feed.playback.refused), feed.damage
    reader = RecordingReader(path)
    processes = list(processes_of_recording(reader).values())
    for exporter in EXPORTERS.values():
        for chosen in [processes] if exporter.holds_many else [[process] for process in processes]:
            exporter.write(chosen, io.BytesIO())
    records = sum(1 for process in processes for _ in process.records)
    assert records == sum(len(recorded.records) for recorded in processes)
    with mock.patch.object(recorded, "CHUNK_RECORDS", 1):
        apart = processes_of_recording(reader).values()
    assert [(t.rejected, list(t.records)) for t in apart] == [(t.rejected, list(t.records)) for t in processes]
    reader.close()
    return shown, damage, records


def read_or_refused(path: Path) -> tuple[int, int, int] | None:
    try:
        return shown_and_exported(path)
    except (RecordingError, VersionError):
        return None


@given(tail=st.binary(max_size=200), head=st.sampled_from([0, 8, HEADER]))
def test_any_bytes_are_a_recording_or_refused(tail: bytes, head: int) -> None:
    path = Path(os.environ["CBTOP_RUNTIME_DIR"]) / "any.cbtop"
    start = written(path).read_bytes()[:head]
    path.write_bytes(start + tail)
    read_or_refused(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_recording_with_bits_turned_or_lengths_that_lie_is_read_or_refused(
    data: st.DataObject, whole: bytes, path: Path
) -> None:
    path.write_bytes(data.draw(mutated([whole])))
    read_or_refused(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    frames=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 3, 99]),
            I64,
            st.lists(st.one_of([instances(kind) for kind in get_args(WireMessage)]) | st.just(SAID), max_size=3),
            st.binary(max_size=8) | st.none(),
        ),
        max_size=6,
    ),
    close=st.booleans(),
    index=st.lists(st.tuples(I64, st.integers(0, 2000) | I64), max_size=3) | st.none(),
)
def test_whatever_sound_frames_say_and_whenever_it_is_shown_and_exported(
    frames: list[tuple[int, int, list[Message], bytes | None]],
    close: bool,
    index: list[tuple[int, int]] | None,
    path: Path,
) -> None:
    made = [
        frame_bytes(kind, time_ns, zlib.compress(raw) if raw is not None else encoded(said))
        for kind, time_ns, said, raw in frames
    ]
    written(path, *made, close=close and index is None)
    if index is not None:
        with_index(path, index)
    found = read_or_refused(path)
    assert found is not None
    assert found[1] <= len(frames)


def encoded(said: list[Message]) -> bytes:
    return zlib.compress(bytes(msgpack.packb([codec.encode(message) for message in said])))


def with_index(path: Path, entries: list[tuple[int, int]]) -> None:
    """Append an index to the recording at `path`: first these entries, and then one more entry, which is correct."""
    data = path.read_bytes()
    payload = b"".join(struct.pack("<qq", *entry) for entry in [*entries, (0, len(data))])
    path.write_bytes(data + frame_bytes(FrameKind.INDEX, 0, payload) + struct.pack("<Q8s", len(data), b"CBTOPIDX"))


def test_a_recording_cut_anywhere_shows_and_exports_what_lies_before(path: Path) -> None:
    columns = Packed(struct.pack("<q5B", 5, 1, 1, 1, 1, 1) + b"\x01\x00\x00\x01\x01")
    frames = [
        encode_frame(FrameKind.KEYFRAME, 0, [codec.encode(SAID)]),
        encode_frame(FrameKind.RECORDS, 1, [codec.encode(RecordBatch("a", 0, 1, 1, columns))]),
        live(2, SAID),
        encode_frame(FrameKind.RECORDS, 3, [codec.encode(RecordBatch("a", 1, 2, 1, columns))]),
    ]
    data = written(path, *frames).read_bytes()
    ends = [HEADER + sum(map(len, frames[: at + 1])) for at in range(len(frames))]
    for size in range(HEADER, len(data) + 1):
        path.write_bytes(data[:size])
        there = [end <= size for end in ends]
        with ReplayFeed(path) as feed:
            feed.seek(feed.duration_s)
            assert (feed.playback.touched, feed.damage) == (there[0] + there[2], 0)
        reader = RecordingReader(path)
        processes = processes_of_recording(reader)
        assert sum(1 for process in processes.values() for _ in process.records) == there[1] + there[3]
        reader.close()


# Damaged recordings. Each kind of damage has occurred or was constructed.


def test_a_process_of_which_only_its_catalog_is_there_is_exported(path: Path) -> None:
    assert shown_and_exported(written(path, live(0, SAID))) == (1, 0, 0)


def test_what_a_frame_says_before_its_damage_is_taken(path: Path) -> None:
    parts = [codec.encode(SAID), b"\xc1", codec.encode(SAID)]
    with ReplayFeed(written(path, encode_frame(FrameKind.LIVE, 0, parts))) as feed:
        assert [source.key for source in feed.sources()] == ["a"]
        assert "damaged messages: 1" in feed.status()


def test_a_damaged_frame_that_is_met_again_is_counted_once(path: Path) -> None:
    other = bytearray(live(1, SAID))
    other[-1] ^= 1
    refused = encode_frame(FrameKind.KEYFRAME, 0, [b"\xc1"])
    with ReplayFeed(written(path, refused, bytes(other), live(60_000_000_000, SAID)), clock_s=lambda: 0.0) as feed:
        for to_s in (60, 0, 60, 0):
            feed.seek(to_s)
            assert feed.damage == 2


@pytest.mark.parametrize("where", [0, HEADER + 3, -1, 1 << 62])
def test_an_index_that_points_elsewhere_is_made_anew(path: Path, where: int) -> None:
    written(path, *(encode_frame(FrameKind.KEYFRAME, at, [codec.encode(SAID)]) for at in range(3)))
    with_index(path, [(0, HEADER), (1, where)])
    assert shown_and_exported(path) == (3, 0, 0)
    reader = RecordingReader(path)
    assert ([at for at, _ in reader.keyframes], reader.is_closed) == ([0, 1, 2], True)
    reader.close()


@pytest.mark.parametrize("late_ns", [(1 << 63) - 1, 1 << 40])
def test_a_frame_said_to_be_later_than_the_end_keeps_nothing_back(path: Path, late_ns: int) -> None:
    later = SourceCatalog("b", True, (HELLO, NODE))
    written(path, encode_frame(FrameKind.KEYFRAME, 0, []), live(late_ns), live(5), live(10, later))
    with ReplayFeed(path, clock_s=lambda: 0.0) as feed:
        feed.seek(feed.duration_s)
        assert (feed.playback.touched, [source.key for source in feed.sources()]) == (4, ["b"])


def test_keyframes_out_of_order_and_times_that_run_backwards_are_shown(path: Path) -> None:
    frames = [encode_frame(FrameKind.KEYFRAME, at, [codec.encode(SAID)]) for at in (9, 3, 7, -(1 << 63), 1)]
    assert shown_and_exported(written(path, *frames))[1:] == (0, 0)


def test_a_file_that_shrinks_while_it_is_read_ends_there(path: Path, whole: bytes) -> None:
    for size in (HEADER, HEADER + 7, HEADER + HEAD + 5):
        path.write_bytes(whole)
        with ReplayFeed(path, clock_s=lambda: 0.0) as feed:
            os.truncate(path, size)
            feed.seek(feed.duration_s)
            assert "damaged" in feed.status()


def test_terabytes_of_nothing_are_not_walked(path: Path, whole: bytes) -> None:
    path.write_bytes(whole)
    os.truncate(path, 1 << 40)  # The file is sparse: it has a terabyte but uses no disk space.
    shown, damage, _ = shown_and_exported(path)
    assert (shown, damage) == (5, 0)


def test_a_frame_whose_disk_cannot_read_it_is_an_error_of_ours(path: Path, whole: bytes) -> None:
    path.write_bytes(whole)
    reader = RecordingReader(path)
    reader.close()
    with pytest.raises(RecordingError, match="Bad file descriptor"):
        next(reader.frames())
    with pytest.raises(RecordingError, match="Input/output error"):
        RecordingReader(Path("/proc/self/mem"))


def listed(part: bytes, count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + part * count


def deep(part: bytes) -> bytes:
    return listed(listed(part, 4000), 2000)


BOMBS = {
    "lists in a list": many(b"\x90"),
    "lists in lists in a list": deep(b"\xc4\x02ab"),
    "lists for ever": b"\x91" * (8 * MIB),
    "more messages than there may be": listed(b"\xc4\x00", 8 * MIB),
    "four billion said to be there": b"\xdd\xff\xff\xff\xff",
    "a message said to be of four billion": b"\x91\xc6\xff\xff\xff\xff",
    "bytes behind the messages": b"\x90" + bytes(16 * MIB),
    "a number for a message": b"\x91\x01",
}


@first_by_default("bomb", BOMBS.values(), 3, ids=BOMBS.keys())
def test_a_frame_that_is_a_bomb_takes_no_more_memory_than_it_holds(path: Path, bomb: bytes) -> None:
    written(path, frame_bytes(FrameKind.LIVE, 0, zlib.compress(bomb)), live(1, SourceGone("a")))
    with peak_of() as peak:
        with ReplayFeed(path, clock_s=lambda: 0.0) as feed:
            feed.seek(1)
            assert (feed.playback.touched, feed.damage) == (2, 1)
        reader = RecordingReader(path)
        assert not processes_of_recording(reader)
        reader.close()
    assert peak() < 4 * len(bomb) + 2 * MIB


@pytest.mark.slow
def test_twenty_frames_that_inflate_a_thousandfold_are_refused_uninflated(path: Path) -> None:
    ignored = bytes(msgpack.packb({"k": "SourceGone", "source": "a", "more": bytes(16 * MIB)}))
    bomb = zlib.compress(msgpack.packb([ignored]))
    written(path, *(frame_bytes(FrameKind.LIVE, at, bomb) for at in range(20)), live(20, SourceGone("a")))
    with peak_of() as peak:
        with ReplayFeed(path, clock_s=lambda: 0.0) as feed:
            feed.seek(1)
            assert (feed.playback.touched, feed.damage) == (21, 20)
            assert f"inflates to more than {100 * len(bomb):,} bytes" in feed.status()
        reader = RecordingReader(path)
        assert not processes_of_recording(reader)
        reader.close()
    assert peak() < 64 * MIB
    for arguments in (("replay", str(path), "--headless"), ("export", str(path), "--format", "csv")):
        done = cbtop(*arguments)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (5, "", 1)
        assert "inflates to more than" in done.stderr


def test_a_frame_is_inflated_a_message_at_a_time(path: Path) -> None:
    chance = random.Random(0)
    parts = [
        bytes(msgpack.packb({"k": "SourceGone", "source": "a", "more": chance.randbytes(MIB)})) for _ in range(24)
    ]
    written(path, encode_frame(FrameKind.LIVE, 0, parts))
    del parts
    reader = RecordingReader(path)
    (whole_frame,) = reader.frames()
    reader.close()
    with peak_of() as peak:
        assert sum(1 for _ in whole_frame.messages()) == 24
    assert peak() < 8 * MIB


def crowd(path: Path) -> Path:
    """Write twenty frames. Each is about another process with two hundred nodes."""
    nodes = [Node(number, None, NodeKind.BRICK, "a") for number in range(1, 201)]
    return written(path, *(live(at, SourceCatalog(f"s{at}", True, (HELLO, *nodes))) for at in range(20)))


def test_sources_that_together_announce_too_much_end_reading_and_are_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "MAX_KEPT", 1000)
    wanted = "1,200 nodes and announcements of all sources together, over the limit of 1,000"
    with ReplayFeed(crowd(path), clock_s=lambda: 0.0) as feed:
        feed.seek(1)
        assert (feed.playback.touched, feed.damage, len(feed.sources())) == (6, 1, 5)
        assert wanted in feed.status()
    for arguments in (("replay", str(path), "--headless"), ("export", str(path), "--format", "csv")):
        done = cbtop(*arguments)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (5, "", 1)
        assert wanted in done.stderr


def test_what_a_source_no_longer_says_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "MAX_KEPT", 1000)
    nodes = tuple(Node(number, None, NodeKind.BRICK, "a") for number in range(1, 401))
    store = Store()
    for number in range(20):
        store.apply(SourceCatalog("again", True, (HELLO, *nodes)))
        store.apply(SourceCatalog(str(number), True, (HELLO, *nodes)))
        store.apply(SourceGone(str(number)))
    store.apply(DaemonHello(2, 0, 1, "here", "boot", "0.1.0", 0, 0))
    for source in "ab":
        store.apply(SourceCatalog(source, True, (HELLO, *nodes)))
    with pytest.raises(LimitError):
        store.apply(SourceCatalog("c", True, (HELLO, *nodes)))
    assert list(store.sources) == ["a", "b"]


def test_steps_of_ever_new_names_keep_no_history_without_end() -> None:
    store = Store()
    store.apply(SourceCatalog("a", True, (HELLO, *(Node(n, None, NodeKind.STEP, str(n)) for n in range(1, 5001)))))
    one = struct.pack("<q", 5000)
    for second in range(3):
        store.apply(StatsUpdate("a", second, second * 10**9, 0, *[one] * 8, Packed(b"")))
    assert len(store.sources["a"].history) == MAX_PHASES


def test_frames_that_inflate_a_thousandfold_stay_deflated_for_an_export(path: Path) -> None:
    count = MAX_BATCH_RECORDS
    columns = struct.pack("<q5B", 5, 1, 1, 1, 1, 1) + b"\x01" * count + bytes(4 * count)

    def batch(at: int) -> bytes:
        said = RecordBatch("a", at * count, (at + 1) * count, count, Packed(columns))
        return encode_frame(FrameKind.RECORDS, at, [codec.encode(said)])

    written(path, live(0, SAID), *(batch(at) for at in range(64)))
    assert path.stat().st_size < 64 * 2000
    reader = RecordingReader(path)
    with peak_of() as peak:
        recorded = processes_of_recording(reader)["a"]
    reader.close()
    assert (recorded.missed, recorded.rejected) == (0, 0)
    assert peak() < 64 * len(columns) < 24 * MIB


def test_columns_wider_than_a_batch_may_be_are_refused(path: Path) -> None:
    count = MAX_BATCH_RECORDS + 1
    columns = Packed(struct.pack("<q5B", 5, 1, 1, 1, 1, 1) + bytes(5 * count))
    huge = live(1, RecordBatch("a", 0, count, count, columns))
    lying = live(2, RecordBatch("a", 0, 1 << 62, 1 << 62, Packed(columns[:14])))
    assert shown_and_exported(written(path, live(0, SAID), huge, lying))[2] == 0


def test_an_index_of_more_keyframes_than_there_may_be_is_not_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_KEYFRAMES", 100)
    written(path, *(encode_frame(FrameKind.KEYFRAME, at, [codec.encode(SAID)]) for at in range(200)))
    with_index(path, [(0, HEADER)] * 200_000)
    with peak_of() as peak:
        reader = RecordingReader(path)
    assert len(reader.keyframes) == 100
    reader.close()
    assert peak() < 8 * MIB
    with ReplayFeed(path, clock_s=lambda: 0.0) as feed:
        feed.seek(feed.duration_s)
        assert feed.damage == 0


def test_sources_without_end_are_not_all_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MAX_TALLIES", 1024)
    made = [SourceCatalog(str(number), True, (HELLO,)) for number in range(2048)]
    reader = RecordingReader(written(path, *(live(at, *made[at : at + 512]) for at in range(0, len(made), 512))))
    assert len(processes_of_recording(reader)) == 1024
    reader.close()


@pytest.mark.slow
def test_a_large_message_of_a_keyframe_is_not_kept_decoded(path: Path) -> None:
    more = random.Random(0).randbytes(2 * MIB)

    def keyframe(at: int) -> bytes:
        part = bytes(msgpack.packb({"k": "SourceGone", "source": str(at), "more": more}))
        return encode_frame(FrameKind.KEYFRAME, at, [part])

    written(path, *(keyframe(at) for at in range(16)))
    with peak_of() as peak, ReplayFeed(path, clock_s=lambda: 0.0) as feed:
        feed.seek(1)
        assert (feed.playback.touched, feed.damage) == (16, 0)
    assert peak() < 16 * MIB


def test_the_command_line_says_in_a_line_what_is_wrong(path: Path, whole: bytes) -> None:
    path.write_bytes(whole)
    reader = RecordingReader(path)
    keyframe = reader.keyframes[0][1]
    reader.close()
    path.write_bytes(whole[: keyframe + HEAD] + b"?" + whole[keyframe + HEAD + 1 :])
    done = cbtop("replay", str(path), "--headless")
    assert (done.returncode, len(done.stderr.splitlines())) == (5, 1)
    assert "damaged" in done.stderr
    path.write_bytes(whole[: len(whole) // 3] + whole[len(whole) // 2 :])
    for arguments in (("replay", str(path), "--headless"), ("export", str(path), "--format", "csv")):
        done = cbtop(*arguments)
        assert (done.returncode, bool(done.stdout)) == (5, True)
        assert "damaged" in done.stderr
    path.write_bytes(whole[:50])
    for arguments in (("replay", str(path), "--headless"), ("export", str(path), "--format", "csv")):
        done = cbtop(*arguments)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
