"""Tests of the host's figures, which come from the real psutil. Missing figures are reported as unknown."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections import namedtuple
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cbtop.daemon.devices.busy_processes import BusyProcesses
from cbtop.daemon.devices.container import ContainerLimits, Containers
from cbtop.daemon.devices.cpu import Cpu
from cbtop.protocol.device_messages import MEMORY_POINT_NS, Device, DeviceProcess
from cbtop.protocol.process import pid_namespace, process_start
from cbtop.protocol.vocabulary import DeviceKind

Times = namedtuple("Times", "user system idle iowait guest")


class Idle(BusyProcesses):
    """Finds no busy process, whatever else runs on the machine."""

    def busiest(self) -> tuple[DeviceProcess, ...]:
        return ()


class Contained(Containers):
    """Gives each process the limits that the test sets."""

    found = ContainerLimits()

    def limits(self, pid: int) -> ContainerLimits:
        return self.found


def device(sampler: Cpu, pids: tuple[int, ...] = ()) -> Device:
    (found,) = sampler.sample(pids).devices
    return found


def unknown(found: Device) -> dict[str, str]:
    return {each.figure: each.why for each in found.unknown}


def test_the_real_host_says_what_it_and_its_processes_take() -> None:
    sampler, me = Cpu(busy=Idle()), os.getpid()
    first = device(sampler, (me,))
    assert unknown(first).keys() >= {"utilization_percent", "cpu_percent"}
    ends_s = time.process_time() + 0.05
    while time.process_time() < ends_s:
        pass
    sample = sampler.sample((me, 1 << 30))
    (second,) = sample.devices
    assert sample.pid_namespace == pid_namespace()
    assert (second.kind, second.uuid) == (DeviceKind.CPU, "cpu")
    assert second.name.startswith(f"{psutil.cpu_count()} × ")
    assert second.memory_total_bytes == psutil.virtual_memory().total
    assert second.memory_used_bytes is not None
    assert 0 < second.memory_used_bytes < second.memory_total_bytes
    (process,) = second.processes
    assert (process.pid, process.process_start) == (me, process_start(me))
    assert process.name.split(" ")[0] == psutil.Process(me).name()
    assert process.memory_bytes is not None
    assert process.memory_bytes > 1 << 20
    assert process.utilization_percent is not None
    assert process.utilization_percent > 0
    assert "cpu_percent" not in unknown(second)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="the kernel does not say what is anonymous")
def test_private_memory_is_without_the_pages_of_files(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(64 << 20))

    def private() -> float:
        (process,) = device(sampler, (os.getpid(),)).processes
        assert process.private_bytes is not None
        assert process.memory_bytes is not None
        assert process.private_bytes <= process.memory_bytes
        return process.private_bytes

    def anonymous() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))

    sampler = Cpu(busy=Idle())
    before = private()
    assert before == pytest.approx(anonymous(), abs=16 << 20)
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as pages:
        sum(pages[:: 1 << 12])  # reads each page of the file
        assert private() == pytest.approx(before, abs=16 << 20)
    gc.collect()
    before = private()
    kept = bytearray(b"1") * (64 << 20)
    assert private() - before == pytest.approx(len(kept), abs=16 << 20)
    assert private() == pytest.approx(anonymous(), abs=16 << 20)


def test_the_history_of_memory_goes_on_from_sample_to_sample() -> None:
    now_ns = [0]
    sampler = Cpu(clock_ns=lambda: now_ns[0], busy=Idle())
    points: tuple[int, ...] = ()
    for _ in range(3):
        (process,) = device(sampler, (os.getpid(),)).processes
        points = process.memory_points
        now_ns[0] += MEMORY_POINT_NS
    assert len(points) == 2
    assert min(points) > 1 << 20


def test_a_profiled_process_is_named_by_its_script(tmp_path: Path) -> None:
    script = tmp_path / "odd_class.py"
    script.write_text("print(flush=True)\ninput()\n")
    with subprocess.Popen(
        [sys.executable, str(script), "--secret=1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        running.stdout.readline()
        (process,) = device(Cpu(busy=Idle()), (running.pid,)).processes
        running.communicate(b"\n")
    assert process.name.endswith(" odd_class.py")


BUSY = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
end_s = time.monotonic() + 60
while time.monotonic() < end_s:
    pass
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the kernel does not count waits")
def test_a_process_that_shares_its_processor_waits_half_of_the_time() -> None:
    processor = str(max(os.sched_getaffinity(0)))
    running = [subprocess.Popen([sys.executable, "-c", BUSY, processor], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for one in running:
            assert one.stdout is not None
            one.stdout.readline()
        sampler, pids = Cpu(busy=Idle()), tuple(one.pid for one in running)
        device(sampler, pids)
        time.sleep(1)
        waits = [process.waiting_percent for process in device(sampler, pids).processes]
    finally:
        for one in running:
            one.kill()
            one.wait()
            assert one.stdout is not None
            one.stdout.close()
    assert all(each is not None and 20 <= each <= 100 for each in waits), waits


class Made:
    """A fake psutil. The test sets the busy and idle seconds of its processors."""

    Error = psutil.Error

    def __init__(self) -> None:
        self.times = Times(10.0, 5.0, 80.0, 5.0, 3.0)
        self.frequency: Any = SimpleNamespace(current=2100.0, max=0.0)

    def cpu_times(self) -> Times:
        return self.times

    def cpu_count(self) -> int:
        return 4

    def virtual_memory(self) -> Any:
        return SimpleNamespace(total=100, available=40)

    def cpu_freq(self) -> Any:
        if isinstance(self.frequency, Exception):
            raise self.frequency
        return self.frequency


def test_utilisation_is_what_all_processors_did_of_the_time_they_had() -> None:
    api = Made()
    sampler = Cpu(api)
    assert unknown(device(sampler))["utilization_percent"] == "a mean needs two samples"
    # Linux counts guest time (of virtual machines) as user time, too.
    api.times = Times(11.0, 5.5, 82.0, 5.5, 4.0)
    found = device(sampler)
    assert found.utilization_percent == pytest.approx(100 * 1.5 / 4.0)
    assert (found.memory_used_bytes, found.memory_total_bytes) == (60, 100)
    api.times = Times(10.0, 5.5, 90.0, 5.5, 4.0)
    assert unknown(device(sampler))["utilization_percent"] == "its counter went back"
    api.times = Times(10.0, 5.5, 94.0, 5.5, 4.0)
    assert device(sampler).utilization_percent == 0


def test_clocks_that_the_system_does_not_say_are_unknown() -> None:
    api = Made()
    sampler = Cpu(api)
    found = device(sampler)
    assert (found.clock_mhz, found.clock_max_mhz) == (2100, None)
    assert unknown(found)["clock_max_mhz"] == "the system does not say"
    for frequency in (None, OSError("none here")):
        api.frequency = frequency
        found = device(sampler)
        assert (found.clock_mhz, found.clock_max_mhz) == (None, None)
        assert unknown(found).keys() >= {"clock_mhz", "clock_max_mhz"}


def test_without_psutil_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert Cpu().sample(()).trouble == "psutil is not installed: the host cannot be asked"


def test_busy_processes_follow_the_requested_ones_and_none_comes_twice() -> None:
    class Busy(Idle):
        def busiest(self) -> tuple[DeviceProcess, ...]:
            return (DeviceProcess(os.getpid(), 1, "me", 1.0, 90.0), DeviceProcess(9, 1, "other", 5.0, 80.0))

    requested, other = device(Cpu(busy=Busy()), (os.getpid(),)).processes
    assert (requested.pid, requested.utilization_percent) == (os.getpid(), None)
    assert other == DeviceProcess(9, 1, "other", 5.0, 80.0)


def test_a_process_has_its_containers_limits_and_how_often_they_held_it() -> None:
    containers, seconds = Contained(), iter(range(1, 1000))
    sampler = Cpu(clock_ns=lambda: next(seconds) * 10**7, busy=Idle(), containers=containers)
    shares = []
    for periods, throttled in ((10, 5), (20, 9), (20, 9), (30, 19)):
        containers.found = ContainerLimits(150.0, 1e9, (("pod", periods, throttled), ("app", periods, 0)))
        (process,) = device(sampler, (os.getpid(),)).processes
        assert (process.cpu_limit_percent, process.memory_limit_bytes) == (150.0, 1e9)
        shares.append(process.throttled_percent)
    assert shares == [None, pytest.approx(40.0), 0.0, pytest.approx(100.0)]
    containers.found = ContainerLimits(150.0, 1e9, (("other", 99, 99),))  # it was moved to another group
    (process,) = device(sampler, (os.getpid(),)).processes
    assert process.throttled_percent is None
    containers.found = ContainerLimits(None, 1e9)
    (process,) = device(sampler, (os.getpid(),)).processes
    assert process.throttled_percent is None
