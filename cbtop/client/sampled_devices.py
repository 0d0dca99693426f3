"""Keep a daemon's samples of devices and processes of the last two minutes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from cbtop.client.source_record import HISTORY_S
from cbtop.protocol.device_messages import DeviceProcess, DeviceSample
from cbtop.protocol.vocabulary import DeviceKind

MAX_FOLLOWED = 64  # A sampler's history has at most this many processes.
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class DeviceMoment(NamedTuple):
    """The figures of a GPU or CPU in one sample. None: not available."""

    busy_percent: float | None
    memory_bytes: float | None
    # Mean power in watts (see DeviceRow.watts), or without a mean the momentary power.
    watts: float | None
    clock_mhz: float | None
    celsius: float | None


class ProcessMoment(NamedTuple):
    """The CPU and memory of one process in one sample. None: not available."""

    cpu_percent: float | None
    resident_bytes: float | None
    # share of time that the busiest thread waited for a processor
    waiting_percent: float | None = None


class MemorySample(NamedTuple):
    """The memory of a process at several moments, as in DeviceProcess, in a sample at `monotonic_ns`."""

    monotonic_ns: int
    history_bytes: tuple[int, ...]


@dataclass(slots=True)
class SampledDevices:
    """The newest sample of one of the daemon's samplers, and its samples of the last two minutes, oldest first."""

    newest: DeviceSample
    # the samples of each device, by the device's uuid
    history: dict[str, deque[DeviceMoment]] = field(default_factory=dict)
    # the samples of each process, by (pid, start time)
    of_processes: dict[tuple[int, int], deque[ProcessMoment]] = field(default_factory=dict)
    # the newest history of each process's memory, by (uuid of the device, pid, start time)
    memory: dict[tuple[str, int, int], MemorySample] = field(default_factory=dict)

    def take(self, sample: DeviceSample) -> None:
        """Store `sample` as its sampler's newest, and add it to the history. A keyframe may repeat an earlier sample,
        which is not added.
        """
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
            self._take_memory(sample)
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

    def _take_memory(self, sample: DeviceSample) -> None:
        for device in sample.devices:
            for process in device.processes:
                if process.memory_history:
                    key = device.uuid, *_who(process)
                    self.memory.pop(key, None)
                    self.memory[key] = MemorySample(sample.monotonic_ns, process.memory_points)
        while len(self.memory) > MAX_FOLLOWED:
            del self.memory[next(iter(self.memory))]


def _kept(histories: dict[KeyT, deque[ValueT]], key: KeyT) -> deque[ValueT]:
    return histories.get(key) or deque(maxlen=HISTORY_S)


def _who(process: DeviceProcess) -> tuple[int, int]:
    return process.pid, process.process_start
