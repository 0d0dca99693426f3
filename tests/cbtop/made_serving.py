"""A process that serves three requests on a fake clock, read by the real source, store and viewmodels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.daemon.source import Source
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.recording import RecordingOrigin, RecordingWriter
from cbtop.protocol.serving_messages import (
    EngineLoad,
    EngineQueue,
    EngineSchedules,
    EngineTimes,
    EngineWorker,
    Latencies,
    ServedRequest,
)
from cbtop.protocol.training_messages import PartTime
from tests.cbtop.made_recordings import BEGIN_NS, HELLO, keyframe
from tests.cbtop.recorded import Clock, apply, profiler_in, source_of

MS = 1_000_000
TIMES = EngineTimes(
    "vLLM",
    4,
    40 * MS,
    (
        PartTime("model", 30 * MS, 7 * MS),
        PartTime("scheduler", 2 * MS, MS // 2),
        PartTime("between steps", 8 * MS, MS),
    ),
    2,
    (Latencies("first token", 3, 12 * MS, 80 * MS), Latencies("between tokens", 40, 8 * MS, 9 * MS)),
)
REQUESTS = (
    ServedRequest(0, "a", 10 * MS, 12 * MS, 22 * MS, 62 * MS, 32, 16, 5, 0, "length"),
    ServedRequest(1, "b", 20 * MS, 30 * MS, 0, 40 * MS, 32, 0, 0, 1, "abort"),
    ServedRequest(2, "c", 70 * MS, 71 * MS, 80 * MS, 0, 8, 0, 2),
)
SCHEDULES = EngineSchedules(8, 12, 1, 2, (EngineQueue("limit of running requests", 2, 4, 6, 12.5),))
LOADS = (EngineLoad(0, 15 * MS, 1, 0, 12.5), EngineLoad(1, 90 * MS, 1, 2, 40.0))


def serve(profiler: BrickProfiler, clock: Clock, *, steps: int = 5) -> None:
    """Take `steps` decode steps of 10 ms, each with one brick.

    Then announce the requests, the loads and the times.
    """
    for _ in range(steps):
        with profiler.step("decode", tokens=2), profiler.brick("Attention", 8):
            clock.sleep_us(10_000)
    for message in (*REQUESTS, *LOADS, TIMES, SCHEDULES):
        profiler.announce(message)


def _source(directory: Path, *, steps: int, is_worker_of: int | None) -> Source:
    clock = Clock(10 * MS)
    profiler = profiler_in(directory, clock)
    if is_worker_of is None:
        serve(profiler, clock, steps=steps)
    else:
        profiler.announce(EngineWorker(is_worker_of))
        with profiler.step("decode", tokens=2):
            clock.sleep_us(10_000)
    source = source_of(directory)
    source.poll()
    return source


def served(directory: Path, *, steps: int = 5, is_worker_of: int | None = None) -> SourceRecord:
    """Return the record of a viewer that keeps all records.

    `is_worker_of` is the pid of the process that has the engine.
    """
    source = _source(directory, steps=steps, is_worker_of=is_worker_of)
    store = Store()
    store.keep_records(True)
    apply(store, [*source.snapshot(), *source.records()])
    return store.sources[source.key]


def record_served(directory: Path, path: Path) -> None:
    """Write a recording of the process to `path`."""
    source = _source(directory, steps=5, is_worker_of=None)
    writer = RecordingWriter(path, RecordingOrigin("here", BEGIN_NS, HELLO.realtime_ns), 1 << 30)
    writer.append(keyframe(source, 0))
    writer.close()


def other_pid(record: SourceRecord, pid: int) -> SourceRecord:
    """Change the pid in `record` to `pid`. Returns `record`."""
    assert record.hello is not None
    record.hello = replace(record.hello, pid=pid)
    return record
