"""Sample NVIDIA GPUs and MIG devices with NVML (libnvidia-ml, which comes with the driver)."""

# Rules
# - A card, MIG device or container may reject any call of NVML as unsupported, so each figure is queried by itself.
# - Handles are requested for every sample (4 µs), so that a lost GPU is sampled again when it returns.
# - If a forked child calls NVML, its parent gets "Unknown Error" until it opens NVML again (driver 580). So nothing
#   here runs at exit or in a child.
# - Sampling a GPU takes 52 ms, with 11 ms of processor time (H100, driver 580). The two calls for PCIe take 42 ms,
#   because each waits for 20 ms. Byte counters for PCIe exist, but with only 32 bits.

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from cbtop.daemon.devices.base import Figures, NotKnownError, Rates
from cbtop.daemon.devices.memory_history import MemoryHistory
from cbtop.protocol.device_messages import Device, DeviceProcess, DeviceSample, packed_memory
from cbtop.protocol.process import pid_namespace, process_start
from cbtop.protocol.vocabulary import DeviceKind

MAX_GPUS = 64
# At most this many processes per device in a sample. The processes with the most memory are chosen.
MAX_PROCESSES = 64
# The kernel's number of the pid namespace outside of all containers (PROC_PID_INIT_INO).
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
ALL_LINKS = 0xFFFFFFFF  # In an NVLink query: the sum over all links.
# The driver updates its energy counter every 100 ms. Over one second, a mean power may be wrong by a tenth, so use a
# longer time.
ENERGY_OVER_NS = 3_000_000_000
NO_PERCENT_ABOVE = 100
OTHER_NAMESPACE = "the driver gives pids of another pid namespace: whose they are here is not known"

