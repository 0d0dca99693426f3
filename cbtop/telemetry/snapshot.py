"""Make the content of an export from a store: the points of every metric, and how many items were left out."""

# A counter must never decrease, or its rate would be wrong. So a time that is a difference is only of ended steps,
# because all records of their bricks have arrived. The daemon counts lost records.

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.profiler.analysis.brick_stats import BrickStats, brick_stats, name_and_category
from cbtop.profiler.analysis.calls import Calls
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.histograms import bucket_of
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import BrickCategory, DeviceKind, NodeKind, SourceStatus
from cbtop.telemetry.metrics import (
    BRICK_BUDGET,
    BRICK_DURATION,
    BRICK_ELEMENTS,
    BRICK_EXCLUSIVE,
    BRICK_FAILED,
    BRICK_FLOPS,
    BRICK_TRAFFIC,
    CACHE_USAGE,
    CHECK,
    DAEMON,
    DEVICE,
    DEVICE_CLOCK,
    DEVICE_MEMORY_CLOCK,
    DEVICE_MEMORY_SIZE,
    DEVICE_MEMORY_USED,
    DEVICE_MEMORY_UTILIZATION,
    DEVICE_POWER,
    DEVICE_POWER_LIMIT,
    DEVICE_RECEIVED,
    DEVICE_SENT,
    DEVICE_SLOWED,
    DEVICE_TEMPERATURE,
    DEVICE_UTILIZATION,
    DROPPED,
    ENGINE_LATENCY,
    LEFT_OUT,
    MAX_SERIES,
    METRICS,
    PREEMPTIONS,
    PRODUCED,
    QUIET,
    RECEIVED,
    RECORDED_STEPS,
    RECORDED_TOKENS,
    REQUESTS_ENDED,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    SOURCE,
    SOURCE_CPU,
    SOURCE_DEVICE_MEMORY,
    SOURCE_DEVICE_UTILIZATION,
    SOURCE_RESIDENT,
    STATE,
    STEP_DURATION,
    TOKENS,
    UNREAD,
    WEIGHTS,
    DurationHistogram,
    Metric,
    Point,
    Snapshot,
)
from cbtop.viewmodels.devices import DeviceRow, ProcessRow, machine_view
from cbtop.viewmodels.source import summaries
from cbtop.viewmodels.stall import stall_view

_log = logging.getLogger("cbtop.daemon")

MAX_PHASES = 16  # A source is exported with at most this many phases.
MAX_BRICKS = 256  # A phase is exported with at most this many bricks.

# Durations are counted in buckets between powers of two, so each bound is exact: a call of 2^k ns is above the bound
# 2^k - 1. The bounds go from a microsecond to 17 s.
BOUNDS_NS = tuple(2**k - 1 for k in range(10, 35))
_CUTS = np.concatenate(([0], bucket_of(np.array(BOUNDS_NS, np.int64) + 1)))

# a value to export: (metric, values of the metric's labels, value)
Value = tuple[Metric, tuple[str, ...], float | DurationHistogram]


@dataclass(frozen=True, slots=True)
class _Part:
    """Values that are exported together or left out together. They belong to one device, source, phase, brick or
    check.

    If there is not enough room for all parts, parts with a lower `rank` are exported first.
    """

    of: str
    rank: int
    values: list[Value]
    since_ns: int

    @property
    def series(self) -> int:
        return sum(len(BOUNDS_NS) + 3 if isinstance(value, DurationHistogram) else 1 for _, _, value in self.values)


def snapshot(store: Store, now_ns: int) -> Snapshot:
    """Return the points of every metric at `now_ns` (Unix time), in at most MAX_SERIES series.

    If there is too little room, sources come first, then the first brick of each source, then the second brick of
    each, and so on.
    """
    found: Snapshot = {metric: [] for metric in METRICS}
    left_out = dict.fromkeys(("device", "source", "phase", "brick", "check"), 0)
    left_out["source"] = len(store.left_out)
    parts: list[_Part] = []
    for device in _devices(store):
        parts.append(_Part("device", 0, device, now_ns))
    for summary in summaries(store.sources.values()):
        try:
            parts += [*_source_parts(store.sources[summary.key], now_ns, left_out)]
        except Exception:  # noqa: BLE001 - errors in one source must not affect the export of others
            _log.debug("%s cannot be exported", summary.key, exc_info=True)
            left_out["source"] += 1
    if store.daemon:
        found[DAEMON].append(Point((store.daemon.version, store.daemon.host), 1, now_ns))
    room = MAX_SERIES - len(found[DAEMON]) - len(left_out)
    for part in sorted(parts, key=lambda part: part.rank):
        if part.series > room:
            left_out[part.of] += 1
            continue
        room -= part.series
        for metric, labels, value in part.values:
            found[metric].append(Point(labels, value, part.since_ns))
    found[LEFT_OUT] += [Point((of,), count, now_ns) for of, count in left_out.items()]
    return found


