"""The messages about devices (GPUs and processors): their samples, the processes on them, and why a figure is
missing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields

from cbtop.protocol.attributes import MAX_QUANTITY
from cbtop.protocol.vocabulary import DeviceKind

# The history of a process's memory covers a quarter of an hour. It stores the lowest value in each range of this many
# ns.
MEMORY_POINT_NS = 20_000_000_000
MAX_MEMORY_POINTS = 45


@dataclass(frozen=True, slots=True)
class Unknown:
    """The reason why a figure of a device, or of processes on it, is not available."""

    figure: str
    why: str


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on a device.

    - `memory_bytes` is GPU memory, or resident memory if the device is the host's processors.
    - `utilization_percent`: on a GPU, the share of time that the SMs ran the process. On the host's processors, 100
      means one whole processor.
    - `process_start` is as in HostHello, or 0 if unknown.
    - `waiting_percent`: the share of time in which the busiest thread was ready to run but had no processor, as
      counted by the kernel.
    - `cpu_limit_percent` and `memory_limit_bytes` are the limits of the container (control group) around the process.
      None means no limit. `throttled_percent` is the share of the scheduler's periods without processor time left for
      the container.
    - `private_bytes` is the part of resident memory that is in no file and not shared: without the pages of memory
      maps, which the kernel takes back when it needs them.
    - `memory_history` has the least memory in each range of MEMORY_POINT_NS, oldest first, packed by `packed_memory`.
      The last range ended at the last multiple of MEMORY_POINT_NS. The memory is `private_bytes` on the host, and
      `memory_bytes` on a GPU.
    """

    pid: int
    process_start: int = 0
    name: str = ""
    memory_bytes: float | None = None
    utilization_percent: float | None = None
    waiting_percent: float | None = None
    cpu_limit_percent: float | None = None
    memory_limit_bytes: float | None = None
    throttled_percent: float | None = None
    private_bytes: float | None = None
    memory_history: bytes = b""

    def __post_init__(self) -> None:
        _check_figures(self)
        size = len(self.memory_history)
        if size % 8 or size > 8 * MAX_MEMORY_POINTS or any(not 0 <= one < MAX_QUANTITY for one in self.memory_points):
            raise ValueError(f"{size / 8:g} sizes of memory; expected up to {MAX_MEMORY_POINTS}, from zero on")

    @property
    def memory_points(self) -> tuple[int, ...]:
        """The sizes in `memory_history`, in bytes."""
        return struct.unpack(f"<{len(self.memory_history) // 8}q", self.memory_history)


def packed_memory(sizes: Iterable[int]) -> bytes:
    """Return sizes of memory, in bytes, as a column of 64-bit integers."""
    each = tuple(sizes)
    return struct.pack(f"<{len(each)}q", *each)


@dataclass(frozen=True, slots=True)
class Device:
    """The newest figures of one device: a GPU, a MIG device (`part_of` is the uuid of its GPU), or the processors of
    a host.

    A figure that is not available is None, and `unknown` contains the reason. If the whole device does not answer,
    `trouble` contains the reason.

    - `utilization_percent` is the share of time that any kernel ran on the device, or the busy share of all
      processors' time.
    - NVLink rates and the utilization of processors are means since the previous sample.
    - `power_watts` is a mean of three seconds. `power_reading_watts` and the PCIe rates are momentary readings of the
      driver.
    - `slowed_by` is the reason for reduced clocks.
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
    clock_mhz: float | None = None  # clock of a GPU's SMs
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
    """The devices that one of the daemon's samplers found at `monotonic_ns`.

    A sample replaces the sampler's previous one. If the sampler found no device, `trouble` is the reason.
    `pid_namespace` is the namespace of the sampled pids, or None if unknown.
    """

    sampler: str
    monotonic_ns: int
    trouble: str = ""
    pid_namespace: int | None = None
    devices: tuple[Device, ...] = ()
