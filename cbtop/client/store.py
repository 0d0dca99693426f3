"""Keep a viewer's data about one daemon: its processes and devices, updated by messages."""

from __future__ import annotations

from typing import assert_never

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.client.announcements import apply_announcement
from cbtop.client.recent import RecentRecords
from cbtop.client.sampled_devices import SampledDevices
from cbtop.client.source_record import SourceRecord, remember
from cbtop.client.stats_update import update_stats
from cbtop.client.window import Losses, Window
from cbtop.protocol.announcements import AnnouncedTotal
from cbtop.protocol.device_messages import DeviceSample
from cbtop.protocol.errors import DecodeError, LimitError, VersionError
from cbtop.protocol.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    CatalogMessage,
    ClockReading,
    DaemonGoodbye,
    DaemonHello,
    Heartbeat,
    HistoryPiece,
    HostHello,
    Message,
    Node,
    Part,
    RecordBatch,
    SourceCatalog,
    SourceGone,
    SourceState,
    StatsUpdate,
)
from cbtop.protocol.vocabulary import SourceStatus

MAX_SOURCES = 1024
# Memory limit in bytes for the data of all daemons together. 64 processes with 365 nodes each use a quarter of the
# limit.
MAX_BYTES = 256 << 20
MAX_WINDOW_BYTES = 64 << 20  # Of MAX_BYTES, recent windows may use this many bytes.
# Of MAX_BYTES, the newest single records may use this many bytes. They are stored only while a timeline is shown.
MAX_RECENT_BYTES = 32 << 20
# Limits for all samplers of a daemon together. Their data is outside of MAX_BYTES: 24 MiB, if every text is as long
# as possible.
MAX_SAMPLERS, MAX_DEVICES, MAX_TOLD = 4, 256, 8_192
NAMED = 3  # `complaint` names at most this many dropped sources.


class Budget:
    """The memory limit for all stores of a viewer. Above it, recent windows are shortened, then whole sources are
    dropped.

    The largest source of the largest daemon goes first. So a daemon with much data does not displace other daemons.
    """

    def __init__(self) -> None:
        self.stores: list[Store] = []

    def hold(self) -> None:
        """Drop data until the memory is within every limit."""
        while sum(store.recent_bytes for store in self.stores) > MAX_RECENT_BYTES:
            max(self.stores, key=lambda store: store.recent_bytes).shorten_records()
        while sum(store.window_bytes for store in self.stores) > MAX_WINDOW_BYTES:
            max(self.stores, key=lambda store: store.window_bytes).shorten_window()
        while sum(store.size_bytes for store in self.stores) > MAX_BYTES:
            max(self.stores, key=lambda store: store.size_bytes).leave_out_largest()