def _devices(store: Store) -> Iterator[list[Value]]:
    """Yield the values of each device, and each source's use of the devices. Only recent samples are used."""
    machine = machine_view(store)
    fresh = [row for row in machine.devices if not row.is_stale]
    for row in fresh:
        yield list(_device(row, machine.host))
    known = {row.device.uuid for row in fresh}
    is_host_known = any(row.device.kind is DeviceKind.CPU for row in fresh)
    hosts: dict[str, ProcessRow] = {}
    for process in machine.processes:
        if process.source is None:
            continue
        hosts[process.source] = process
        if process.device_uuid in known:
            on = process.source, process.device_uuid
            yield [
                *_known(SOURCE_DEVICE_MEMORY, on, process.gpu_memory_bytes),
                *_known(SOURCE_DEVICE_UTILIZATION, on, process.gpu_utilization_percent, 0.01),
            ]
    for source, process in hosts.items() if is_host_known else ():
        yield [
            *_known(SOURCE_CPU, (source,), process.cpu_percent, 0.01),
            *_known(SOURCE_RESIDENT, (source,), process.resident_bytes),
        ]


def _device(row: DeviceRow, host: str) -> Iterator[Value]:
    device = row.device
    labels = device.uuid, device.kind.value
    yield DEVICE, (*labels, row.label, device.name, device.part_of, host), 1
    yield from _known(DEVICE_UTILIZATION, labels, device.utilization_percent, 0.01)
    yield from _known(DEVICE_MEMORY_UTILIZATION, labels, device.memory_utilization_percent, 0.01)
    yield from _known(DEVICE_MEMORY_USED, labels, device.memory_used_bytes)
    yield from _known(DEVICE_MEMORY_SIZE, labels, device.memory_total_bytes)
    yield from _known(DEVICE_POWER, labels, row.watts)
    yield from _known(DEVICE_POWER_LIMIT, labels, device.power_limit_watts)
    yield from _known(DEVICE_CLOCK, labels, device.clock_mhz, 1e6)
    yield from _known(DEVICE_MEMORY_CLOCK, labels, device.memory_clock_mhz, 1e6)
    yield from _known(DEVICE_TEMPERATURE, labels, device.temperature_celsius)
    for by in dict.fromkeys(filter(None, (device.slowed_by or "").split(", "))):
        yield DEVICE_SLOWED, (*labels, by), 1
    yield from _known(DEVICE_SENT, (*labels, "pcie"), device.pcie_sent_bytes_per_sec)
    yield from _known(DEVICE_SENT, (*labels, "nvlink"), device.nvlink_sent_bytes_per_sec)
    yield from _known(DEVICE_RECEIVED, (*labels, "pcie"), device.pcie_received_bytes_per_sec)
    yield from _known(DEVICE_RECEIVED, (*labels, "nvlink"), device.nvlink_received_bytes_per_sec)


def _known(metric: Metric, labels: tuple[str, ...], value: float | None, scale: float = 1.0) -> Iterator[Value]:
    if value is not None:
        yield metric, labels, value * scale


def _source_parts(record: SourceRecord, now_ns: int, left_out: dict[str, int]) -> Iterator[_Part]:
    since_ns = min(max(record.hello.realtime_ns, 0), now_ns) if record.hello else now_ns
    yield _Part("source", 0, [*_source(record), *_engine(record)], since_ns)
    for rank, check in enumerate(sorted(record.checks.values(), key=lambda check: check.passed), 1):
        labels = record.key, check.brick, check.assertion
        if not check.skipped:
            yield _Part("check", rank, [(CHECK, labels, float(check.passed))], since_ns)
    steps = [display_name(node) for node in record.nodes.children[None] if node.kind is NodeKind.STEP]
    phases: list[str | None] = [*dict.fromkeys(steps)]
    left_out["phase"] += len(phases[MAX_PHASES:])
    rank = 0
    for phase in phases[:MAX_PHASES] or [None]:
        totals = PhaseTotals.of(record.nodes, record.stats, phase)
        if values := list(_phase(record.key, totals)):
            yield _Part("phase", rank := rank + 1, values, since_ns)
        nodes: dict[tuple[str, BrickCategory], list[Node]] = {}
        for node in totals.nodes:
            if node.kind is NodeKind.BRICK or totals.own_rows[node.id]:
                nodes.setdefault(name_and_category(node), []).append(node)
        bricks = {(stats.name, stats.category): stats for stats in brick_stats(totals)}
        # Bricks are in the order of their first appearance, because this order never changes.
        ran = [key for key in nodes if key in bricks]
        left_out["brick"] += len(ran[MAX_BRICKS:])
        for key in ran[:MAX_BRICKS]:
            found = list(_brick(record.key, totals, bricks[key], nodes[key]))
            yield _Part("brick", rank := rank + 1, found, since_ns)


