"""Tests of GPU figures: each figure is known, or it is n/a with a reason.

A failed figure or a lost GPU does not affect other figures.
"""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import replace

import pytest

from cbtop.daemon.devices import nvml
from cbtop.daemon.devices.nvml import Nvml
from cbtop.protocol import codec
from cbtop.protocol.device_messages import MEMORY_POINT_NS, Device, DeviceSample
from cbtop.protocol.process import process_start
from cbtop.protocol.vocabulary import DeviceKind
from tests.cbtop.daemon.devices.fake_nvml import FakeNvml, FakeNVMLError, Gpu

ME = os.getpid()
NOT_SUPPORTED, NO_PERMISSION, LOST, UNKNOWN = (FakeNVMLError(code) for code in (3, 4, 15, 999))
# For each function of NVML: the figures of a GPU that become unknown if this function fails.
FIGURES = {
    "nvmlDeviceGetUtilizationRates": {"utilization_percent", "memory_utilization_percent"},
    "nvmlDeviceGetMemoryInfo": {"memory_used_bytes", "memory_total_bytes"},
    "nvmlDeviceGetTotalEnergyConsumption": {"power_watts"},
    "nvmlDeviceGetPowerUsage": {"power_reading_watts"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "nvmlDeviceGetClockInfo": {"clock_mhz", "memory_clock_mhz"},
    "nvmlDeviceGetMaxClockInfo": {"clock_max_mhz", "memory_clock_max_mhz"},
    "nvmlDeviceGetTemperature": {"temperature_celsius"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"slowed_by"},
    "nvmlDeviceGetPcieThroughput": {"pcie_sent_bytes_per_sec", "pcie_received_bytes_per_sec"},
    "nvmlDeviceGetFieldValues": {"nvlink_sent_bytes_per_sec", "nvlink_received_bytes_per_sec"},
    "nvmlDeviceGetComputeRunningProcesses": {"processes"},
    "nvmlDeviceGetProcessUtilization": {"gpu_utilization_percent"},
}
MEANS = {"power_watts", "nvlink_sent_bytes_per_sec", "nvlink_received_bytes_per_sec"}


class Clock:
    """A clock that only the test moves."""

    now_ns = 5_000_000_000

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def own_pids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to run in the initial pid namespace, so that the driver's pids are valid."""
    monkeypatch.setattr(nvml, "pid_namespace", lambda: nvml.INITIAL_PID_NAMESPACE)


def gpu(number: int = 0, **other: object) -> Gpu:
    made = Gpu(f"GPU-{number}", processes=[(ME, 1_258_291_200)], use=[(ME, 1_000, 53)])
    for name, value in other.items():
        setattr(made, name, value)
    return made


def unknown(device: Device) -> dict[str, str]:
    return {each.figure: each.why for each in device.unknown}


def second(sampler: Nvml, api: FakeNvml, clock: Clock, seconds: float = 2.0) -> DeviceSample:
    """Move the clock by `seconds` and take a sample. Meanwhile each GPU used 600 W and transferred data."""
    clock.now_ns += round(seconds * 1e9)
    for each in api.gpus:
        each.millijoules += round(600_000 * seconds)
        each.nvlink_kib = {
            field: kib + round((field - 137) * 1_000_000 * seconds) for field, kib in each.nvlink_kib.items()
        }
        each.use = [(pid, us + round(seconds * 1e6), sm) for pid, us, sm in each.use]
    return sampler.sample(())


def two_samples(api: FakeNvml, clock: Clock) -> DeviceSample:
    sampler = Nvml(api, clock)
    sampler.sample(())
    return second(sampler, api, clock)


def test_what_is_called_is_what_the_real_module_has() -> None:
    real = pytest.importorskip("pynvml")
    for name, value in vars(FakeNvml).items():
        if name.startswith("NVML_") or name == "nvmlMemory_v2":
            assert getattr(real, name) == value, name
        elif name.startswith("nvml"):
            wanted = list(inspect.signature(value).parameters)[1:]
            assert list(inspect.signature(getattr(real, name)).parameters) == wanted, name
    fields = {name: dict(getattr(real, struct)._fields_) for name, struct in (
        ("gpu memory", "c_nvmlUtilization_t"), ("used total", "c_nvmlMemory_v2_t"), ("used total", "c_nvmlMemory_t"),
        ("pid usedGpuMemory", "c_nvmlProcessInfo_t"), ("pid timeStamp smUtil", "c_nvmlProcessUtilizationSample_t"),
        ("nvmlReturn value", "c_nvmlFieldValue_t"), ("ullVal", "c_nvmlValue_t"),
    )}  # fmt: skip
    assert all(set(names.split()) <= there.keys() for names, there in fields.items())
    assert str(real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)) == "Not Supported"
    assert real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED).value == real.NVML_ERROR_NOT_SUPPORTED