class Store:
    """Applies a daemon's messages to its sources. Data of a source is ignored until its catalog has arrived."""

    def __init__(self, window_s: float = DEFAULT_WINDOW_S, budget: Budget | None = None) -> None:
        self.window_s = window_s
        self.sources: dict[str, SourceRecord] = {}
        self.left_out: dict[str, str] = {}  # the keys of dropped sources, each with the reason
        self.daemon: DaemonHello | None = None
        # the samples of devices, by the name of the sampler, in order of arrival
        self.devices: dict[str, SampledDevices] = {}
        self.heard_ns = 0  # time of the daemon's clock in its latest message
        self._total = AnnouncedTotal()
        self.size_bytes = 0
        self.window_bytes = 0
        # source -> (its size, the size of its recent window), in bytes
        self._sizes: dict[str, tuple[int, int]] = {}
        self._keeps_records = False
        # when the user's range began, on the daemon's clock; None without a range
        self._range_from_ns: int | None = None
        self._budget = budget or Budget()
        self._budget.stores.append(self)

    def apply(self, message: Message) -> None:
        """Apply one message.

        Raises VersionError if the daemon has a different major version, and DecodeError if the message contradicts
        itself. Without room for its source, drops the source and raises LimitError.
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
        """Drop the oldest slice of the largest recent window."""
        key = max(self._sizes, key=lambda key: self._sizes[key][1])
        self.sources[key].window.shorten()
        self._weigh(key)

    @property
    def recent_bytes(self) -> int:
        """Approximate memory in bytes of the newest single records."""
        return sum(record.recent.size_bytes for record in self.sources.values())

    def keep_records(self, on: bool) -> None:
        """Start or stop keeping the newest single records of every source."""
        self._keeps_records = on
        if not on:
            for key, record in self.sources.items():
                record.recent = RecentRecords()
                self._weigh(key)

    def forget_records(self) -> None:
        """Drop all stored single records. Count missing records from zero again."""
        for key, record in self.sources.items():
            record.recent.forget()
            self._weigh(key)

    def begin_range(self, length_s: float) -> None:
        """Restart windows, curves and records of every source, for a range of `length_s` seconds that begins now."""
        self.window_s = length_s
        now_ns = max([self.heard_ns, *(record.window.now_ns for record in self.sources.values())])
        self._range_from_ns = now_ns
        for key, record in self.sources.items():
            record.begin_range(now_ns, length_s)
            self._weigh(key)

    def shorten_records(self) -> None:
        """Drop half of the single records of the source that has the most."""
        key, record = max(self.sources.items(), key=lambda item: len(item[1].recent))
        record.recent.shorten(len(record.recent) // 2)
        self._weigh(key)

    def leave_out_largest(self) -> None:
        """Drop the source with the most memory."""
        self._leave_out(max(self._sizes, key=lambda key: self._sizes[key][0]), f"more than {MAX_BYTES >> 20} MiB")

    def complaint(self) -> str:
        """Return number, names and reasons of the dropped sources as one text, or ""."""
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
        if isinstance(message, CatalogMessage | Part):
            raise DecodeError(f"a {type(message).__name__} outside a catalog")
        match message:
            case DaemonHello():
                self._begin(message)
            case SourceCatalog():
                try:
                    self._catalog(message)
                finally:
                    # Even after an error, the first part of the message may be applied, so count the memory.
                    self._count(message.source)
            case SourceState():
                if message.source in self.sources:
                    self.sources[message.source].state = message
            case Heartbeat():
                self._beat(message)
            case StatsUpdate():
                if message.source in self.sources:
                    update_stats(self.sources[message.source], message)
                    self._count(message.source)
            case DeviceSample():
                self._sampled(message)
            case ClockReading() | HistoryPiece() | DaemonGoodbye():
                # The collector and the recorders handle these. After a daemon's goodbye, its data stays.
                pass
            case RecordBatch():
                self.sources[message.source].recent.take(message)
            case SourceGone():
                self._forget(message.source)
                self.left_out.pop(message.source, None)
            case _:
                assert_never(message)

    def _begin(self, hello: DaemonHello) -> None:
        """Drop all data. After its hello, a daemon sends snapshots of all its sources."""
        if hello.protocol_major != PROTOCOL_MAJOR:
            raise VersionError(
                f"the daemon (cbtop {hello.version}) speaks protocol {hello.protocol_major}."
                f"{hello.protocol_minor}, this viewer {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}: "
                "run the same cbtop on both sides"
            )
        self.daemon = hello
        self.sources.clear()
        self.devices.clear()
        self.heard_ns = hello.monotonic_ns
        self._total = AnnouncedTotal()

    def _beat(self, heartbeat: Heartbeat) -> None:
        """Store the states of the sources in a heartbeat.

        It adds a sample to the curves of each running source, even without new statistics.
        """
        self.heard_ns = heartbeat.monotonic_ns
        for state in heartbeat.sources:
            if isinstance(state, SourceState) and state.source in self.sources:
                record = self.sources[state.source]
                record.state = state
                if state.state is SourceStatus.LIVE and record.window.has_begun:
                    remember(record, heartbeat.monotonic_ns)

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
                # Messages with smaller node ids were lost. The next keyframe repeats all nodes.
                continue
            apply_announcement(record, said)
            if self._range_from_ns is None or not isinstance(said, HostHello):
                continue
            if not record.window.has_begun and said.monotonic_ns >= self._range_from_ns:
                # The process began within the user's range, so all of its work is in the range.
                record.window.tick(said.monotonic_ns, losses=Losses())
