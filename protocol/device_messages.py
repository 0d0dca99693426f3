"""The messages about devices: a sample of each, the processes on it, and the figures that are not known."""

from __future__ import annotations

from dataclasses import dataclass, fields

from cbtop.protocol.attributes import MAX_QUANTITY
from cbtop.protocol.vocabulary import DeviceKind


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why a figure of a device, or of processes on it, is n/a."""

    figure: str
    why: str


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on a device. `memory_bytes` is memory of the GPU, or on the host's processors resident memory.

    `utilization_percent` is, on a GPU, the share of time in which its SMs ran the process; on the host, 100 is one
    processor. `process_start` is as in HostHello, 0 if not known. `waiting_percent` is the share of time in which its
    busiest thread could run and had no processor, as the kernel counts it.
    """

    pid: int
    process_start: int = 0
    name: str = ""
    memory_bytes: float | None = None
    utilization_percent: float | None = None
    waiting_percent: float | None = None

    def __post_init__(self) -> None:
        _check_figures(self)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, a MIG device in one (`part_of`, its uuid) or the processors of a host, with its latest figures.

    A figure that is None is n/a, and `unknown` tells why; if the whole device does not answer, `trouble` does.
    `utilization_percent` is the share of time in which any kernel ran on the device, or the busy share of all
    processors' time. NVLink rates and the utilisation of processors are means since the previous sample,
    `power_watts` is a mean of three seconds; `power_reading_watts` and PCIe are the driver's momentary readings.
    `slowed_by` names the reason for reduced clocks.
    """

    uuid: str
    kind: DeviceKind
    index: int
    name: str
    part_of: str = ""
    trouble: str = ""
    utilization_percent: float | None = None
    memory_utilization_percent: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_watts: float | None = None
    power_reading_watts: float | None = None
    power_limit_watts: float | None = None
    clock_mhz: float | None = None  # of a GPU's SMs
    clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    memory_clock_max_mhz: float | None = None
    temperature_celsius: float | None = None
    slowed_by: str | None = None
    pcie_sent_bytes_per_sec: float | None = None
    pcie_received_bytes_per_sec: float | None = None
    nvlink_sent_bytes_per_sec: float | None = None
    nvlink_received_bytes_per_sec: float | None = None
    processes: tuple[DeviceProcess, ...] = ()
    unknown: tuple[Unknown, ...] = ()

    def __post_init__(self) -> None:
        _check_figures(self)


def _check_figures(told: Device | DeviceProcess) -> None:
    for field in fields(told):
        value = getattr(told, field.name)
        if type(value) is float and not 0 <= value < MAX_QUANTITY:
            raise ValueError(f"{field.name} is {value}; a finite value from zero on is wanted")


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """The devices that one of the daemon's samplers found at `monotonic_ns`; it replaces its previous sample.

    If it found nothing `trouble` tells why. `pid_namespace` is the namespace of its pids (None: not known).
    """

    sampler: str
    monotonic_ns: int
    trouble: str = ""
    pid_namespace: int | None = None
    devices: tuple[Device, ...] = ()
