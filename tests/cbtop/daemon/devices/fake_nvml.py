"""A fake of the functions of pynvml that cbtop uses, with simulated GPUs. Any call can be made to fail or hang."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

ERRORS = {
    1: "Uninitialized", 3: "Not Supported", 4: "Insufficient Permissions", 6: "Not Found", 9: "Driver Not Loaded",
    10: "Timeout", 12: "NVML Shared Library Not Found", 13: "Function Not Found", 15: "GPU is lost",
    16: "GPU requires restart", 18: "RM has detected an NVML/RM version mismatch.", 999: "Unknown Error",
}  # fmt: skip


class FakeNVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(ERRORS[value])
        self.value = value


@dataclass
class Gpu:
    """A simulated GPU or MIG device. `fails` maps a function name to the error that it raises."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    busy: int = 99
    memory_busy: int = 32
    used_bytes: int = 1_267_531_776
    millijoules: int = 3_703_776
    milliwatts: int = 503_756
    mhz: int = 1470
    reasons: int = 4
    nvlink_kib: dict[int, int] = field(default_factory=lambda: {138: 1_000, 139: 2_000})
    processes: list[tuple[int, int | None]] = field(default_factory=list)  # pid, memory in bytes
    # processes: pid, time of the sample in µs (None: now), utilisation of the multiprocessors in %
    use: list[tuple[int, int | None, int]] = field(default_factory=list)
    mig: dict[int, Gpu] | None = None
    fails: dict[str, Exception] = field(default_factory=dict)


class FakeNvml:
    """The fake module that a sampler gets instead of pynvml."""

    NVMLError = FakeNVMLError
    NVML_SUCCESS = 0
    NVML_ERROR_UNINITIALIZED = 1
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0
    NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_PCIE_UTIL_RX_BYTES = 1
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
    NVML_DEVICE_MIG_ENABLE = 1
    nvmlMemory_v2 = 0x02000028

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = list(gpus)
        self.fails: dict[str, Exception] = {}
        self.inits = self.shutdowns = 0
        self.is_open = False
        # An event: calls of NVML hang until the event occurs. Without an event, calls do not hang.
        self.hangs: threading.Event | None = None

    def _about(self, function: str, handle: Gpu | None = None) -> None:
        if self.hangs is not None:
            self.hangs.wait()
        error = self.fails.get(function) or (handle.fails.get(function) or handle.fails.get("*") if handle else None)
        if error is not None:
            raise error
        if not self.is_open:
            raise FakeNVMLError(1)

    def nvmlInit(self) -> None:
        if error := self.fails.get("nvmlInit"):
            raise error
        self.inits += 1
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self._about("nvmlShutdown")
        self.shutdowns += 1
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> str:
        self._about("nvmlSystemGetDriverVersion")
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        self._about("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        self._about("nvmlDeviceGetHandleByIndex", self.gpus[index])
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, handle: Gpu) -> str:
        self._about("nvmlDeviceGetUUID", handle)
        return handle.uuid

    def nvmlDeviceGetName(self, handle: Gpu) -> str:
        self._about("nvmlDeviceGetName", handle)
        return handle.name

    def nvmlDeviceGetMigMode(self, device: Gpu) -> list[int]:
        self._about("nvmlDeviceGetMigMode", device)
        return [int(device.mig is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Gpu) -> int:
        self._about("nvmlDeviceGetMaxMigDeviceCount", device)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Gpu, index: int) -> Gpu:
        self._about("nvmlDeviceGetMigDeviceHandleByIndex", device)
        if device.mig is None or index not in device.mig:
            raise FakeNVMLError(6)
        return device.mig[index]

    def nvmlDeviceGetUtilizationRates(self, handle: Gpu) -> Any:
        self._about("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=handle.busy, memory=handle.memory_busy)

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu, version: int | None = None) -> Any:
        self._about("nvmlDeviceGetMemoryInfo", handle)
        total, reserved = 85_520_809_984, 503_316_480
        if version:
            return SimpleNamespace(version=version, total=total, reserved=reserved, free=0, used=handle.used_bytes)
        return SimpleNamespace(total=total, free=0, used=handle.used_bytes + reserved)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Gpu) -> int:
        self._about("nvmlDeviceGetTotalEnergyConsumption", handle)
        return handle.millijoules

    def nvmlDeviceGetPowerUsage(self, handle: Gpu) -> int:
        self._about("nvmlDeviceGetPowerUsage", handle)
        return handle.milliwatts

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Gpu) -> int:
        self._about("nvmlDeviceGetEnforcedPowerLimit", handle)
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle: Gpu, type: int) -> int:
        self._about("nvmlDeviceGetClockInfo", handle)
        return {1: handle.mhz, 2: 2619}[type]

    def nvmlDeviceGetMaxClockInfo(self, handle: Gpu, type: int) -> int:
        self._about("nvmlDeviceGetMaxClockInfo", handle)
        return {1: 1980, 2: 2619}[type]

    def nvmlDeviceGetTemperature(self, handle: Gpu, sensor: int) -> int:
        self._about("nvmlDeviceGetTemperature", handle)
        return 53

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Gpu) -> int:
        self._about("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return handle.reasons

    def nvmlDeviceGetPcieThroughput(self, device: Gpu, counter: int) -> int:
        self._about("nvmlDeviceGetPcieThroughput", device)
        return {0: 3_179_982, 1: 26_849_605}[counter]

    def nvmlDeviceGetFieldValues(self, handle: Gpu, fieldIds: list[tuple[int, int]]) -> list[Any]:
        self._about("nvmlDeviceGetFieldValues", handle)
        assert all(scope == 0xFFFFFFFF for _, scope in fieldIds)
        return [
            SimpleNamespace(
                fieldId=each, nvmlReturn=0 if each in handle.nvlink_kib else 3,
                value=SimpleNamespace(ullVal=handle.nvlink_kib.get(each, 0)),
            )
            for each, _ in fieldIds
        ]  # fmt: skip

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Gpu) -> list[Any]:
        self._about("nvmlDeviceGetComputeRunningProcesses", handle)
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in handle.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Gpu) -> list[Any]:
        self._about("nvmlDeviceGetGraphicsRunningProcesses", handle)
        return []

    def nvmlDeviceGetProcessUtilization(self, handle: Gpu, timeStamp: int) -> list[Any]:
        self._about("nvmlDeviceGetProcessUtilization", handle)
        times = [(pid, timeStamp + 1 if us is None else us, sm) for pid, us, sm in handle.use]
        found = [SimpleNamespace(pid=pid, timeStamp=us, smUtil=sm) for pid, us, sm in times if us > timeStamp]
        if not found:
            raise FakeNVMLError(6)
        return found
