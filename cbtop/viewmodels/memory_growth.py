"""Find memory of a process that grows steadily over minutes, on the host or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev

from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.protocol.device_messages import MEMORY_POINT_NS, Device
from cbtop.protocol.vocabulary import DeviceKind
from cbtop.viewmodels.time_range import steady_since_ns

# The time is divided into this many equal parts. The memory must grow in each of them, and about equally.
PARTS = 5
LEAST_POINTS = 2 * PARTS + 1  # of 20 s each: 3 min 20 s
# 97.5 % quantile of Student's t distribution with PARTS - 1 degrees of freedom, for an interval of 95 %.
STUDENT_T = 2.776
# The interval of the rate extends at most this share of the rate to either side. The last part has at least this
# share of the mean rate. A cache that fills up grows ever more slowly, and an allocator grows in one step.
STEADY = 0.5
# Within the shown time, the memory must grow by this share of its first size, and by this many bytes.
LEAST_SHARE, LEAST_BYTES = 0.01, 16 << 20


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """The steady growth of a process's memory: the mean rate with its 95 % interval, in bytes per second.

    `gpu` is the label of the GPU, or "" for memory of the host that is in no file and not shared. `free_bytes` is the
    free memory of the device (None: unknown).
    """

    gpu: str
    covers_s: float
    first_bytes: float
    last_bytes: float
    rate: float
    low_rate: float
    high_rate: float
    free_bytes: float | None = None

    @property
    def fills_in_s(self) -> tuple[float, float] | None:
        """The earliest and the latest time in seconds at which the device would have no memory left."""
        free = self.free_bytes
        return None if free is None else (free / self.high_rate, free / self.low_rate)


def memory_growths(store: Store, record: SourceRecord) -> tuple[MemoryGrowth, ...]:
    """Return the memory of a process that has grown steadily since its warm-up: first memory of the host, then memory
    of GPUs.
    """
    hello, since_ns = record.hello, steady_since_ns(record)
    if hello is None or since_ns is None:
        return ()
    found = []
    for known in store.devices.values():
        if known.newest.pid_namespace != hello.pid_namespace:
            continue
        devices = {device.uuid: device for device in known.newest.devices}
        for (uuid, pid, start), sample in known.memory.items():
            device = devices.get(uuid)
            if (pid, start) != (hello.pid, hello.process_start) or device is None:
                continue
            # The newest point is the least memory of the 20 s before this moment.
            ended_ns = sample.monotonic_ns // MEMORY_POINT_NS * MEMORY_POINT_NS
            steady = max(0, (ended_ns - since_ns) // MEMORY_POINT_NS)
            growth = growth_in(sample.history_bytes[-steady:] if steady else ())
            if growth is not None:
                found.append(_on(device, growth))
    return tuple(sorted(found, key=lambda one: one.gpu))


def growth_in(history_bytes: Sequence[int]) -> MemoryGrowth | None:
    """Return the growth of memory with a value for each 20 s, oldest first. None if it does not grow steadily."""
    intervals = len(history_bytes) - 1
    if intervals + 1 < LEAST_POINTS:
        return None
    point_s = MEMORY_POINT_NS / 1e9
    borders = [round(part * intervals / PARTS) for part in range(PARTS + 1)]
    rates = [
        (history_bytes[end] - history_bytes[begin]) / ((end - begin) * point_s) for begin, end in pairwise(borders)
    ]
    rate, half = fmean(rates), STUDENT_T * stdev(rates) / sqrt(PARTS)
    first, last = history_bytes[0], history_bytes[-1]
    if last - first < max(LEAST_BYTES, LEAST_SHARE * first) or half > STEADY * rate or rates[-1] < STEADY * rate:
        return None
    return MemoryGrowth("", intervals * point_s, first, last, rate, rate - half, rate + half)


def _on(device: Device, growth: MemoryGrowth) -> MemoryGrowth:
    used, total = device.memory_used_bytes, device.memory_total_bytes
    free = None if used is None or total is None else max(0.0, total - used)
    gpu = "" if device.kind is DeviceKind.CPU else f"GPU {device.index}"
    return MemoryGrowth(
        gpu, growth.covers_s, growth.first_bytes, growth.last_bytes, growth.rate, growth.low_rate,
        growth.high_rate, free,
    )  # fmt: skip
