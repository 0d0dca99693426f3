"""Measure the cost of recording, and how long it takes until a moment of a one-hour recording is on the screen."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.base import Figure, interleaved_ns
from cbtop.client.stream_recorder import StreamRecorder
from cbtop.feeds.replay import ReplayFeed
from cbtop.protocol import codec
from cbtop.protocol.messages import RecordBatch
from cbtop.protocol.record_batch import pack, unpack
from cbtop.protocol.recording import FrameKind, RecordingReader, RecordingWriter, frame_bytes

RECORDED_S = 20.0
# Wait this many seconds. It is enough for the first run, which writes a model and compiles kernels.
PATIENCE_S = 120.0
HOUR_S = 3600
SEEKS = 50
DEMO = [sys.executable, "-m", "cbtop", "demo", "--serve-only", "--threads", "1"]


def run() -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="cbtop-bench-") as directory:
        real, hour = Path(directory) / "real.cbtop", Path(directory) / "hour.cbtop"
        _record(real)
        _repeat(real, hour)
        return [*_cost(real), *_seeks(hour)]


def _record(path: Path) -> None:
    """Record a decode of the real demo. The recording begins when step times have become stable."""
    with subprocess.Popen(DEMO, stderr=subprocess.DEVNULL) as process:
        try:
            recorder, deadline_s = StreamRecorder(path, None, 1 << 30), time.monotonic() + PATIENCE_S
            while sum(tally.taken for tally in recorder.tallies.values()) < 10_000:
                recorder.poll(100)
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"nothing to record within {PATIENCE_S:.0f} s")
            end_s = time.monotonic() + RECORDED_S
            while time.monotonic() < end_s:
                recorder.poll(100)
            recorder.close()
        finally:
            process.kill()


def _repeat(real: Path, hour: Path) -> None:
    """Write a recording of one hour, by repeating the frames of `real` with later and later times."""
    reader = RecordingReader(real)
    begin_ns = reader.end_ns - round(RECORDED_S * 1e9)
    frames = list(reader.frames(reader.keyframe_before(begin_ns)))
    period_ns = frames[-1].time_ns - frames[0].time_ns
    writer = RecordingWriter(hour, reader.origin, 8 << 30)
    for turn in range(HOUR_S * 1_000_000_000 // period_ns):
        for frame in frames:
            writer.append(frame_bytes(frame.kind, frame.time_ns + turn * period_ns, frame.payload))
    writer.close()
    reader.close()


def _cost(real: Path) -> list[Figure]:
    reader = RecordingReader(real)
    batches = [m for f in reader.frames(0, (FrameKind.RECORDS,)) for m in f.messages() if isinstance(m, RecordBatch)]
    records = sum(batch.count for batch in batches)
    seconds = (reader.end_ns - reader.begin_ns) / 1e9
    wire_bytes = sum(len(codec.encode(batch)) for batch in batches)
    largest = max(batches, key=lambda batch: batch.count)
    unpacked = unpack(largest)
    calls = {"pack": lambda: pack(unpacked), "unpack": lambda: unpack(largest)}
    times = {name: ns / largest.count for name, ns in interleaved_ns(calls, 200).items()}
    size = real.stat().st_size
    return [
        Figure("a record of a real decode on the wire (32 in the ring)", wire_bytes / records, "bytes"),
        Figure(f"packing a batch of {largest.count} records", times["pack"], "ns each"),
        Figure("unpacking it", times["unpack"], "ns each"),
        Figure(f"recording {records / seconds:,.0f} records/s", size / seconds / 1e3, "kB/s"),
        Figure("which makes", size / seconds * HOUR_S / 1e6, "MB an hour"),
    ]


def _seeks(hour: Path) -> list[Figure]:
    begun = time.perf_counter()
    feed = ReplayFeed(hour)
    opened_ms = 1e3 * (time.perf_counter() - begun)
    chance, times = random.Random(0), []
    for _ in range(SEEKS):
        target_s = chance.uniform(0, feed.duration_s)
        begun = time.perf_counter()
        feed.seek(target_s)
        times.append(1e3 * (time.perf_counter() - begun))
    feed.close()
    hour.write_bytes(hour.read_bytes()[:-20])  # Remove the end of the index, as if the recorder had been killed.
    begun = time.perf_counter()
    ReplayFeed(hour).close()
    rebuilt_ms = 1e3 * (time.perf_counter() - begun)
    return [
        Figure(f"opening a recording of {feed.duration_s / 60:.0f} minutes", opened_ms, "ms"),
        Figure("opening it without its index", rebuilt_ms, "ms"),
        Figure(f"seek in it, median of {SEEKS} (wanted: below 100)", statistics.median(times), "ms"),
        Figure("seek in it, the slowest", max(times), "ms"),
    ]
