"""Everything a viewer knows: each source's catalog, totals and bounded history, updated by messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from sys import getsizeof
from typing import NamedTuple, TypeVar, assert_never

import numpy as np
from numpy.typing import NDArray

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.client.busy import SLICES, BusySlices
from cbtop.client.recent import RecentRecords
from cbtop.client.trend import BrickTrend
from cbtop.client.window import Losses, Window
from cbtop.profiler.graph.node_table import MAX_NODES, NodeTable
from cbtop.profiler.graph.nodes import display_name
from cbtop.profiler.histograms import BUCKETS, MAX_CELLS, Column
from cbtop.profiler.stats import ANY_STEP, COLUMNS, MAX_SAID_INTERVALS, SPARSE_COLUMNS, Growth, NodeStats
from cbtop.protocol.announcements import MAX_ANNOUNCED, MAX_COMPILATIONS, AnnouncedTotal, comes_to_fail
from cbtop.protocol.columns import unpack_columns
from cbtop.protocol.device_messages import Device, DeviceProcess, DeviceSample, Unknown
from cbtop.protocol.errors import DecodeError, LimitError, VersionError
from cbtop.protocol.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Activity,
    CatalogMessage,
    Ceiling,
    CheckResult,
    ClockReading,
    Compilation,
    DaemonGoodbye,
    DaemonHello,
    Dependency,
    Goodbye,
    Heartbeat,
    HistoryPiece,
    HostHello,
    KernelBurst,
    KernelTimes,
    Manifest,
    Message,
    Node,
    RecordBatch,
    Sampling,
    SourceCatalog,
    SourceGone,
    SourceState,
    StatsUpdate,
    TraceAnomaly,
    TraceNumber,
    TraceSummary,
    Training,
)
from cbtop.protocol.vocabulary import DeviceKind, NodeKind, SourceStatus

HISTORY_S = 120
MAX_SOURCES = 1024
MAX_PHASES = 64  # per source: phases with known rates
# Limit for all daemons together: 64 processes of 365 places take a quarter of it.
MAX_BYTES = 256 << 20
MAX_WINDOW_BYTES = 64 << 20  # part of MAX_BYTES for the recent windows
MAX_RECENT_BYTES = 32 << 20  # part of MAX_BYTES for the newest records, while a timeline is shown
# Approximate sizes: a node without its names, and an announcement with the longest texts.
SOURCE_BYTES, NODE_BYTES, DEPENDENCY_BYTES, SAID_BYTES, PHASE_BYTES = 16 << 10, 600, 300, 3 << 10, 48 << 10
BUSY_BYTES = 16 * (SLICES + 1)  # per node
# Samplers' data comes on top of MAX_BYTES: at most 24 MiB, if every text has the maximum length.
MAX_SAMPLERS, MAX_DEVICES, MAX_TOLD = 4, 256, 8_192
MAX_FOLLOWED = 64  # processes per sampler with a history of the last two minutes
NAMED = 3  # dropped sources that are named in the complaint
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
MAX_RARE = 1e30  # the maximum of rare values such as FLOP and bytes
CELLS_END = (MAX_NODES + 1) * BUCKETS
SANE = 1 << 62  # above it, adding two totals would overflow


_MIN_ROW = COLUMNS.index("min_ns")  # a node without records has an out-of-range value here
_UNION, _FIRST = SPARSE_COLUMNS.index("union_ns"), SPARSE_COLUMNS.index("first_ns")
_HAVE_ENDED = (SourceStatus.ENDED, SourceStatus.GONE, SourceStatus.FAULTY)


@dataclass(frozen=True, slots=True)
class StepSample:
    """The totals of one phase at one moment."""

    monotonic_ns: int
    tokens: int
    count: int = 0  # steps
    time_ns: int = 0  # sum over the steps
    sequences: int = 0  # sum over the steps that reported it
    sequences_given: int = 0  # number of steps that reported it
    cached: int = 0  # positions in caches before the steps, summed the same way
    cached_given: int = 0


@dataclass(slots=True)
class SourceRecord:
    """What this viewer knows of one profiled process."""

    key: str
    window: Window
    hello: HostHello | None = None
    nodes: NodeTable = field(default_factory=NodeTable)
    dependencies: dict[Dependency, None] = field(default_factory=dict)  # in order of arrival
    manifest: Manifest | None = None
    ceilings: dict[str, Ceiling] = field(default_factory=dict)
    checks: dict[tuple[str, str], CheckResult] = field(default_factory=dict)
    traces: dict[str, TraceSummary] = field(default_factory=dict)  # by id: MLT-01 …
    activity: Activity = Activity("")  # noqa: RUF009 - frozen
    sampling: Sampling | None = None  # None: as in the hello, and its cost is unknown
    compilations: dict[int, Compilation] = field(default_factory=dict)  # the newest, by the remainder of their number
    burst: KernelBurst | None = None  # the latest one
    goodbye: Goodbye | None = None
    state: SourceState | None = None
    stats: NodeStats = field(default_factory=NodeStats)
    history: dict[str, deque[StepSample]] = field(default_factory=dict)  # phase -> one sample a second
    trend: BrickTrend = field(default_factory=BrickTrend)
    busy: BusySlices | None = None  # only for a rank
    recent: RecentRecords = field(default_factory=RecentRecords)  # empty if the store keeps none
    names_bytes: int = 0  # total length of node names
    trains: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether no more data can come from it."""
        return self.state is not None and self.state.state in _HAVE_ENDED

    @property
    def is_unread(self) -> bool:
        """Whether it has ended and its data was not read yet. The daemon reads it on request."""
        state = self.state
        return self.has_ended and state is not None and not self.stats.received and state.received + state.unread > 0

    @property
    def steps_ended(self) -> int:
        """Number of its counted steps."""
        return sum(int(self.stats.column("count")[step.id]) for step in _steps(self))

    @property
    def sample_every(self) -> int:
        """It records one step in this many."""
        if self.sampling is not None:
            return self.sampling.every
        return self.hello.sample_every if self.hello else 1

    @property
    def leaves_steps_out(self) -> bool:
        """Whether some steps are not recorded. A process that measures its own cost leaves some out for that."""
        return self.sampling is not None or self.sample_every > 1

    def kept(self) -> int:
        """Number of places in its tables plus announcements."""
        places = max(len(self.nodes), len(self.stats))
        traced = sum(len(trace.numbers) + len(trace.anomalies) for trace in self.traces.values())
        traced += len(self.burst.kernels) if self.burst else 0
        return places + len(self.dependencies) + len(self.ceilings) + len(self.checks) + len(self.traces) + traced

    @property
    def size_bytes(self) -> int:
        """Approximate memory used."""
        said = len(self.ceilings) + len(self.checks)
        said += sum(1 + len(trace.numbers) + len(trace.anomalies) for trace in self.traces.values())
        said += len(self.burst.kernels) if self.burst else 0
        known = SOURCE_BYTES + NODE_BYTES * len(self.nodes) + self.names_bytes + SAID_BYTES * said
        known += DEPENDENCY_BYTES * len(self.dependencies) + PHASE_BYTES * len(self.history)
        slices = BUSY_BYTES * len(self.stats) if self.busy else 0
        kept = (self.stats, self.window, self.trend, self.recent)
        return known + slices + sum(one.size_bytes for one in kept) + self.window.sum_bytes

    def begin_range(self, now_ns: int, length_s: float) -> None:
        """Restart windows, curves and records for a range of `length_s` seconds that begins now.

        `now_ns` is the daemon's clock, used if nothing was received of this source yet.
        """
        self.window = self.window.from_now_on(length_s)
        if not self.window.has_begun and not self.has_ended:
            self.window.tick(now_ns, losses=Losses())  # so that all it reports first counts as ended within the range
        self.recent, self.trend = RecentRecords(), BrickTrend()
        at_ns = self.window.now_ns
        if len(self.stats):
            self.trend.tick(at_ns, self.nodes, self.stats)
        if self.busy is not None:
            self.busy = BusySlices()
            self.busy.tick(at_ns, self.nodes, self.stats)
        self.history = {
            display_name(step): deque([_step_sample(self, step, at_ns)], maxlen=HISTORY_S + 1)
            for step in _steps(self)
            if display_name(step) in self.history
        }

    def forget_catalog(self) -> None:
        """Forget announcements that may be withdrawn, before a snapshot.

        Nodes and statistics only grow, so they stay.
        """
        self.dependencies.clear()
        self.ceilings.clear()
        self.checks.clear()
        self.traces.clear()
        self.burst = None


