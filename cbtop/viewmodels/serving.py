"""An engine's requests, latencies, load over time, and the parts of its time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cbtop.client.source_record import SourceRecord
from cbtop.protocol.serving_messages import (
    BETWEEN_TOKENS,
    FIRST_TOKEN,
    EngineLoad,
    EngineSchedules,
    EngineTimes,
    ServedRequest,
)
from cbtop.protocol.vocabulary import EnginePart

_PART_ORDER = {part.value: at for at, part in enumerate(EnginePart)}


@dataclass(frozen=True, slots=True)
class EnginePartRow:
    """One part of an engine's iterations, for example `scheduler`."""

    name: str
    percent: float  # share of the iterations' time; the parts add up to 100 %
    mean_us: float  # mean time per iteration
    p50_us: float  # median time per iteration


@dataclass(frozen=True, slots=True)
class LatencyView:
    """The median and 99th percentile of the newest latencies, `measured` of them."""

    measured: int
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class LoadView:
    """The load of an engine at one moment."""

    at_s: float  # seconds from the oldest shown request or load to this moment
    running: int
    waiting: int
    cache_percent: float | None  # share of the KV cache's blocks that are in use; None if unknown


@dataclass(frozen=True, slots=True)
class QueueRow:
    """The schedules of an engine after which requests still waited, for one reason."""

    reason: str
    percent: float  # share of all schedules
    mean_running: float  # mean number of requests that ran
    mean_waiting: float  # mean number of requests that waited
    cache_percent: float | None  # mean use of the KV cache; None if unknown


@dataclass(frozen=True, slots=True)
class SchedulesView:
    """The newest `count` schedules of an engine that ran requests."""

    count: int
    mean_requests: float  # mean number of requests that ran
    max_running: int | None  # limit of running requests; None if unknown
    preemptions: int  # how often these schedules stopped a request to free the KV cache
    queues: tuple[QueueRow, ...]  # the most frequent reason first


@dataclass(frozen=True, slots=True)
class ServedRow:
    """One request. A time is None until it is over."""

    number: int
    name: str
    arrived_s: float  # seconds from the oldest shown request or load to this request's arrival
    queued_us: float | None  # time from the arrival until the engine scheduled the request
    first_token_us: float | None  # time from the arrival until the first token
    total_us: float | None  # time from the arrival until the end of the request
    # mean time between two tokens of an ended request; None with a single token
    per_token_us: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    reason: str  # why the request ended; "" while it runs


@dataclass(frozen=True, slots=True)
class ServingView:
    """An engine. Its parts cover the newest `iterations`. None: not reported yet."""

    engine: str
    iterations: int
    mean_us: float | None  # mean time of these iterations
    parts: tuple[EnginePartRow, ...]
    ended: int  # number of requests that have ended since the process began
    first_token: LatencyView | None  # latency from the arrival to the first token
    between_tokens: LatencyView | None  # latency between two outputs of a request
    load: LoadView | None  # the newest
    loads: tuple[LoadView, ...]  # the load about once a second, oldest first
    requests: tuple[ServedRow, ...]  # the newest requests, by arrival
    left_out: int  # number of requests that are not in `requests`
    schedules: SchedulesView | None = None


def engine_of(record: SourceRecord, records: Iterable[SourceRecord]) -> SourceRecord:
    """Return the record of the engine that runs its model in the process of `record`.

    Returns `record` if it is an engine, or if its engine is not among `records`.
    """
    hello, pid = record.hello, record.serving.engine_pid
    if hello is None or pid is None or record.serving.is_engine:
        return record
    for other in records:
        about = other.hello
        if about is not None and (about.pid, about.boot_id, about.pid_namespace) == (
            pid,
            hello.boot_id,
            hello.pid_namespace,
        ):
            return other
    return record


def shared_engine(members: Iterable[SourceRecord], records: Sequence[SourceRecord]) -> SourceRecord | None:
    """Return the engine of all `members`. None if they have several, as with data parallelism."""
    engines = {engine.key: engine for engine in (engine_of(member, records) for member in members)}
    return next(iter(engines.values())) if len(engines) == 1 else None


def serving_view(record: SourceRecord | None) -> ServingView | None:
    """Return the view of a source's engine, or None if the source serves no requests."""
    if record is None or not record.serving.is_engine:
        return None
    said = record.serving
    times = said.times
    requests = sorted(said.requests.values(), key=lambda one: one.number)
    loads = sorted(said.loads.values(), key=lambda one: one.number)
    begin_ns = min([one.arrived_ns for one in requests] + [one.at_ns for one in loads], default=0)
    load_views = tuple(_load(one, begin_ns) for one in loads)
    return ServingView(
        engine=times.engine if times else "",
        iterations=times.iterations if times else 0,
        mean_us=times.wall_ns / times.iterations / 1e3 if times else None,
        parts=_parts(times) if times else (),
        ended=times.ended if times else 0,
        first_token=_latency(times, FIRST_TOKEN),
        between_tokens=_latency(times, BETWEEN_TOKENS),
        load=load_views[-1] if load_views else None,
        loads=load_views,
        requests=tuple(_row(one, begin_ns) for one in requests),
        left_out=requests[-1].number + 1 - len(requests) if requests else 0,
        schedules=_schedules(said.schedules) if said.schedules else None,
    )


def _parts(times: EngineTimes) -> tuple[EnginePartRow, ...]:
    ordered = sorted(times.parts, key=lambda part: _PART_ORDER.get(part.name, len(_PART_ORDER)))
    return tuple(
        EnginePartRow(
            part.name, 100 * part.sum_ns / times.wall_ns, part.sum_ns / times.iterations / 1e3, part.p50_ns / 1e3
        )
        for part in ordered
    )


def _schedules(said: EngineSchedules) -> SchedulesView:
    queues = (
        QueueRow(
            queue.reason,
            100 * queue.schedules / said.schedules,
            queue.running / queue.schedules,
            queue.waiting / queue.schedules,
            queue.cache_percent,
        )
        for queue in sorted(said.queues, key=lambda queue: -queue.schedules)
    )
    return SchedulesView(
        said.schedules, said.requests / said.schedules, said.max_running, said.preemptions, tuple(queues)
    )


def _latency(times: EngineTimes | None, name: str) -> LatencyView | None:
    found = [of for of in times.latencies if of.name == name] if times else []
    return LatencyView(found[0].measured, found[0].p50_ns / 1e3, found[0].p99_ns / 1e3) if found else None


def _load(load: EngineLoad, begin_ns: int) -> LoadView:
    return LoadView((load.at_ns - begin_ns) / 1e9, load.running, load.waiting, load.cache_percent)


def _row(one: ServedRequest, begin_ns: int) -> ServedRow:
    def since_us(moment_ns: int) -> float | None:
        return (moment_ns - one.arrived_ns) / 1e3 if moment_ns else None

    spans = one.output_tokens - 1
    is_known = one.ended_ns and one.first_token_ns and spans > 0
    return ServedRow(
        number=one.number,
        name=one.name,
        arrived_s=(one.arrived_ns - begin_ns) / 1e9,
        queued_us=since_us(one.scheduled_ns),
        first_token_us=since_us(one.first_token_ns),
        total_us=since_us(one.ended_ns),
        per_token_us=(one.ended_ns - one.first_token_ns) / 1e3 / spans if is_known else None,
        prompt_tokens=one.prompt_tokens,
        cached_tokens=one.cached_tokens,
        output_tokens=one.output_tokens,
        preemptions=one.preemptions,
        reason=one.reason,
    )
