"""Makes recordings of a process with a fake clock, so that its state at every second is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cbtop.daemon.source import Source
from cbtop.protocol import codec
from cbtop.protocol.messages import DaemonHello, Heartbeat, SourceState, StatsUpdate, WireMessage
from cbtop.protocol.recording import FrameKind, RecordingOrigin, RecordingWriter, encode_frame
from cbtop.protocol.vocabulary import SourceStatus
from tests.cbtop.recorded import Clock, profiler_in, source_of

BEGIN_NS = 50_000_000_000
HELLO = DaemonHello(2, 0, 77, "here", "boot", "0.1.0", BEGIN_NS, 1_700_000_000_000_000_000)
SECOND_NS = 1_000_000_000


def frame(kind: FrameKind, at_s: float, *messages: WireMessage) -> bytes:
    now_ns = BEGIN_NS + round(at_s * SECOND_NS)
    said = (replace(m, monotonic_ns=now_ns) if isinstance(m, StatsUpdate | Heartbeat) else m for m in messages)
    return encode_frame(kind, now_ns, [codec.encode(message) for message in said])


def keyframe(source: Source, at_s: float) -> bytes:
    return frame(FrameKind.KEYFRAME, at_s, HELLO, *source.snapshot(), Heartbeat(0, (source.state_message(),)))


def made_recording(
    runtime: Path,
    path: Path,
    seconds: int,
    keyframe_every: int = 5,
    close: bool = True,
    each_s: float = 0.5,
    ends: bool = False,
    ended_s: int = 0,
    begins_s: int = 0,
) -> None:
    """Record a process. Its decode step of 100 µs ends every `each_s` seconds and is published at once.

    By default, 2t steps have ended after t seconds. With `ends`, the process is then reported as ended for another
    `ended_s` seconds. For the first `begins_s` seconds there is no process.
    """
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("prefill", tokens=4):
        clock.sleep_us(10)
    source = source_of(runtime)
    source.poll()
    writer = RecordingWriter(path, RecordingOrigin("here", BEGIN_NS, HELLO.realtime_ns), 1 << 30)
    if begins_s:
        writer.append(frame(FrameKind.KEYFRAME, 0, HELLO, Heartbeat(0, ())))
    for number in range(round(seconds / each_s) + 1):
        at_s = begins_s + number * each_s
        if number:
            with profiler.step("decode", tokens=1), profiler.brick("a", 8):
                clock.sleep_us(100)
            source.poll()
        writer.append(frame(FrameKind.RECORDS, at_s, *source.records()))
        if number % round(keyframe_every / each_s) == 0:
            source.delta()
            writer.append(keyframe(source, at_s))
        else:
            writer.append(frame(FrameKind.LIVE, at_s, *source.delta()))
    if ends:
        ended = replace(source.state_message(), state=SourceStatus.ENDED)
        writer.append(frame(FrameKind.LIVE, seconds - each_s, Heartbeat(0, (source.state_message(),))))
        writer.append(frame(FrameKind.LIVE, seconds, Heartbeat(0, (ended,))))
        for at_s in range(seconds + 1, seconds + ended_s + 1):
            heartbeat = Heartbeat(0, (ended,))
            if at_s % keyframe_every == 0:
                snapshot = [ended if isinstance(said, SourceState) else said for said in source.snapshot()]
                writer.append(frame(FrameKind.KEYFRAME, at_s, HELLO, *snapshot, heartbeat))
            else:
                writer.append(frame(FrameKind.LIVE, at_s, heartbeat))
    if close:
        writer.close()