def _source(record: SourceRecord) -> Iterator[Value]:
    key, hello, manifest, state = record.key, record.hello, record.manifest, record.state
    rank = str(hello.rank) if hello and hello.rank is not None else ""
    sample_every = str(record.sample_every) if hello else ""
    who = (str(hello.pid), hello.host, hello.program, rank, sample_every) if hello else ("", "", "", "", "")
    what = ("", "", "", "")
    if manifest:
        what = manifest.model, manifest.architecture, manifest.quantization, manifest.backend
        yield WEIGHTS, (key,), manifest.weights_bytes
    yield SOURCE, (key, *who, *what), 1
    if state:
        stall = stall_view(record)
        yield STATE, (key, stall.word if stall else state.state), 1
        if stall:
            yield QUIET, (key, stall.phase or "", stall.layer or "", stall.brick or ""), stall.age_s
        yield PRODUCED, (key,), state.produced
        yield RECEIVED, (key,), state.received
        yield DROPPED, (key, "before_attach"), state.before_attach
        yield DROPPED, (key, "overwritten"), state.overwritten - state.before_attach
        yield DROPPED, (key, "rejected"), state.rejected
        yield UNREAD, (key,), state.unread


def _engine(record: SourceRecord) -> Iterator[Value]:
    """Yield the figures of an engine's requests. If the engine has ended, only the counts remain."""
    of, times = (record.key,), record.serving.times
    loads = record.serving.loads.values()
    if times is not None:
        yield REQUESTS_ENDED, of, times.ended
        yield PREEMPTIONS, of, times.preemptions
    if record.state is None or record.state.state in (SourceStatus.ENDED, SourceStatus.GONE):
        return
    if loads:
        load = max(loads, key=lambda one: one.number)
        yield REQUESTS_RUNNING, of, load.running
        yield REQUESTS_WAITING, of, load.waiting
        yield from _known(CACHE_USAGE, of, load.cache_percent, 0.01)
    for kind in times.latencies if times is not None else ():
        yield ENGINE_LATENCY, (record.key, kind.name, "0.5"), kind.p50_ns / 1e9
        yield ENGINE_LATENCY, (record.key, kind.name, "0.99"), kind.p99_ns / 1e9


def _phase(key: str, totals: PhaseTotals) -> Iterator[Value]:
    step = totals.step
    calls = totals.stats.calls([step.id]) if step else None
    if step and calls:
        yield TOKENS, (key, display_name(step)), calls.elements
        yield STEP_DURATION, (key, display_name(step)), _durations(totals.stats, [step.id], calls)
        yield RECORDED_STEPS, (key, display_name(step)), totals.count[step.id]
        yield RECORDED_TOKENS, (key, display_name(step)), totals.elements[step.id]


def _brick(key: str, totals: PhaseTotals, stats: BrickStats, nodes: list[Node]) -> Iterator[Value]:
    labels = (
        key,
        display_name(totals.step) if totals.step else "",
        stats.name,
        stats.category.display_name,
        # Use the backend of the brick's first node. The label must not change when nodes are added.
        min(nodes, key=lambda node: node.id).backend,
    )
    yield BRICK_DURATION, labels, _durations(totals.stats, [node.id for node in nodes], stats.calls)
    yield BRICK_FAILED, labels, stats.calls.failed
    yield BRICK_ELEMENTS, labels, stats.calls.elements
    if totals.step:
        exclusive_ns = stats.closed.exclusive_ns + stats.adopted_ns
        # If parallel calls inside the brick took longer than the brick itself, its exclusive time is unknown.
        is_known = exclusive_ns >= 0
    else:
        exclusive_ns = stats.exclusive_ns
        # Outside of steps, a brick's exclusive time may decrease, because records of inner bricks arrive later.
        is_known = exclusive_ns == stats.calls.total_ns
    if is_known:
        yield BRICK_EXCLUSIVE, labels, exclusive_ns / 1e9
    if stats.flops is not None:
        yield BRICK_FLOPS, labels, stats.flops
    if stats.bytes is not None:
        yield BRICK_TRAFFIC, labels, stats.bytes
    if stats.budget_us_per_token is not None:
        yield BRICK_BUDGET, labels, stats.budget_us_per_token / 1e6


def _durations(stats: NodeStats, nodes: list[int], calls: Calls) -> DurationHistogram:
    # The totals are of the process's whole life, so the minimum and maximum are known.
    assert calls.min_ns is not None
    assert calls.max_ns is not None
    counts = tuple(np.add.reduceat(stats.histogram(nodes), _CUTS).tolist())
    # Some nodes have no histogram, or part of an update has not arrived, so the distribution is unknown.
    if sum(counts) != calls.count:
        return DurationHistogram((), (calls.count,), calls.total_ns, calls.min_ns, calls.max_ns)
    return DurationHistogram(BOUNDS_NS, counts, calls.total_ns, calls.min_ns, calls.max_ns)
