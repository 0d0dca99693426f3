"""Tests of a recorder that is killed at any moment: its file can be read, and every record is accounted for."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cbtop.client import stream_recorder
from cbtop.client.stream_recorder import StreamRecorder, save_history
from cbtop.commands import record
from cbtop.compute.demo_model import TINY, write_model
from cbtop.errors import CbtopError
from cbtop.feeds.feed import Feed
from cbtop.protocol.endpoint import default_endpoint
from cbtop.protocol.messages import RecordBatch
from cbtop.protocol.record_batch import RecordTally, joined, pack, tally, unpack
from cbtop.protocol.recording import FrameKind, RecordingReader
from tests.integration.hosts import CBTOP, DEADLINE_S, cbtop, daemon, eventually, host, snapshot


def read(path: Path) -> tuple[RecordingReader, dict[str, RecordTally], list[RecordBatch]]:
    """Return the reader of a recording, its records by source, and its batches."""
    reader, tallies, batches = RecordingReader(path), dict[str, RecordTally](), list[RecordBatch]()
    for frame in reader.frames():
        for message in frame.messages() if frame.kind != FrameKind.INDEX else []:
            tally(tallies, message)
            batches += [message] if isinstance(message, RecordBatch) else []
    assert reader.damaged == 0
    reader.close()
    return reader, tallies, batches


def balanced(found: RecordTally) -> bool:
    assert found.before is not None
    return found.produced == found.before + found.taken + found.dropped + found.missed


def test_a_recording_holds_every_record_of_a_process_from_first_to_last(tmp_path: Path) -> None:
    path = tmp_path / "run.cbtop"
    with daemon():
        recorder = StreamRecorder(path, None, 1 << 30)
        eventually(lambda: recorder.poll(20) or recorder.has_begun)
        with host(steps=300) as process:
            process.wait()
        eventually(lambda: recorder.poll(20) or any(t.taken == 300 * 7 for t in recorder.tallies.values()))
        recorder.close()
    reader, tallies, batches = read(path)
    (found,) = tallies.values()
    assert (found.produced, found.before, found.taken, found.dropped, found.missed) == (2100, 0, 2100, 0, 0)
    assert sum(len(unpack(batch).node) for batch in batches) == 2100
    assert reader.is_closed


@pytest.mark.slow
def test_records_of_a_real_decode_take_at_most_24_bytes_on_the_wire(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", TINY, lambda *_: None)
    command = [*CBTOP, "demo", "--serve-only", "--threads", "1", "--model", str(tmp_path / "tiny.gguf")]
    recorder = StreamRecorder(tmp_path / "run.cbtop", None, 1 << 30)
    with subprocess.Popen([*command, "--steps", "200"], stderr=subprocess.DEVNULL) as process:
        eventually(lambda: recorder.poll(20) or process.poll() is not None)
    eventually(lambda: recorder.poll(20) or all(s.state.state == "ended" for s in recorder.store.sources.values()))
    recorder.close()
    _, tallies, batches = read(tmp_path / "run.cbtop")
    parts = list(map(unpack, batches))
    assert [batch.columns for batch in batches] == list(map(pack, parts))
    # Estimate the size of all records packed together, so that headers hardly count. The times are scaled to one
    # second, because decoding may have been slow: the time between records that are seconds apart would need eight
    # bytes.
    whole = joined(parts)
    begin_ns, length_ns = whole.start_ns.min(), np.ptp(np.concatenate((whole.start_ns, whole.end_ns)))
    start_ns, end_ns = (
        ((times - begin_ns) / length_ns * 1e9).astype(np.int64) for times in (whole.start_ns, whole.end_ns)
    )
    assert len(whole.node) >= 200 * 10
    assert len(pack(replace(whole, start_ns=start_ns, end_ns=end_ns))) / len(whole.node) <= 24
    assert all(balanced(found) for found in tallies.values())


def test_a_recorder_outlives_the_daemon_and_counts_no_record_twice(tmp_path: Path) -> None:
    with host() as process:
        with daemon():
            recorder = StreamRecorder(tmp_path / "run.cbtop", None, 1 << 30)
            eventually(lambda: recorder.poll(20) or any(t.taken > 200 for t in recorder.tallies.values()))
        (found,) = recorder.tallies.values()
        before = found.taken
        with daemon():
            eventually(lambda: recorder.poll(20) or found.taken > before + 200)
            assert balanced(found)
        process.kill()
        recorder.close()
    _, tallies, batches = read(tmp_path / "run.cbtop")
    assert tallies[batches[0].source].taken == found.taken
    ends, again = set[tuple[int, int]](), RecordTally()
    for batch in batches:
        known, records = again.take(batch), unpack(batch)
        fresh = set(zip(records.node[known:].tolist(), records.end_ns[known:].tolist(), strict=True))
        assert not fresh & ends
        ends |= fresh
    assert len(ends) == found.taken


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_a_recording_killed_at_any_moment_opens_and_lacks_at_most_a_frame(tmp_path: Path, kills: int) -> None:
    chance = random.Random(kills)
    with daemon(), host():
        snapshot()  # Wait until the process has data that can be recorded.
        for number in range(kills):
            path = tmp_path / f"{number}.cbtop"
            with subprocess.Popen([*CBTOP, "record", "-o", str(path)], stderr=subprocess.DEVNULL) as process:
                eventually(lambda path=path: path.exists() and path.stat().st_size > 500)
                time.sleep(chance.uniform(0, 0.5))
                process.send_signal(signal.SIGKILL)
                process.wait()
            size = path.stat().st_size
            reader, tallies, _ = read(path)
            assert not reader.is_closed
            assert reader.keyframes
            assert reader._end >= size - (64 << 10)  # The part that cannot be read is less than a frame.
            assert all(balanced(found) and found.missed == 0 for found in tallies.values())
            done = cbtop("--headless", "--replay", str(path), "--view", "bricks")
            assert "DownProjection" in done.stdout
            assert "was not closed" in done.stdout


@pytest.mark.slow
def test_the_daemons_history_becomes_a_recording_of_what_happened_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_recorder, "ANSWER_WITHIN_S", DEADLINE_S)
    with daemon(), Feed() as feed, host(steps=400) as process:
        process.wait()
        eventually(lambda: feed.poll(20) or [s.state for s in feed.sources()] == ["ended"])
        saved = save_history(default_endpoint(), None, tmp_path)
    assert saved.path.stat().st_size == saved.size_bytes
    assert saved.path.parent == tmp_path
    assert saved.path.stat().st_mode & 0o777 == 0o600
    reader, tallies, _ = read(saved.path)
    (found,) = tallies.values()
    assert (found.produced, found.taken, found.missed) == (2800, 2800, 0)
    assert reader.is_closed
    done = cbtop("replay", str(saved.path), "--format", "json")
    assert '"count": 400' in done.stdout


@pytest.mark.slow
def test_a_daemon_that_keeps_no_history_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_recorder, "ANSWER_WITHIN_S", DEADLINE_S)
    with daemon("--history", "0"), Feed() as feed, host(steps=10) as process:
        process.wait()
        eventually(lambda: feed.poll(20) or [s.state for s in feed.sources()] == ["ended"])
        with pytest.raises(CbtopError, match="keeps no history"):
            save_history(default_endpoint(), None, tmp_path)
    assert list(tmp_path.glob("*.cbtop")) == []


def test_without_a_daemon_the_history_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_recorder, "ANSWER_WITHIN_S", 0.2)
    with pytest.raises(Exception, match="did not answer"):
        save_history(default_endpoint(), None, tmp_path)
    assert list(tmp_path.iterdir()) == []


def refused(code: int, words: str, *arguments: str) -> None:
    done = cbtop("record", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr


def test_it_refuses_what_it_should_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / "taken.cbtop"
    taken.write_bytes(b"mine")
    refused(2, "exists; pass --force", "-o", str(taken), "--duration", "1")
    assert taken.read_bytes() == b"mine"
    refused(2, "No such file", "-o", str(tmp_path / "none" / "x.cbtop"), "--duration", "1")
    refused(2, "is not a size", "-o", str(taken), "--max-size", "lots")
    monkeypatch.setattr(record, "ANSWER_WITHIN_S", 0.2)
    refused(3, "no answer from", "-o", str(tmp_path / "x"), "--connect", f"ipc://{tmp_path}/none.sock")


@pytest.mark.slow
def test_a_recording_of_ended_processes_alone_says_so_and_ends_with_3(tmp_path: Path) -> None:
    with daemon():
        with host(steps=20) as process:
            process.wait()
        path = str(tmp_path / "run.cbtop")
        words = ("record", "-o", path, "--force", "--duration", "1")
        # Repeat the command until the daemon knows that the process has ended.
        eventually(lambda: cbtop(*words).returncode)
        refused(3, f"every process had ended before, so {path} has no records", *words[1:])


@pytest.mark.slow
def test_it_stops_at_its_size_and_at_ctrl_c_and_says_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with host():
        monkeypatch.setattr(record, "ANSWER_WITHIN_S", DEADLINE_S)
        done = cbtop("record", "-o", str(tmp_path / "small.cbtop"), "--max-size", "20K")
        assert done.returncode == 0
        assert "has reached --max-size" in done.stderr
        assert (tmp_path / "small.cbtop").stat().st_size <= (20 << 10) + 1000
        path = tmp_path / "run.cbtop"
        command = [*CBTOP, "record", "-o", str(path)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            eventually(lambda: path.exists() and path.stat().st_size > 5000)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate()
    assert process.returncode == 0
    assert "1 process" in said
    for name in ("small.cbtop", "run.cbtop"):
        assert read(tmp_path / name)[0].is_closed