# For each bit in the result of nvmlDeviceGetCurrentClocksEventReasons: the reason for a lower clock.
SLOWED_BY = {
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "heat (software)",
    0x040: "heat (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}
IDLE = 0x001  # This bit means that the device is idle. Then it is not reported as slowed down.


class LostError(Exception):
    """One or all GPUs have stopped answering. The message has the reason."""


class Nvml:
    """Samples every GPU. `api` is the module pynvml (package nvidia-ml-py), or None: load it when sampling."""

    name = "nvml"

    def __init__(self, api: Any = None, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._api = api
        self._clock_ns = clock_ns
        self._is_open = False
        self._rates = Rates()
        self._memory = MemoryHistory()
        self._known: dict[int, tuple[str, str]] = {}  # index of a GPU that has answered -> its uuid and name
        # the driver's time (µs) of the newest sample of the processes' GPU use, by the GPU's uuid
        self._seen_us: dict[str, int] = {}

    def sample(self, pids: Collection[int]) -> DeviceSample:
        """Return a sample of all GPUs and MIG devices, with their processes. Without a GPU, it has the reason."""
        begun_ns = self._clock_ns()
        try:
            count = self._open()
            devices = [device for index in range(min(count, MAX_GPUS)) for device in self._gpu(index)]
        except LostError as error:
            self.close()  # Close NVML. The next sample opens it again.
            return DeviceSample(self.name, begun_ns, trouble=str(error))
        if count == 0:
            return DeviceSample(self.name, begun_ns, trouble="the NVIDIA driver finds no GPU")
        if all(device.trouble for device in devices):
            # No device answers, whatever the error is. The next sample opens NVML again.
            self.close()
        return DeviceSample(self.name, begun_ns, pid_namespace=pid_namespace(), devices=tuple(devices))

    def driver(self) -> str:
        """Return the driver's version as text. Call it after a sample that found devices."""
        told = Figures(_words)
        told.ask("driver", self._api.nvmlSystemGetDriverVersion)
        return f"driver {told.known.get('driver', 'n/a')}"

    def close(self) -> None:
        """Shut NVML down."""
        if self._is_open:
            self._is_open = False
            # Shutting down fails if the driver has disappeared, so ignore this error.
            with suppress(self._api.NVMLError):
                self._api.nvmlShutdown()

    def _open(self) -> int:
        """Open NVML if it is not open. Returns the number of GPUs. Raises LostError if NVML cannot be used."""
        if self._api is None:
            try:
                self._api = importlib.import_module("pynvml")
            except ImportError as error:
                raise LostError("nvidia-ml-py is not installed: no NVIDIA GPU can be asked") from error
        try:
            if not self._is_open:
                self._api.nvmlInit()
                self._is_open = True
            return int(self._api.nvmlDeviceGetCount())
        except Exception as error:
            raise LostError(self._no_nvml(error)) from error

    def _no_nvml(self, error: Exception) -> str:
        api, code = self._api, getattr(error, "value", None)
        if code in (api.NVML_ERROR_LIBRARY_NOT_FOUND, api.NVML_ERROR_DRIVER_NOT_LOADED):
            return f"no NVIDIA driver is loaded here ({_words(error)})"
        if code == api.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            return f"the NVIDIA driver was changed: start the daemon anew ({_words(error)})"
        return f"NVML cannot be used: {_words(error)}"

    def _reason(self, error: Exception) -> str:
        """Return why one figure is not available. Raises LostError if the GPU does not answer at all."""
        api, code = self._api, getattr(error, "value", None)
        if code in (api.NVML_ERROR_GPU_IS_LOST, api.NVML_ERROR_RESET_REQUIRED, api.NVML_ERROR_UNINITIALIZED):
            raise LostError(_words(error)) from error
        return _words(error)

    def _gpu(self, index: int) -> Iterator[Device]:
        """Yield the GPU at `index`, then its MIG devices. Raises LostError if no GPU answers."""
        api = self._api
        try:
            handle = api.nvmlDeviceGetHandleByIndex(index)
            self._known[index] = api.nvmlDeviceGetUUID(handle), api.nvmlDeviceGetName(handle)
            uuid, name = self._known[index]
            has_mig = self._has_mig(handle)
            yield self._device(handle, uuid, DeviceKind.GPU, index, name, has_mig=has_mig)
        except Exception as error:
            if getattr(error, "value", None) == api.NVML_ERROR_UNINITIALIZED:
                raise LostError(_words(error)) from error
            uuid, name = self._known.get(index, (f"GPU {index}", "GPU"))
            yield Device(uuid, DeviceKind.GPU, index, name, trouble=f"it does not answer: {_words(error)}")
            return
        if has_mig:
            yield from self._mig_devices(handle, uuid)

    def _has_mig(self, handle: Any) -> bool:
        try:
            return bool(self._api.nvmlDeviceGetMigMode(handle)[0] == self._api.NVML_DEVICE_MIG_ENABLE)
        except self._api.NVMLError as error:
            self._reason(error)
            return False

    def _mig_devices(self, gpu: Any, gpu_uuid: str) -> Iterator[Device]:
        api = self._api
        try:
            most = api.nvmlDeviceGetMaxMigDeviceCount(gpu)
        except api.NVMLError:
            return
        for index in range(most):
            try:
                handle = api.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
                uuid, name = api.nvmlDeviceGetUUID(handle), api.nvmlDeviceGetName(handle)
                yield self._device(handle, uuid, DeviceKind.MIG, index, name, part_of=gpu_uuid)
            except (api.NVMLError, LostError) as error:
                # "not found": this index has no MIG device.
                if getattr(error, "value", None) != api.NVML_ERROR_NOT_FOUND:
                    place = f"{gpu_uuid}/{index}"
                    yield Device(place, DeviceKind.MIG, index, "MIG", gpu_uuid, trouble=_words(error))

    def _device(
        self, handle: Any, uuid: str, kind: DeviceKind, index: int, name: str, *, part_of: str = "",
        has_mig: bool = False,
    ) -> Device:  # fmt: skip
        api, told = self._api, Figures(self._reason)

        def percents() -> tuple[float, float]:
            rates = api.nvmlDeviceGetUtilizationRates(handle)
            return _percent(rates.gpu), _percent(rates.memory)

        def memory() -> tuple[float, float]:
            try:  # Version 2 of the query leaves out memory that the driver reserves, as nvidia-smi does.
                found = api.nvmlDeviceGetMemoryInfo(handle, version=api.nvmlMemory_v2)
            except (api.NVMLError, TypeError):
                found = api.nvmlDeviceGetMemoryInfo(handle)
            return found.used, found.total

        told.ask("utilization_percent memory_utilization_percent", percents)
        told.ask("memory_used_bytes memory_total_bytes", memory)
        told.ask("power_watts", lambda: self._mean_watts(handle, uuid))
        told.ask("power_reading_watts", lambda: api.nvmlDeviceGetPowerUsage(handle) / 1e3)
        told.ask("power_limit_watts", lambda: api.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3)
        told.ask("clock_mhz", lambda: api.nvmlDeviceGetClockInfo(handle, api.NVML_CLOCK_SM))
        told.ask("clock_max_mhz", lambda: api.nvmlDeviceGetMaxClockInfo(handle, api.NVML_CLOCK_SM))
        told.ask("memory_clock_mhz", lambda: api.nvmlDeviceGetClockInfo(handle, api.NVML_CLOCK_MEM))
        told.ask("memory_clock_max_mhz", lambda: api.nvmlDeviceGetMaxClockInfo(handle, api.NVML_CLOCK_MEM))
        told.ask("temperature_celsius", lambda: api.nvmlDeviceGetTemperature(handle, api.NVML_TEMPERATURE_GPU))
        told.ask("slowed_by", lambda: _slowed_by(api.nvmlDeviceGetCurrentClocksEventReasons(handle)))
        told.ask("pcie_sent_bytes_per_sec", lambda: self._pcie(handle, api.NVML_PCIE_UTIL_TX_BYTES))
        told.ask("pcie_received_bytes_per_sec", lambda: self._pcie(handle, api.NVML_PCIE_UTIL_RX_BYTES))
        told.ask("nvlink_sent_bytes_per_sec", lambda: self._nvlink(handle, uuid, "TX"))
        told.ask("nvlink_received_bytes_per_sec", lambda: self._nvlink(handle, uuid, "RX"))
        processes: tuple[DeviceProcess, ...] = ()
        if has_mig:
            told.is_unknown("processes", "they are at its MIG devices")
        else:
            processes = self._processes(handle, uuid, told)
        return Device(
            uuid, kind, index, name, part_of, processes=processes, unknown=told.unknown, **told.known
        )  # fmt: skip

    def _mean_watts(self, handle: Any, uuid: str) -> float:
        millijoules = self._api.nvmlDeviceGetTotalEnergyConsumption(handle)
        return self._rates.per_second((uuid, "energy"), self._clock_ns(), millijoules / 1e3, ENERGY_OVER_NS)

    def _pcie(self, handle: Any, direction: int) -> float:
        return float(self._api.nvmlDeviceGetPcieThroughput(handle, direction) * 1e3)

    def _nvlink(self, handle: Any, uuid: str, direction: str) -> float:
        """Return the mean bytes per second in one direction over all NVLinks. The driver counts KiB."""
        field = getattr(self._api, f"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_{direction}")
        (found,) = self._api.nvmlDeviceGetFieldValues(handle, [(field, ALL_LINKS)])
        now_ns = self._clock_ns()
        if found.nvmlReturn != self._api.NVML_SUCCESS:
            raise self._api.NVMLError(found.nvmlReturn)
        return self._rates.per_second((uuid, field), now_ns, found.value.ullVal * 1024.0)

    def _processes(self, handle: Any, uuid: str, told: Figures) -> tuple[DeviceProcess, ...]:
        """Return the processes on the device. () if the driver's pids are not valid in our pid namespace."""
        api, asked = self._api, Figures(self._reason)
        asked.ask("compute", lambda: api.nvmlDeviceGetComputeRunningProcesses(handle))
        asked.ask("graphics", lambda: api.nvmlDeviceGetGraphicsRunningProcesses(handle))
        if "compute" not in asked.known:
            told.is_unknown("processes", asked.unknown[0].why)
            return ()
        found = {
            each.pid: each.usedGpuMemory for kind in ("graphics", "compute") for each in asked.known.get(kind, ())
        }
        if not found:
            return ()
        if not _are_ours(found):
            told.is_unknown("processes", OTHER_NAMESPACE)
            return ()
        busy: dict[int, float] | None = None
        asked.ask("busy", lambda: self._busy(handle, uuid))
        if "busy" in asked.known:
            busy = asked.known["busy"]
        else:
            told.is_unknown("gpu_utilization_percent", asked.unknown[-1].why)
        if None in found.values():
            told.is_unknown("gpu_memory_bytes", "the driver does not say how much a process has")
        largest = sorted(found, key=lambda pid: (-(found[pid] or 0), pid))
        if len(largest) > MAX_PROCESSES:
            told.is_unknown("processes", f"only the {MAX_PROCESSES} of {len(largest)} with the most memory are shown")
        return tuple(
            self._process(uuid, pid, found[pid], None if busy is None else busy.get(pid, 0.0))
            for pid in largest[:MAX_PROCESSES]
        )

    def _process(self, uuid: str, pid: int, memory_bytes: int | None, busy_percent: float | None) -> DeviceProcess:
        start = process_start(pid) or 0
        if memory_bytes is None:
            return DeviceProcess(pid, start, utilization_percent=busy_percent)
        history = self._memory.take((uuid, pid, start), self._clock_ns(), memory_bytes)
        return DeviceProcess(
            pid,
            start,
            memory_bytes=float(memory_bytes),
            utilization_percent=busy_percent,
            memory_history=packed_memory(history),
        )

    def _busy(self, handle: Any, uuid: str) -> dict[int, float]:
        """Return the percentage of SM time of each process since the previous sample, by pid. Processes without any
        are left out.
        """
        api = self._api
        try:
            samples = api.nvmlDeviceGetProcessUtilization(handle, self._seen_us.get(uuid, 0))
        except api.NVMLError as error:
            # "not found": no process has used the device.
            if error.value == api.NVML_ERROR_NOT_FOUND:
                return {}
            raise
        samples = sorted(samples, key=lambda each: each.timeStamp)
        if samples:
            self._seen_us[uuid] = samples[-1].timeStamp
        return {each.pid: _percent(each.smUtil) for each in samples}


def _percent(value: float) -> float:
    if not 0 <= value <= NO_PERCENT_ABOVE:
        raise NotKnownError(f"the driver says {value} %")
    return float(value)


def _slowed_by(reasons: int) -> str:
    """Return the reasons why the clocks are reduced, from the driver's bits, or ""."""
    words = [word for bit, word in SLOWED_BY.items() if reasons & bit]
    unnamed = reasons & ~(IDLE | sum(SLOWED_BY))
    return ", ".join([*words, *([f"reason {unnamed:#x}"] if unnamed else [])])


def _are_ours(pids: Collection[int]) -> bool:
    """Whether the driver's pids belong to our pid namespace.

    Outside of containers they do. In a container, the driver may report pids of the host. So each pid must be a
    process of our namespace that has an NVIDIA device open.
    """
    return pid_namespace() in (None, INITIAL_PID_NAMESPACE) or all(map(_holds_gpu, pids))


def _holds_gpu(pid: int) -> bool:
    try:
        files = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # Not a process of our namespace, or its descriptors are not readable.
        return False
    for file in files:
        with suppress(OSError):  # The process has closed the file in the meantime.
            if os.readlink(file).startswith("/dev/nvidia"):
                return True
    return False


def _words(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__
