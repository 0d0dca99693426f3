"""Machines for the tests: a real H100 as its driver described it, and variants of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cbtop.client.store import Store
from cbtop.protocol import codec
from cbtop.protocol.device_messages import Device, DeviceProcess, DeviceSample, Unknown
from cbtop.protocol.messages import DaemonHello, Heartbeat, HostHello, Message, SourceCatalog
from cbtop.protocol.vocabulary import DeviceKind
from cbtop.viewmodels.devices import MachineView, machine_view

# Samples of devices that cbtop took while a torch program ran on an H100 (driver 580.159.04). The uuid is invented.
RECORDED = Path(__file__).parent / "h100.json"
HELLO = DaemonHello(2, 1, 1, "gpubox", "boot", "0.1.0", 0, 0)
PID, START, NAMESPACE = 755, 10931, 4026531836


def _sample(said: dict[str, Any]) -> DeviceSample:
    devices = []
    for device in said["devices"]:
        processes = tuple(DeviceProcess(**process) for process in device["processes"])
        unknown = tuple(Unknown(**each) for each in device["unknown"])
        parts = {"processes": processes, "unknown": unknown, "kind": DeviceKind(device["kind"])}
        devices.append(Device(**device | parts))
    return DeviceSample(**said | {"devices": tuple(devices)})


NVML, CPU = map(_sample, json.loads(RECORDED.read_text(encoding="utf-8")))
(GPU,) = NVML.devices
NO_DRIVER = replace(NVML, trouble="no NVIDIA driver is loaded here (NVML Shared Library Not Found)", devices=())


def source(pid: int = PID, start: int = START, namespace: int | None = NAMESPACE) -> SourceCatalog:
    """Return the catalog of a profiled process that has this pid."""
    hello = HostHello(
        2, 1, pid, start, "gpubox", "boot", "load.py", "3.12", "compiled", 1, 1, pid_namespace=namespace
    )
    return SourceCatalog(f"gpubox:{pid}:{start}:0", complete=True, messages=(hello,))


def store_of(*said: Message) -> Store:
    """Return the store of a viewer that has received these messages.

    Each message is encoded and decoded first, as on the wire.
    """
    store = Store()
    for message in (HELLO, *said):
        decoded = codec.decode(codec.encode(message))
        assert decoded is not None
        store.apply(decoded)
    return store


def series(sample: DeviceSample, busy: Sequence[float | None]) -> list[DeviceSample]:
    """Return samples of devices, one per second. The last of them is `sample`.

    `busy` has the utilisation of the first device in each second.
    """
    first, *others = sample.devices
    return [
        replace(
            sample,
            monotonic_ns=sample.monotonic_ns - (len(busy) - at) * 1_000_000_000,
            devices=(replace(first, utilization_percent=percent), *others),
        )
        for at, percent in enumerate(busy)
    ] + [sample]


def eight() -> DeviceSample:
    """Return a sample of eight GPUs with one process each.

    One has no utilisation, one is throttled by heat, one is lost.
    """
    gpus = [
        replace(
            GPU,
            uuid=f"GPU-{index}",
            index=index,
            utilization_percent=100.0 - 7 * index,
            nvlink_sent_bytes_per_sec=1e9 * (20 + index),
            nvlink_received_bytes_per_sec=1e9 * (30 + index),
            unknown=(),
            processes=(DeviceProcess(PID + index, START, "", 70e9, 90.0),),
        )
        for index in range(8)
    ]
    why = (Unknown("utilization_percent", "Not Supported"), Unknown("memory_utilization_percent", "Not Supported"))
    gpus[2] = replace(gpus[2], utilization_percent=None, memory_utilization_percent=None, unknown=why)
    gpus[5] = replace(gpus[5], slowed_by="power cap, heat (hardware)", clock_mhz=1_050.0)
    gpus[6] = Device("GPU-6", DeviceKind.GPU, 6, GPU.name, trouble="it does not answer: GPU is lost")
    return replace(NVML, devices=tuple(gpus))


def mig() -> DeviceSample:
    """Return a sample of a GPU with two MIG devices and only the figures that MIG devices have."""
    unsaid = tuple(
        Unknown(name, "Not Supported")
        for name in (
            "utilization_percent", "memory_utilization_percent", "power_watts", "power_reading_watts",
            "power_limit_watts", "clock_mhz", "clock_max_mhz", "memory_clock_mhz", "memory_clock_max_mhz",
            "temperature_celsius", "slowed_by", "pcie_sent_bytes_per_sec", "pcie_received_bytes_per_sec",
            "nvlink_sent_bytes_per_sec", "nvlink_received_bytes_per_sec",
        )
    )  # fmt: skip
    elsewhere = Unknown("processes", "they are at its MIG devices")
    whole = replace(
        GPU, utilization_percent=None, memory_utilization_percent=None, processes=(),
        unknown=(*unsaid[:2], *GPU.unknown, elsewhere),
    )  # fmt: skip
    parts = [
        Device(f"MIG-{at}", DeviceKind.MIG, at, "NVIDIA H100 80GB HBM3 MIG 3g.40gb", part_of=GPU.uuid,
               memory_used_bytes=9e9 * (at + 1), memory_total_bytes=42.3e9, unknown=unsaid,
               processes=(DeviceProcess(PID + at, START, "", 9e9 * (at + 1)),))
        for at in range(2)
    ]  # fmt: skip
    return replace(NVML, devices=(whole, *parts))


def machine(*said: Message, age_s: float = 0.6) -> MachineView:
    """Return the machine as a viewer shows it `age_s` after the newest sample."""
    now_ns = max(each.monotonic_ns for each in said if isinstance(each, DeviceSample))
    return machine_view(store_of(*said, Heartbeat(now_ns + round(age_s * 1e9), ())))


_WAVES = [None, *(abs(at % 40 - 20) * 5.0 for at in range(100))]
H100 = machine(source(), *series(NVML, _WAVES), *series(CPU, [3.0, 20.0, 60.0]))
FIRST = machine(  # The first sample has no mean power yet, because a mean needs two samples.
    replace(NVML, devices=(replace(
        GPU, power_watts=None, unknown=(*GPU.unknown, Unknown("power_watts", "a mean needs two samples"))),)),
)  # fmt: skip
EIGHT = machine(source(), eight(), CPU)
MIG = machine(source(), mig(), CPU)
NO_GPU = machine(source(), NO_DRIVER, CPU)
HANGS = machine(source(), NVML, replace(CPU, monotonic_ns=NVML.monotonic_ns + 42_000_000_000))