class DeviceMoment(NamedTuple):
    """The figures of a device in one sample; None is n/a."""

    busy_percent: float | None
    memory_bytes: float | None
    watts: float | None  # as DeviceRow.watts
    clock_mhz: float | None
    celsius: float | None


class ProcessMoment(NamedTuple):
    """What a process used of its host in one sample; None is n/a."""

    cpu_percent: float | None
    resident_bytes: float | None
    waiting_percent: float | None = None  # waiting for a processor


@dataclass(slots=True)
class SampledDevices:
    """The newest sample of one daemon sampler, and its history of the last two minutes, oldest first."""

    newest: DeviceSample
    history: dict[str, deque[DeviceMoment]] = field(default_factory=dict)  # by uuid
    of_processes: dict[tuple[int, int], deque[ProcessMoment]] = field(default_factory=dict)  # by pid and start time

    def take(self, sample: DeviceSample) -> None:
        """Store `sample` as the newest. A repeated sample (from a keyframe) adds nothing to the history."""
        is_new = not self.history or sample.monotonic_ns > self.newest.monotonic_ns
        self.newest = sample
        processes = [one for device in sample.devices if device.kind is DeviceKind.CPU for one in device.processes]
        processes = processes[:MAX_FOLLOWED]
        self.history = {device.uuid: _kept(self.history, device.uuid) for device in sample.devices}
        ended = {key: kept for key, kept in self.of_processes.items() if key not in set(map(_who, processes))}
        while len(ended) > MAX_FOLLOWED:
            del ended[next(iter(ended))]
        self.of_processes = ended | {key: _kept(self.of_processes, key) for key in map(_who, processes)}
        if is_new:
            for device in sample.devices:
                mean, reading = device.power_watts, device.power_reading_watts
                self.history[device.uuid].append(
                    DeviceMoment(
                        device.utilization_percent,
                        device.memory_used_bytes,
                        reading if mean is None else mean,
                        device.clock_mhz,
                        device.temperature_celsius,
                    )
                )
            for process in processes:
                self.of_processes[_who(process)].append(
                    ProcessMoment(process.utilization_percent, process.memory_bytes, process.waiting_percent)
                )


