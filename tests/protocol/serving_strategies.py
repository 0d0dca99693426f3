"""Strategies for the messages of a serving engine, whose numbers must be consistent."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from cbtop.protocol import codec
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

COUNTS, TIMES_NS = st.integers(0, 1 << 50), st.integers(1, 1 << 50)
TEXTS = st.text(max_size=30).map(codec.sanitise)
LATENCIES = st.builds(
    lambda name, measured, p50_ns, more_ns: Latencies(name, measured, p50_ns, p50_ns + more_ns),
    TEXTS,
    st.integers(1, 4096),
    TIMES_NS,
    TIMES_NS,
)
PARTS = st.lists(
    st.builds(lambda name, p50_ns, more_ns: PartTime(name, p50_ns + more_ns, p50_ns), TEXTS, COUNTS, TIMES_NS),
    min_size=1,
    max_size=4,
    unique_by=lambda part: part.name,
)

QUEUES = st.builds(
    lambda reason, schedules, running, more, cache: EngineQueue(reason, schedules, running, schedules + more, cache),
    TEXTS,
    st.integers(1, 50),
    COUNTS,
    COUNTS,
    st.none() | st.floats(0, 100),
)


def _request(number: int, texts: tuple[str, str], times_ns: list[int], counts: list[int]) -> ServedRequest:
    return ServedRequest(number, texts[0], *sorted(times_ns), *counts, texts[1])


def _times(
    engine: str, iterations: int, parts: list[PartTime], ended: int, latencies: list[Latencies], preemptions: int
) -> EngineTimes:
    wall_ns = sum(part.sum_ns for part in parts)
    return EngineTimes(engine, iterations, wall_ns, tuple(parts), ended, tuple(latencies), preemptions)


SERVING: dict[Any, st.SearchStrategy[Any]] = {
    ServedRequest: st.builds(
        _request,
        COUNTS,
        st.tuples(TEXTS, TEXTS),
        st.lists(TIMES_NS, min_size=4, max_size=4),
        st.lists(COUNTS, min_size=4, max_size=4),
    ),
    EngineLoad: st.builds(EngineLoad, COUNTS, COUNTS, COUNTS, COUNTS, st.none() | st.floats(0, 100)),
    Latencies: LATENCIES,
    EngineQueue: QUEUES,
    EngineSchedules: st.builds(
        lambda others, *counts, queues: EngineSchedules(
            others + sum(queue.schedules for queue in queues), *counts, tuple(queues)
        ),
        st.integers(1, 100),
        COUNTS,
        COUNTS,
        st.none() | COUNTS,
        queues=st.lists(QUEUES, max_size=3, unique_by=lambda queue: queue.reason),
    ),
    EngineTimes: st.builds(
        _times,
        TEXTS,
        st.integers(1, 256),
        PARTS,
        COUNTS,
        st.lists(LATENCIES, max_size=2, unique_by=lambda kind: kind.name),
        COUNTS,
    ),
    EngineWorker: st.builds(EngineWorker, TIMES_NS),
}
