"""The devices of a daemon's machine and the processes on them, from the newest samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cbtop.client.sampled_devices import DeviceMoment, ProcessMoment, SampledDevices
from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.protocol.device_messages import Device, DeviceProcess
from cbtop.protocol.vocabulary import DeviceKind, SourceStatus

STALE_AFTER_S = 3.0  # A sample is old after this many seconds. One is taken every second.
# At most the newest LATEST samples are used (one a second), and at least LEAST_SAMPLES are needed.
LATEST, LEAST_SAMPLES = 10, 3
# At most this many processes without a GPU that are not profiled, if they take at least this much of one processor.
MAX_BUSY, LEAST_BUSY_PERCENT = 10, 1.0


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One device (GPU or CPU) as a row. `label` is the number of a GPU or MIG device, such as `0` or `0:1`."""

    device: Device
    label: str
    sampler: str
    age_s: float
    history: tuple[DeviceMoment, ...]  # samples of the device in the last two minutes, oldest first

    @property
    def busy_percent(self) -> tuple[float | None, ...]:
        """Load of the device in percent in each sample of the last two minutes. None: not available."""
        return tuple(moment.busy_percent for moment in self.history)

    @property
    def watts(self) -> float | None:
        """Mean power of the device, or without a mean the driver's momentary value."""
        mean = self.device.power_watts
        return self.device.power_reading_watts if mean is None else mean

    @property
    def is_stale(self) -> bool:
        """Whether the device's figures are old, because the sampler does not answer."""
        return self.age_s > STALE_AFTER_S


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """A process on a device, or on none. None means that a figure is not available."""

    pid: int
    name: str
    source: str | None  # key of the process's source; None if the process is not profiled
    device: str  # label of the GPU that the process uses, or "" if it uses none
    device_uuid: str
    gpu_memory_bytes: float | None = None
    gpu_utilization_percent: float | None = None
    cpu_percent: float | None = None
    waiting_percent: float | None = None
    resident_bytes: float | None = None
    # limits of the process's container, or None without one
    cpu_limit_percent: float | None = None
    memory_limit_bytes: float | None = None
    throttled_percent: float | None = None
    private_bytes: float | None = None
    history: tuple[ProcessMoment, ...] = ()  # samples of the process in the last two minutes, oldest first


@dataclass(frozen=True, slots=True)
class WhyView:
    """Why figures are not available, and which figures and devices this is about."""

    figures: tuple[str, ...]  # JSON keys of the figures that are not available
    devices: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class MachineView:
    """The machine that a daemon runs on, with its devices and processes."""

    daemon: str  # key of the daemon: host, boot id and pid
    host: str
    devices: tuple[DeviceRow, ...]
    # processes on the machine: first profiled ones, then others on GPUs or processors, both with the busiest first
    processes: tuple[ProcessRow, ...]
    unknown: tuple[WhyView, ...]
    elsewhere: tuple[str, ...]  # keys of profiled processes in other pid namespaces, which the samplers cannot see
    troubles: tuple[str, ...]  # texts about samplers without a result, each with the reason: `nvml: reason`

    @property
    def gpus(self) -> tuple[DeviceRow, ...]:
        """The GPUs and MIG devices of the machine."""
        return tuple(row for row in self.devices if row.device.kind is not DeviceKind.CPU)

    def gpus_of(self, source: str) -> tuple[DeviceRow, ...]:
        """Return the GPUs that the process of `source` is known to use."""
        on = {process.device_uuid for process in self.processes if process.source == source}
        return tuple(row for row in self.gpus if row.device.uuid in on)


def machine_view(store: Store, stale_s: float | None = None) -> MachineView:
    """Return the machine of the daemon that sends its data to `store`.

    `stale_s` are the seconds since its last message. None if the daemon is not silent.
    """
    rows: list[DeviceRow] = []
    troubles: list[str] = []
    for sampler, known in store.devices.items():
        age_s = max(0, store.heard_ns - known.newest.monotonic_ns) / 1e9 + (stale_s or 0.0)
        if known.newest.trouble:
            troubles.append(f"{sampler}: {known.newest.trouble}")
        rows += _rows(sampler, known, age_s)
    daemon, elsewhere = store.daemon, _elsewhere(store)
    return MachineView(
        daemon=f"{daemon.host}:{daemon.boot_id}:{daemon.pid}" if daemon else "",
        host=daemon.host if daemon else "",
        devices=tuple(rows),
        processes=_processes(store, rows),
        unknown=tuple(_why(rows, len(elsewhere) if rows else 0)),
        elsewhere=elsewhere,
        troubles=tuple(troubles),
    )


def _rows(sampler: str, known: SampledDevices, age_s: float) -> Iterable[DeviceRow]:
    labels: dict[str, str] = {}
    for device in known.newest.devices:
        label = "cpu" if device.kind is DeviceKind.CPU else str(device.index)
        labels[device.uuid] = label = f"{labels.get(device.part_of, '?')}:{label}" if device.part_of else label
        yield DeviceRow(device, label, sampler, age_s, tuple(known.history.get(device.uuid, ())))