def test_a_sample_holds_every_figure_in_its_unit(clock: Clock) -> None:
    (device,) = two_samples(FakeNvml(gpu()), clock).devices
    assert unknown(device) == {}
    assert replace(device, processes=()) == Device(
        "GPU-0", DeviceKind.GPU, 0, "NVIDIA H100 80GB HBM3",
        utilization_percent=99, memory_utilization_percent=32,
        memory_used_bytes=1_267_531_776, memory_total_bytes=85_520_809_984,
        power_watts=600, power_reading_watts=503.756, power_limit_watts=700,
        clock_mhz=1470, clock_max_mhz=1980, memory_clock_mhz=2619, memory_clock_max_mhz=2619,
        temperature_celsius=53, slowed_by="power cap",
        pcie_sent_bytes_per_sec=3_179_982e3, pcie_received_bytes_per_sec=26_849_605e3,
        nvlink_sent_bytes_per_sec=1_024e6, nvlink_received_bytes_per_sec=2_048e6,
    )  # fmt: skip
    (process,) = device.processes
    assert (process.pid, process.process_start) == (ME, process_start(ME))
    assert (process.memory_bytes, process.utilization_percent) == (1_258_291_200, 53)


def test_the_memory_of_a_process_is_kept_over_minutes(clock: Clock) -> None:
    sampler = Nvml(FakeNvml(gpu()), clock)
    points: list[tuple[int, ...]] = []
    for _ in range(3):
        ((process,),) = (device.processes for device in sampler.sample(()).devices)
        points.append(process.memory_points)
        clock.now_ns += MEMORY_POINT_NS
    assert points == [(), (1_258_291_200,), (1_258_291_200,) * 2]


def test_means_are_unknown_in_the_first_sample_and_if_a_counter_went_back(clock: Clock) -> None:
    api = FakeNvml(gpu())
    sampler = Nvml(api, clock)
    (first,) = sampler.sample(()).devices
    assert unknown(first) == dict.fromkeys(MEANS, "a mean needs two samples")
    second(sampler, api, clock)
    api.gpus[0].millijoules = 5  # Reloading the driver resets the energy counter.
    api.gpus[0].nvlink_kib[138] = -1 << 40  # the counter overflowed
    (back,) = second(sampler, api, clock).devices
    assert unknown(back) == dict.fromkeys({"power_watts", "nvlink_sent_bytes_per_sec"}, "its counter went back")
    assert back.nvlink_received_bytes_per_sec == pytest.approx(2_048e6)
    (on,) = second(sampler, api, clock).devices
    assert unknown(on) == {}
    assert on.power_watts == pytest.approx(600)


def test_a_mean_is_over_the_time_that_really_passed_and_over_no_pause(clock: Clock) -> None:
    api = FakeNvml(gpu())
    sampler = Nvml(api, clock)
    sampler.sample(())
    (late,) = second(sampler, api, clock, 3.7).devices
    assert late.power_watts == pytest.approx(600, rel=1e-3)
    (after_a_pause,) = second(sampler, api, clock, 60).devices
    assert unknown(after_a_pause) == dict.fromkeys(MEANS, "a mean needs two samples")


def test_the_mean_power_is_of_three_seconds_for_its_counter_moves_in_steps(clock: Clock) -> None:
    api = FakeNvml(gpu())
    sampler = Nvml(api, clock)
    sampler.sample(())
    found = []
    for more_millijoules in (0, 0, 0, 300_000, 0, 0, 0):
        api.gpus[0].millijoules += more_millijoules
        found.append(second(sampler, api, clock, 1.0).devices[0].power_watts)
    assert found == pytest.approx([600, 600, 600, 700, 700, 700, 600])


@pytest.mark.parametrize(
    "error", [NOT_SUPPORTED, NO_PERMISSION, UNKNOWN, AttributeError("no such function")], ids=str
)
@pytest.mark.parametrize("function", FIGURES)
def test_a_query_that_fails_costs_its_own_figures_only(function: str, error: Exception, clock: Clock) -> None:
    (whole,) = two_samples(FakeNvml(gpu()), clock).devices
    (device,) = two_samples(FakeNvml(gpu(fails={function: error})), Clock()).devices
    assert unknown(device) == dict.fromkeys(FIGURES[function], str(error))
    of_processes = {"processes", "gpu_utilization_percent"}
    for name in set(Device.__dataclass_fields__) - FIGURES[function] - of_processes - {"unknown"}:
        assert getattr(device, name) == getattr(whole, name), name
    assert (device.processes == whole.processes) is FIGURES[function].isdisjoint(of_processes)
    for name in FIGURES[function] - of_processes:
        assert getattr(device, name) is None


