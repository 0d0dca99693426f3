"""Sample the host's processors and memory, and what processes use of them, through the package psutil."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from cbtop.daemon.devices.base import MAX_APART_NS, TWO_SAMPLES, Figures, NotKnownError, Rates
from cbtop.daemon.devices.busy_processes import BusyProcesses, with_script
from cbtop.daemon.devices.container import ContainerLimits, Containers
from cbtop.daemon.devices.memory_history import MemoryHistory
from cbtop.protocol.device_messages import Device, DeviceProcess, DeviceSample, packed_memory
from cbtop.protocol.process import busiest_wait_ns, pid_namespace, process_start, processor_times
from cbtop.protocol.roofs import cpu_name
from cbtop.protocol.vocabulary import DeviceKind

MAX_PROCESSES = 512
# Fields of psutil's cpu_times without busy time. Guests are already in `user` and `nice`.
NO_WORK = ("idle", "iowait", "guest", "guest_nice")


class Cpu:
    """Samples all processors as one device. `api` is the module psutil (None: load it with the first sample).

    `busy` finds the processes that take the processors, and `containers` the limits of the requested processes.
    """

    name = "cpu"

    def __init__(
        self,
        api: Any = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        busy: BusyProcesses | None = None,
        containers: Containers | None = None,
    ) -> None:
        self._api = api
        self._busy = busy or BusyProcesses()
        self._containers = containers or Containers()
        self._clock_ns = clock_ns
        self._rates = Rates()
        self._model = ""
        # process (pid, start time) -> time of the last reading in ns, and CPU times of its threads
        self._times: dict[tuple[int, int], tuple[int, dict[str, tuple[int, int]]]] = {}
        self._next_times = dict(self._times)
        # process (pid, start time) -> the limits of its container in the previous sample
        self._limits: dict[tuple[int, int], ContainerLimits] = {}
        self._next_limits = dict(self._limits)
        self._memory = MemoryHistory()

    def sample(self, pids: Collection[int]) -> DeviceSample:
        """Return a sample of the host, the running processes among `pids`, and the processes that are busiest."""
        begun_ns = self._clock_ns()
        if self._api is None:
            try:
                self._api = importlib.import_module("psutil")
            except ImportError:
                return DeviceSample(self.name, begun_ns, trouble="psutil is not installed: the host cannot be asked")
        api, told = self._api, Figures(lambda error: str(error) or type(error).__name__)
        self._model = self._model or f"{api.cpu_count() or 'n/a'} × {cpu_name()}"
        told.ask("utilization_percent", self._busy_percent)
        told.ask("memory_used_bytes memory_total_bytes", lambda: _memory(api.virtual_memory()))
        told.ask("clock_mhz clock_max_mhz", lambda: _clocks(api.cpu_freq()))
        self._next_times, self._next_limits = {}, {}
        self._containers.begin()
        processes = [found for pid in sorted(pids)[:MAX_PROCESSES] if (found := self._process(pid)) is not None]
        self._times, self._limits = self._next_times, self._next_limits
        if any(found.utilization_percent is None for found in processes):
            told.is_unknown("cpu_percent", TWO_SAMPLES)
        processes += [found for found in self._busy.busiest() if found.pid not in pids]
        device = Device(
            "cpu", DeviceKind.CPU, 0, self._model, processes=tuple(processes), unknown=told.unknown, **told.known
        )
        return DeviceSample(self.name, begun_ns, pid_namespace=pid_namespace(), devices=(device,))

    def close(self) -> None:
        """Do nothing, because this sampler opens nothing."""

    def _busy_percent(self) -> float:
        """Return how busy all processors were since the previous sample, in percent.

        The time between is the processors' total time, with idle time.
        """
        times = self._api.cpu_times()._asdict()
        busy_s = sum(time_s for name, time_s in times.items() if name not in NO_WORK)
        all_s = busy_s + times.get("idle", 0.0) + times.get("iowait", 0.0)
        passed_ns = round(all_s / (self._api.cpu_count() or 1) * 1e9)
        return min(100.0, 100 * self._rates.per_second(("busy",), passed_ns, busy_s) / (self._api.cpu_count() or 1))

    def _process(self, pid: int) -> DeviceProcess | None:
        """Return a process's use of the host. None if it has ended or is not readable."""
        start = process_start(pid)
        if start is None:
            return None
        try:
            process = self._api.Process(pid)
            with process.oneshot():
                name, memory, times = process.name(), process.memory_info(), process.cpu_times()
        except self._api.Error:
            return None
        percent: float | None = None
        with suppress(NotKnownError):
            worked_s = times.user + times.system
            percent = 100 * self._rates.per_second((pid, start), self._clock_ns(), worked_s)
        arguments: list[str] = []
        with suppress(self._api.Error):  # The command line may be hidden, although the figures are not.
            arguments = process.cmdline()[1:]
        limits = self._containers.limits(pid)
        shared = getattr(memory, "shared", None)  # only Linux reports it
        private = None if shared is None else float(max(0, memory.rss - shared))
        return DeviceProcess(
            pid, start, with_script(name, arguments), float(memory.rss), percent, self._waiting_percent(pid, start),
            limits.cpu_percent, limits.memory_bytes, self._throttled_percent(pid, start, limits), private,
            b"" if private is None else packed_memory(self._memory.take((pid, start), self._clock_ns(), private)),
        )  # fmt: skip

    def _throttled_percent(self, pid: int, start: int, limits: ContainerLimits) -> float | None:
        """Return in how many percent of the scheduler's periods the container had no processor time left.

        With several control groups around the process, it is the share of the group that was throttled most.
        """
        before = self._limits.get((pid, start))
        self._next_limits[pid, start] = limits
        if before is None:
            return None
        known = {group: counts for group, *counts in before.throttling}
        shares = [
            100 * (throttled - known[group][1]) / max(1, periods - known[group][0])
            for group, periods, throttled in limits.throttling
            if group in known
        ]
        return min(100.0, max(0.0, *shares)) if shares else None

    def _waiting_percent(self, pid: int, start: int) -> float | None:
        """Return how many percent of the time a process's busiest thread waited for a processor. None if unknown."""
        now_ns, times = self._clock_ns(), processor_times(pid)
        before_ns, before = self._times.get((pid, start), (now_ns, {}))
        self._next_times[pid, start] = now_ns, times
        waited_ns = busiest_wait_ns(before, times)
        if waited_ns is None or not 0 < now_ns - before_ns <= MAX_APART_NS:
            return None
        return min(100.0, max(0.0, 100 * waited_ns / (now_ns - before_ns)))


def _memory(found: Any) -> tuple[float, float]:
    """Return the host's memory in bytes, as (in use, total). Memory is in use if a new process cannot have it."""
    return found.total - found.available, found.total


def _clocks(found: Any) -> tuple[float | NotKnownError, float | NotKnownError]:
    """Return the current and the maximum clock of the processors in MHz. In psutil, 0 means unknown."""
    current, highest = (found.current, found.max) if found else (0.0, 0.0)
    unsaid = NotKnownError("the system does not say")
    return current or unsaid, highest or unsaid