def _kept(histories: dict[KeyT, deque[ValueT]], key: KeyT) -> deque[ValueT]:
    return histories.get(key) or deque(maxlen=HISTORY_S)


def _who(process: DeviceProcess) -> tuple[int, int]:
    return process.pid, process.process_start


class Budget:
    """Memory limit for all stores of a viewer. Over it, windows are shortened first, then sources are dropped.

    The largest source of the largest daemon is dropped, so that one daemon cannot cost the others their data.
    """

    def __init__(self) -> None:
        self.stores: list[Store] = []

    def hold(self) -> None:
        """Drop what is over the limits."""
        while sum(store.recent_bytes for store in self.stores) > MAX_RECENT_BYTES:
            max(self.stores, key=lambda store: store.recent_bytes).shorten_records()
        while sum(store.window_bytes for store in self.stores) > MAX_WINDOW_BYTES:
            max(self.stores, key=lambda store: store.window_bytes).shorten_window()
        while sum(store.size_bytes for store in self.stores) > MAX_BYTES:
            max(self.stores, key=lambda store: store.size_bytes).leave_out_largest()


class Store:
    """Applies messages to sources. Data of an unknown source is ignored, because its catalog will follow."""

    def __init__(self, window_s: float = DEFAULT_WINDOW_S, budget: Budget | None = None) -> None:
        self.window_s = window_s
        self.sources: dict[str, SourceRecord] = {}
        self.left_out: dict[str, str] = {}  # dropped sources, and why
        self.daemon: DaemonHello | None = None
        self.devices: dict[str, SampledDevices] = {}  # by sampler, in order of arrival
        self.heard_ns = 0  # the daemon's clock in its latest message
        self._total = AnnouncedTotal()
        self.size_bytes = 0
        self.window_bytes = 0
        self._sizes: dict[str, tuple[int, int]] = {}  # per source: total size, and size of its window
        self._keeps_records = False
        self._range_from_ns: int | None = None  # the daemon's clock at the begin of a range
        self._budget = budget or Budget()
        self._budget.stores.append(self)

    def apply(self, message: Message) -> None:
        """Apply one message.

        Raises VersionError if the daemon has a different major version, DecodeError if the message contradicts
        itself, LimitError if there is no room for its source, which is then dropped.
        """
        match message:
            case SourceCatalog() | StatsUpdate() if message.source in self.left_out:
                return
            case RecordBatch() if not self._keeps_records or message.source not in self.sources:
                return
            case SourceCatalog() | StatsUpdate() | RecordBatch():
                try:
                    self._apply(message)
                except MemoryError:
                    self._leave_out(message.source, "no memory")
                finally:
                    self._weigh(message.source)
                    self._budget.hold()
            case DaemonHello():
                self._apply(message)
                self._sizes.clear()
                self.left_out.clear()
                self.size_bytes = self.window_bytes = 0
            case _:
                self._apply(message)

    def shorten_window(self) -> None:
        """Drop the oldest slice of the largest window."""
        key = max(self._sizes, key=lambda key: self._sizes[key][1])
        self.sources[key].window.shorten()
        self._weigh(key)

    @property
    def recent_bytes(self) -> int:
        """Approximate memory used by the newest records."""
        return sum(record.recent.size_bytes for record in self.sources.values())

    def keep_records(self, on: bool) -> None:
        """Start or stop keeping the newest records of every source."""
        self._keeps_records = on
        if not on:
            for key, record in self.sources.items():
                record.recent = RecentRecords()
                self._weigh(key)

    def forget_records(self) -> None:
        """Drop all kept records. The next records start anew."""
        for key, record in self.sources.items():
            record.recent.forget()
            self._weigh(key)

    def begin_range(self, length_s: float) -> None:
        """Restart windows, curves and records of every source for a range of `length_s` seconds that begins now."""
        self.window_s = length_s
        now_ns = max([self.heard_ns, *(record.window.now_ns for record in self.sources.values())])
        self._range_from_ns = now_ns
        for key, record in self.sources.items():
            record.begin_range(now_ns, length_s)
            self._weigh(key)

    def shorten_records(self) -> None:
        """Drop half of the records of the source that has the most."""
        key, record = max(self.sources.items(), key=lambda item: len(item[1].recent))
        record.recent.shorten(len(record.recent) // 2)
        self._weigh(key)

    def leave_out_largest(self) -> None:
        """Drop the largest source."""
        self._leave_out(max(self._sizes, key=lambda key: self._sizes[key][0]), f"more than {MAX_BYTES >> 20} MiB")

    def complaint(self) -> str:
        """Return the number, names and reasons of dropped sources, or "" if there are none."""
        if not self.left_out:
            return ""
        names = [*list(self.left_out)[:NAMED], *(["…"] if len(self.left_out) > NAMED else [])]
        many = f"{'at least ' * (len(self.left_out) >= MAX_SOURCES)}{len(self.left_out)}"
        why = ", ".join(dict.fromkeys(self.left_out.values()))
        return f"{many} source{'s' * (len(self.left_out) > 1)} left out: {', '.join(names)} ({why})"

    def _leave_out(self, key: str, why: str) -> None:
        self._forget(key)
        if len(self.left_out) < MAX_SOURCES:
            self.left_out[key] = why

    def _forget(self, key: str) -> None:
        self.sources.pop(key, None)
        self._total.forget(key)
        self._weigh(key)

    def _weigh(self, key: str) -> None:
        before, record = self._sizes.pop(key, (0, 0)), self.sources.get(key)
        now = (record.size_bytes, record.window.size_bytes) if record else (0, 0)
        if record:
            self._sizes[key] = now
        self.size_bytes += now[0] - before[0]
        self.window_bytes += now[1] - before[1]

    def _apply(self, message: Message) -> None:
        match message:
            case DaemonHello():
                if message.protocol_major != PROTOCOL_MAJOR:
                    raise VersionError(
                        f"the daemon (cbtop {message.version}) speaks protocol {message.protocol_major}."
                        f"{message.protocol_minor}, this viewer {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}: "
                        "run the same cbtop on both sides"
                    )
                self.daemon = message
                self.sources.clear()  # snapshots of everything the daemon knows follow
                self.devices.clear()
                self.heard_ns = message.monotonic_ns
                self._total = AnnouncedTotal()
            case SourceCatalog():
                try:
                    self._catalog(message)
                finally:  # the part before the contradiction is kept
                    self._count(message.source)
            case SourceState():
                if message.source in self.sources:
                    self.sources[message.source].state = message
            case Heartbeat():
                self.heard_ns = message.monotonic_ns
                for state in message.sources:
                    if isinstance(state, SourceState) and state.source in self.sources:
                        record = self.sources[state.source]
                        record.state = state
                        if state.state is SourceStatus.LIVE and record.window.has_begun:
                            _remember(record, message.monotonic_ns)  # no change is also a sample
            case StatsUpdate():
                if message.source in self.sources:
                    _update_stats(self.sources[message.source], message)
                    self._count(message.source)
            case DeviceSample():
                self._sampled(message)
            case ClockReading():
                pass  # handled by the collector
            case RecordBatch():
                self.sources[message.source].recent.take(message)
            case HistoryPiece():
                pass  # handled by recorders
            case DaemonGoodbye():
                pass  # known data stays; the collector updates the link
            case SourceGone():
                self._forget(message.source)
                self.left_out.pop(message.source, None)
            case (
                HostHello()
                | Node()
                | Dependency()
                | Manifest()
                | Ceiling()
                | CheckResult()
                | TraceSummary()
                | TraceNumber()
                | TraceAnomaly()
                | Activity()
                | Sampling()
                | Compilation()
                | Training()
                | KernelBurst()
                | KernelTimes()
                | Goodbye()
                | Device()
                | DeviceProcess()
                | Unknown()
            ):
                raise DecodeError(f"a {type(message).__name__} outside a catalog")
            case _:
                assert_never(message)

    def _sampled(self, sample: DeviceSample) -> None:
        others = {name: known.newest for name, known in self.devices.items() if name != sample.sampler}
        devices = [device for other in (*others.values(), sample) for device in other.devices]
        told = sum(1 + len(device.processes) + len(device.unknown) for device in devices)
        if len(others) >= MAX_SAMPLERS or len(devices) > MAX_DEVICES or told > MAX_TOLD:
            raise DecodeError(f"{len(others) + 1} samplers tell {told} things of {len(devices)} devices")
        self.devices.setdefault(sample.sampler, SampledDevices(sample)).take(sample)

    def _count(self, source: str) -> None:
        if source in self.sources:
            try:
                self._total.set(source, self.sources[source].kept())
            except LimitError as error:
                self._leave_out(source, str(error))
                raise

    def _catalog(self, message: SourceCatalog) -> None:
        record = self.sources.get(message.source)
        if record is None:
            if not message.complete:
                return
            if len(self.sources) >= MAX_SOURCES:
                self._leave_out(message.source, f"more than {MAX_SOURCES:,} sources")
                return
            window = Window(self.window_s, is_range=self._range_from_ns is not None)
            record = self.sources[message.source] = SourceRecord(message.source, window)
        elif message.complete:
            record.forget_catalog()
        for said in message.messages:
            if not message.complete and isinstance(said, Node) and said.id > len(record.nodes) + 1:
                continue  # the nodes before it were lost; the next keyframe repeats all
            _catalog_message(record, said)
            if self._range_from_ns is None or not isinstance(said, HostHello):
                continue
            if not record.window.has_begun and said.monotonic_ns >= self._range_from_ns:
                # The process began later, so all its work belongs to the range.
                record.window.tick(said.monotonic_ns, losses=Losses())


def _catalog_message(record: SourceRecord, message: CatalogMessage) -> None:
    match message:
        case HostHello():
            record.hello = message
            if message.rank is not None and record.busy is None:
                record.busy = BusySlices()
        case Node():
            if message.id <= len(record.nodes):
                return  # repeated: a delta and a keyframe crossed
            try:
                record.nodes.add(message)
            except ValueError as error:
                raise DecodeError(f"{record.key}: {error}") from error
            record.names_bytes += sum(map(getsizeof, _names_of(message)))
        case Dependency():
            record.dependencies[message] = None
        case Manifest():
            record.manifest = message
        case Ceiling() if message.withdrawn:
            record.ceilings.pop(message.name, None)
        case Ceiling():
            record.ceilings[message.name] = message
        case CheckResult():
            about = message.brick, message.assertion
            if comes_to_fail(message, record.checks.get(about)):
                del record.checks[about]
            record.checks[about] = message
        case TraceSummary():
            record.traces[message.trace] = message
        case Activity():
            record.activity = message
        case Sampling():
            record.sampling = message
        case Compilation():
            record.compilations[message.number % MAX_COMPILATIONS] = message
        case Training():
            record.trains = True
        case KernelBurst():
            if len(message.kernels) > MAX_ANNOUNCED:
                raise DecodeError(f"{record.key}: more than {MAX_ANNOUNCED} kernels in a burst")
            record.burst = message
        case Goodbye():
            record.goodbye = message
        case _:
            assert_never(message)
    kept = len(record.dependencies), len(record.ceilings), len(record.checks), len(record.traces)
    if max(kept) > MAX_ANNOUNCED:
        raise DecodeError(f"{record.key}: more than {MAX_ANNOUNCED} announcements of a kind")


def _names_of(node: Node) -> Iterator[str]:
    yield from (node.name, node.label, node.backend)
    if node.function.file:
        yield node.function.file
    if node.transfer:
        yield from (node.transfer.source, node.transfer.destination)


def _update_stats(record: SourceRecord, update: StatsUpdate) -> None:
    node = _column(update.node)
    said_columns = [getattr(update, name) for name in COLUMNS]
    step, count = unpack_columns(update.cells, 2, MAX_CELLS)
    if any(len(column) != len(update.node) for column in said_columns) or not _within(node, 1, MAX_NODES + 1):
        raise DecodeError(f"an update of {record.key} with uneven columns or node ids out of range")
    if not _within(step, 1, CELLS_END) or not _within(cell := np.cumsum(step), BUCKETS, CELLS_END):
        raise DecodeError(f"an update of {record.key} with histogram cells out of range")
    table = _column(b"".join(said_columns)).reshape(len(COLUMNS), len(node))
    if any(not _within(rows.reshape(-1), 0, SANE) for rows in (table[:_MIN_ROW], table[_MIN_ROW + 1 :])):
        raise DecodeError(f"an update of {record.key} with totals out of range")
    if not (_not_below(table[_MIN_ROW], 0) and _within(count, 0, SANE)):
        raise DecodeError(f"an update of {record.key} with counts out of range")
    rare = _column(update.rare_node), _column(update.rare_column), np.frombuffer(update.rare_value, dtype="<f8")
    if len({len(column) for column in rare}) != 1 or not _within(rare[0], 1, MAX_NODES + 1):
        raise DecodeError(f"an update of {record.key} with uneven rare columns or node ids out of range")
    if not (_within(rare[1], 0, len(SPARSE_COLUMNS)) and _are_amounts(rare[2])):
        raise DecodeError(f"an update of {record.key} with rare values out of range")
    said = dict(zip(zip(rare[1].tolist(), rare[0].tolist(), strict=True), map(int, rare[2].tolist()), strict=True))
    for column, value in ((_UNION, update.steps_ns), (_FIRST, update.first_ns)):
        if value is not None:
            if not 0 <= value < SANE:
                raise DecodeError(f"an update of {record.key} with times out of range")
            said[column, ANY_STEP] = value
    ran = unpack_columns(update.ran, 3, MAX_SAID_INTERVALS)
    if not (_within(ran[0], ANY_STEP, MAX_NODES + 1) and _within(ran[1], 0, SANE) and _within(ran[2], 0, SANE)):
        raise DecodeError(f"an update of {record.key} with steps out of range")
    growth = record.stats.take_over(node, table, cell, count, said)
    _remember(record, update.monotonic_ns, growth)
    record.window.clip(*ran)


def _remember(record: SourceRecord, monotonic_ns: int, growth: Growth | None = None) -> None:
    """Set the clock of a source to `monotonic_ns` after its statistics grew.

    Its window ends when the source ended.
    """
    # A heartbeat carries the time when the first source was read. Ignore it for sources read later or ended.
    monotonic_ns = (
        record.window.now_ns or monotonic_ns if record.has_ended else max(monotonic_ns, record.window.now_ns)
    )
    state, losses = record.state, None
    if state is not None:
        losses = Losses(
            state.overwritten + state.rejected - state.before_attach, state.produced - state.before_attach
        )
    record.window.tick(monotonic_ns, growth, losses)
    if record.history and growth is not None and growth.is_empty:
        return  # repeated in a keyframe, which not every viewer hears
    record.trend.tick(monotonic_ns, record.nodes, record.stats)
    if record.busy:
        record.busy.tick(monotonic_ns, record.nodes, record.stats)
    for step in _steps(record):
        phase = display_name(step)
        if phase not in record.history and len(record.history) >= MAX_PHASES:
            continue
        history = record.history.setdefault(phase, deque(maxlen=HISTORY_S + 1))
        if not history or monotonic_ns // 1_000_000_000 > history[-1].monotonic_ns // 1_000_000_000:
            history.append(_step_sample(record, step, monotonic_ns))


def _steps(record: SourceRecord) -> Iterator[Node]:
    """Yield the steps that have totals."""
    for node in record.nodes.children[None]:
        if node.kind is NodeKind.STEP and node.id < len(record.stats):
            yield node


def _step_sample(record: SourceRecord, step: Node, monotonic_ns: int) -> StepSample:
    rare = ("sequences", "sequences_given", "kept", "kept_given")
    sizes = (record.stats.rare(name, (step.id,)) for name in rare)
    totals = (int(record.stats.column(name)[step.id]) for name in ("elements", "count", "total_ns"))
    return StepSample(monotonic_ns, *totals, *sizes)


def _column(data: bytes) -> Column:
    return np.frombuffer(data, dtype="<i8")


def _are_amounts(values: NDArray[np.float64]) -> bool:
    # NaN is not within any bounds.
    return not len(values) or bool(values.min() >= 0 and values.max() < MAX_RARE)


def _not_below(column: Column, low: int) -> bool:
    return not len(column) or bool(column.min() >= low)


def _within(column: Column, low: int, high: int) -> bool:
    return not len(column) or bool(np.minimum.reduce(column) >= low and np.maximum.reduce(column) < high)