def test_what_the_driver_cannot_mean_is_no_figure(clock: Clock) -> None:
    wrong = gpu(busy=4_294_967_295, use=[(ME, 1, 4_294_967_295)], processes=[(ME, None)])
    (device,) = two_samples(FakeNvml(wrong), clock).devices
    said = "the driver says 4294967295 %"
    assert unknown(device) == {
        "utilization_percent": said,
        "memory_utilization_percent": said,
        "gpu_utilization_percent": said,
        "gpu_memory_bytes": "the driver does not say how much a process has",
    }
    assert (device.processes[0].memory_bytes, device.processes[0].utilization_percent) == (None, None)


def test_an_older_driver_tells_of_memory_in_its_own_way(clock: Clock) -> None:
    class Older(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, handle: Gpu, version: int | None = None) -> object:
            if version:
                raise FakeNVMLError(13)
            return super().nvmlDeviceGetMemoryInfo(handle)

    (device,) = two_samples(Older(gpu()), clock).devices
    assert device.memory_used_bytes == 1_267_531_776 + 503_316_480


def test_a_lost_gpu_is_said_costs_the_others_nothing_and_comes_back(clock: Clock) -> None:
    api = FakeNvml(gpu(0), gpu(1))
    sampler = Nvml(api, clock)
    sampler.sample(())
    for function in ("*", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTemperature"):
        api.gpus[0].fails = {function: LOST}
        lost, other = second(sampler, api, clock).devices
        assert (lost.uuid, lost.name) == ("GPU-0", "NVIDIA H100 80GB HBM3")
        assert lost.trouble == "it does not answer: GPU is lost"
        assert (other.trouble, other.utilization_percent) == ("", 99)
    api.gpus[0].fails = {}
    assert [device.trouble for device in second(sampler, api, clock).devices] == ["", ""]
    assert (api.inits, api.shutdowns) == (1, 0)


@pytest.mark.parametrize("fails", [{"nvmlDeviceGetCount": UNKNOWN}, {"nvmlDeviceGetUUID": UNKNOWN},
                                   {"nvmlDeviceGetName": FakeNVMLError(1)}], ids=str)  # fmt: skip
def test_where_no_gpu_answers_nvml_is_opened_anew_until_one_does(fails: dict[str, Exception], clock: Clock) -> None:
    api = FakeNvml(gpu(0), gpu(1))
    sampler = Nvml(api, clock)
    sampler.sample(())
    api.fails = fails
    for _ in range(2):
        sample = second(sampler, api, clock)
        assert sample.trouble or all(device.trouble for device in sample.devices)
        assert not api.is_open
    api.fails = {}
    sample = second(sampler, api, clock)
    assert [device.trouble for device in sample.devices] == ["", ""]
    assert api.inits == 1 + api.shutdowns


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (12, "no NVIDIA driver is loaded here (NVML Shared Library Not Found)"),
        (9, "no NVIDIA driver is loaded here (Driver Not Loaded)"),
        (18, "the NVIDIA driver was changed: start the daemon anew (RM has detected an NVML/RM version mismatch)"),
        (4, "NVML cannot be used: Insufficient Permissions"),
    ],
)
def test_why_there_is_no_gpu_is_one_line(code: int, said: str, clock: Clock) -> None:
    api = FakeNvml(gpu())
    api.fails = {"nvmlInit": FakeNVMLError(code)}
    sampler = Nvml(api, clock)
    assert sampler.sample(()) == DeviceSample("nvml", clock.now_ns, trouble=said)
    sampler.close()
    assert api.shutdowns == 0