def _processes(store: Store, rows: Iterable[DeviceRow]) -> tuple[ProcessRow, ...]:
    """Return a row for each process on each GPU, and for each profiled or busy process without a GPU. Pid and start
    time identify a process.
    """
    sources = {
        (record.hello.pid, record.hello.process_start): record.key
        for record in store.sources.values()
        if record.hello and record.hello.pid_namespace in _namespaces(store)
    }
    on_host: dict[tuple[int, int], DeviceProcess] = {}
    found: list[tuple[DeviceRow | None, DeviceProcess]] = []
    for row in rows:
        for process in row.device.processes:
            if row.device.kind is DeviceKind.CPU:
                on_host[process.pid, process.process_start] = process
            else:
                found.append((row, process))
    on_gpus = {(process.pid, process.process_start) for _, process in found}
    busy = sorted(
        (process.utilization_percent or 0.0, key) for key, process in on_host.items() if key not in sources
    )[-MAX_BUSY:]
    shown = sources.keys() | {key for percent, key in busy if percent >= LEAST_BUSY_PERCENT}
    found += [(None, process) for key, process in on_host.items() if key in shown and key not in on_gpus]
    made = [_process(row, process, sources, on_host, _history(store, process)) for row, process in found]
    return tuple(sorted(made, key=_order))


def _history(store: Store, process: DeviceProcess) -> tuple[ProcessMoment, ...]:
    """Return the recent moments of a process. Only shown processes are copied, because this runs for each frame, and
    the daemon samples every busy process of the machine.
    """
    key = process.pid, process.process_start
    known = [one.of_processes[key] for one in store.devices.values() if key in one.of_processes]
    return tuple(known[-1]) if known else ()


def _order(row: ProcessRow) -> tuple[bool, float, int, str]:
    busy_percent = 0.0 if row.source else row.cpu_percent or 0.0
    return row.source is None, -busy_percent, row.pid, row.device


def waiting_percent(store: Store, record: SourceRecord) -> float | None:
    """Return how many percent of the recent time the busiest thread waited for a processor. None if unknown."""
    if record.hello is None or record.hello.pid_namespace not in _namespaces(store):
        return None
    key = record.hello.pid, record.hello.process_start
    moments = [one for known in store.devices.values() for one in known.of_processes.get(key, ())][-LATEST:]
    waited = [one.waiting_percent for one in moments if one.waiting_percent is not None]
    # A sample covers one second, so the mean over samples is the share of the whole time.
    return sum(waited) / len(waited) if waited else None


def _namespaces(store: Store) -> set[int | None]:
    """Return the pid namespaces of the daemon's samplers."""
    return {known.newest.pid_namespace for known in store.devices.values() if known.newest.devices}


def _elsewhere(store: Store) -> tuple[str, ...]:
    """Return the keys of running sources in other pid namespaces. The daemon cannot find their processes by pid."""
    spaces = _namespaces(store)
    return tuple(
        record.key
        for record in store.sources.values()
        if record.hello
        and record.hello.pid_namespace not in spaces
        and (record.state is None or record.state.state is SourceStatus.LIVE)
    )


def _process(
    row: DeviceRow | None,
    process: DeviceProcess,
    sources: dict[tuple[int, int], str],
    on_host: dict[tuple[int, int], DeviceProcess],
    history: tuple[ProcessMoment, ...],
) -> ProcessRow:
    key = process.pid, process.process_start
    host = on_host.get(key)
    return ProcessRow(
        pid=process.pid,
        name=process.name or (host.name if host else ""),
        source=sources.get(key),
        device=row.label if row else "",
        device_uuid=row.device.uuid if row else "",
        gpu_memory_bytes=process.memory_bytes if row else None,
        gpu_utilization_percent=process.utilization_percent if row else None,
        cpu_percent=host.utilization_percent if host else None,
        waiting_percent=host.waiting_percent if host else None,
        resident_bytes=host.memory_bytes if host else None,
        cpu_limit_percent=host.cpu_limit_percent if host else None,
        memory_limit_bytes=host.memory_limit_bytes if host else None,
        throttled_percent=host.throttled_percent if host else None,
        private_bytes=host.private_bytes if host else None,
        history=history,
    )


def _why(rows: Iterable[DeviceRow], elsewhere: int) -> Iterable[WhyView]:
    """Yield each reason for missing figures once, with all figures and devices that it explains."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in rows:
        reasons: dict[str, list[str]] = {}
        for unknown in row.device.unknown:
            reasons.setdefault(unknown.why, []).append(unknown.figure)
        for why, figures in reasons.items():
            found.setdefault((why, tuple(figures)), []).append(row.label)
    for (why, names), labels in found.items():
        yield WhyView(names, tuple(labels), why)
    if elsewhere:
        what = "a profiled process is" if elsewhere == 1 else f"{elsewhere} profiled processes are"
        yield WhyView(("processes",), (), f"{what} in another pid namespace than the daemon")
