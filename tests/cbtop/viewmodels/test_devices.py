"""Tests of the shown devices of a machine.

Old samples are marked, and the processes on a device are never guessed.
"""

from __future__ import annotations

from dataclasses import replace

from cbtop.protocol.device_messages import Device, DeviceProcess
from cbtop.protocol.messages import Heartbeat, SourceState
from cbtop.protocol.vocabulary import DeviceKind, SourceStatus
from cbtop.viewmodels.devices import machine_view
from tests.cbtop import made_machines as made
from tests.cbtop.made_machines import CPU, GPU, NVML, PID, START, machine, source, store_of


def test_a_process_is_known_as_a_source_by_its_pid_and_its_start() -> None:
    for other, is_source in ((source(), True), (source(start=1), False), (source(pid=9), False)):
        (process,) = machine(other, NVML, CPU).processes
        assert (process.source == other.source) is is_source
        assert (process.pid, process.device, process.device_uuid) == (PID, "0", GPU.uuid)
        assert (process.gpu_memory_bytes, process.gpu_utilization_percent) == (782_237_696, 38)
        assert (process.name, process.resident_bytes) == ("python", CPU.devices[0].processes[0].memory_bytes)
        assert process.cpu_percent == CPU.devices[0].processes[0].utilization_percent


def test_a_source_in_another_pid_namespace_is_no_process_here_and_it_is_said() -> None:
    for namespace in (7, None):
        view = machine(source(namespace=namespace), NVML, CPU)
        assert [process.source for process in view.processes] == [None]
        assert view.unknown[-1].why == "a profiled process is in another pid namespace than the daemon"
        assert view.gpus_of(source().source) == ()
    ended = SourceState(source().source, SourceStatus.ENDED, "", 0, 0, 0, 0, 0, 0)
    view = machine_view(store_of(source(namespace=7), NVML, ended))
    assert all("namespace" not in why.why for why in view.unknown)


def test_a_process_is_a_row_on_each_of_its_gpus_and_one_where_it_is_on_none() -> None:
    two = tuple(replace(GPU, uuid=f"GPU-{at}", index=at) for at in range(2))
    (cpu,) = CPU.devices
    others = replace(CPU, devices=(replace(cpu, processes=(*cpu.processes, DeviceProcess(9, 1, "other", 5.0, 1.0))),))
    view = machine(source(), source(pid=9, start=1), replace(NVML, devices=two), others)
    assert [(row.pid, row.device) for row in view.processes] == [(9, ""), (PID, "0"), (PID, "1")]
    assert view.processes[0].gpu_memory_bytes is None
    assert [row.label for row in view.gpus_of(source().source)] == ["0", "1"]


def test_busy_processes_are_listed_after_profiled_ones_the_busiest_first() -> None:
    (cpu,) = CPU.devices
    busy = [DeviceProcess(100 + at, 1, "other", 5.0, 0.5 * at) for at in range(20)]
    view = machine(source(), NVML, replace(CPU, devices=(replace(cpu, processes=(*cpu.processes, *busy)),)))
    assert [row.pid for row in view.processes] == [PID, *range(119, 109, -1)]
    assert [bool(row.source) for row in view.processes] == [True] + 10 * [False]
    few = machine(source(), NVML, replace(CPU, devices=(replace(cpu, processes=tuple(busy[:4])),)))
    assert [row.pid for row in few.processes] == [PID, 103, 102]  # the others take less than one percent


def test_mig_devices_are_named_by_their_gpu_and_their_place() -> None:
    assert [row.label for row in made.MIG.devices] == ["0", "0:0", "0:1", "cpu"]
    assert [(row.pid, row.device) for row in made.MIG.processes] == [(PID, "0:0"), (PID + 1, "0:1")]


def test_values_of_a_silent_sampler_are_stale_and_the_others_are_not() -> None:
    by_label = {row.label: row for row in made.HANGS.devices}
    assert by_label["0"].is_stale
    assert 42 < by_label["0"].age_s < 43
    assert not by_label["cpu"].is_stale
    store = store_of(NVML, CPU, Heartbeat(NVML.monotonic_ns, ()))
    assert not machine_view(store).devices[0].is_stale
    # The daemon has stopped sending, so the sample counts as old after 12 s.
    assert machine_view(store, stale_s=12.0).devices[0].is_stale


def test_a_reason_stands_once_with_all_it_is_about() -> None:
    found = [(why.figures, why.devices, why.why) for why in made.EIGHT.unknown]
    assert (("utilization_percent", "memory_utilization_percent"), ("2",), "Not Supported") in found
    assert len(found) == len({why for _, _, why in found}) == 2


def test_how_busy_it_was_is_kept_for_two_minutes_and_a_keyframe_adds_nothing() -> None:
    samples = made.series(NVML, [float(at % 100) for at in range(150)])
    (row,) = machine(*samples, samples[-1], samples[-1]).devices
    assert len(row.busy_percent) == 120
    assert row.busy_percent[-3:] == (48.0, 49.0, 37.0)
    lost = replace(GPU, utilization_percent=None, trouble="it does not answer: GPU is lost")
    (row,) = machine(*samples[:3], replace(NVML, devices=(lost,))).devices
    assert row.busy_percent == (0.0, 1.0, 2.0, None)


def test_usage_of_a_profiled_process_is_kept_for_two_minutes_even_if_gone() -> None:
    (host,) = CPU.devices
    (process,) = host.processes

    def busy(percent: float) -> Device:
        return replace(host, processes=(replace(process, utilization_percent=percent),))

    samples = [
        replace(CPU, monotonic_ns=CPU.monotonic_ns + at * 1_000_000_000, devices=(busy(float(at)),))
        for at in range(130)
    ]
    (row,) = machine(source(), *samples).processes
    assert [moment.cpu_percent for moment in row.history] == [float(at) for at in range(10, 130)]
    gone = replace(samples[-1], monotonic_ns=samples[-1].monotonic_ns + 1, devices=(replace(host, processes=()),))
    again = replace(gone, monotonic_ns=gone.monotonic_ns + 1, devices=(busy(7.0),))
    (row,) = machine(source(), *samples, gone, again).processes
    assert [moment.cpu_percent for moment in row.history] == [*map(float, range(11, 130)), 7.0]


def test_the_mean_power_stands_before_the_drivers_reading() -> None:
    assert made.H100.devices[0].watts == GPU.power_watts
    assert made.FIRST.devices[0].watts == GPU.power_reading_watts


def test_where_no_gpu_is_the_reason_is_told_and_the_host_is_there() -> None:
    assert made.NO_GPU.troubles == (f"nvml: {made.NO_DRIVER.trouble}",)
    assert [row.device.kind for row in made.NO_GPU.devices] == [DeviceKind.CPU]
    assert made.NO_GPU.devices[0].device.processes[0].process_start == START