def test_no_module_and_no_gpu_are_a_line_too(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Nvml(FakeNvml(), clock).sample(()).trouble == "the NVIDIA driver finds no GPU"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Nvml(clock_ns=clock).sample(()).trouble.startswith("nvidia-ml-py is not installed")


def mig_gpu() -> Gpu:
    """Return a GPU with two of its seven MIG devices: numbers 1 and 4."""
    refused = {name: NOT_SUPPORTED for name in FIGURES if name not in (
        "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses")}  # fmt: skip
    parts = {
        place: Gpu(f"MIG-{place}", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", processes=[(ME, 1 << 20)], fails=refused)
        for place in (1, 4)
    }
    fails = {"nvmlDeviceGetUtilizationRates": NOT_SUPPORTED, "nvmlDeviceGetProcessUtilization": NOT_SUPPORTED}
    return gpu(mig=parts, fails=fails)


def test_of_a_gpu_with_mig_each_part_is_a_device_with_what_it_says(clock: Clock) -> None:
    whole, *parts = two_samples(FakeNvml(mig_gpu()), clock).devices
    assert (whole.kind, whole.utilization_percent, whole.power_watts) == (DeviceKind.GPU, None, 600)
    assert unknown(whole) == {
        "utilization_percent": "Not Supported",
        "memory_utilization_percent": "Not Supported",
        "processes": "they are at its MIG devices",
    }
    assert [(part.uuid, part.index, part.kind, part.part_of) for part in parts] == [
        ("MIG-1", 1, DeviceKind.MIG, "GPU-0"),
        ("MIG-4", 4, DeviceKind.MIG, "GPU-0"),
    ]
    for part in parts:
        assert part.memory_used_bytes is not None
        assert [process.pid for process in part.processes] == [ME]
        assert unknown(part)["utilization_percent"] == unknown(part)["power_watts"] == "Not Supported"


def test_a_mig_device_that_fails_costs_the_others_nothing(clock: Clock) -> None:
    broken = mig_gpu()
    assert broken.mig
    broken.mig[1].fails = {"*": LOST}
    whole, lost, other = two_samples(FakeNvml(broken), clock).devices
    assert (whole.trouble, other.uuid, other.trouble) == ("", "MIG-4", "")
    assert (lost.trouble, lost.part_of) == ("GPU is lost", "GPU-0")


def test_eight_gpus_are_eight_devices_whose_means_are_their_own(clock: Clock) -> None:
    api = FakeNvml(*map(gpu, range(8)))
    sampler = Nvml(api, clock)
    sampler.sample(())
    for number, each in enumerate(api.gpus):
        each.millijoules += 1_000 * number
    devices = second(sampler, api, clock, 1.0).devices
    assert [device.power_watts for device in devices] == pytest.approx([600 + number for number in range(8)])
    assert len({device.uuid for device in devices}) == 8
    sample = DeviceSample("nvml", 1, devices=devices)
    assert codec.decode(codec.encode(sample)) == sample
    assert len(codec.encode(sample)) < 8_000


@pytest.mark.parametrize(("bits", "words"), [
    (0, ""), (1, ""), (0x44, "power cap, heat (hardware)"), (0x21, "heat (software)"), (0x8000, "reason 0x8000"),
])  # fmt: skip
def test_what_holds_the_clocks_down_is_said_in_words(bits: int, words: str, clock: Clock) -> None:
    (device,) = two_samples(FakeNvml(gpu(reasons=bits)), clock).devices
    assert device.slowed_by == words


def test_a_process_that_the_driver_saw_nothing_of_has_used_nothing(clock: Clock) -> None:
    both = [(ME, 2 << 20), (os.getppid(), 3 << 20)]
    (device,) = two_samples(FakeNvml(gpu(processes=both)), clock).devices
    assert [(each.pid, each.utilization_percent) for each in device.processes] == [(os.getppid(), 0), (ME, 53)]
    (nobody,) = two_samples(FakeNvml(gpu(processes=both, use=[])), Clock()).devices
    assert [each.utilization_percent for each in nobody.processes] == [0, 0]
    assert unknown(nobody) == {}


def test_of_very_many_processes_those_with_the_most_memory_are_told(clock: Clock) -> None:
    many = [(1_000_000_000 + number, number) for number in range(100)]
    (device,) = two_samples(FakeNvml(gpu(processes=many)), clock).devices
    assert [process.memory_bytes for process in device.processes] == list(range(99, 35, -1))
    assert unknown(device) == {"processes": "only the 64 of 100 with the most memory are shown"}


@pytest.mark.parametrize("holds_gpu", [False, True])
def test_pids_in_a_container_count_only_if_they_are_local_and_hold_the_gpu(
    holds_gpu: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "pid_namespace", lambda: 7)
    if holds_gpu:
        monkeypatch.setattr(os, "readlink", lambda path: "/dev/nvidiactl")
    (device,) = two_samples(FakeNvml(gpu()), clock).devices
    if holds_gpu:
        assert [process.pid for process in device.processes] == [ME]
        return
    assert device.processes == ()
    assert unknown(device) == {"processes": nvml.OTHER_NAMESPACE}
    (device,) = two_samples(FakeNvml(gpu(processes=[(1 << 30, 5)])), Clock()).devices
    assert unknown(device) == {"processes": nvml.OTHER_NAMESPACE}
