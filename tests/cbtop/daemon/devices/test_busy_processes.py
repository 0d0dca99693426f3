from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cbtop.daemon.devices.busy_processes import MAX_BUSY, BusyProcesses
from cbtop.protocol.process import process_start

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SECOND_NS = 10**9
BUSY = "import sys\nprint(flush=True)\nwhile True: pass"


class Machine:
    """A made /proc, with a clock that the test sets. Each reading of the processor time costs `cost_ns`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now_ns = SECOND_NS
        self.spent_ns = 0
        self.cost_ns = 0
        self.scans = BusyProcesses(directory, lambda: self.now_ns, self._spent)

    def _spent(self) -> int:
        self.spent_ns += self.cost_ns
        return self.spent_ns

    def has(self, pid: int, worked_s: float, name: str = "work", start: int = 5, command: str = "") -> None:
        (self.directory / str(pid)).mkdir(exist_ok=True)
        before, after = " ".join("0" * 10), " ".join("0" * 6)
        ticks = round(worked_s / TICK_S)
        stat = f"{pid} ({name}) S {before} {ticks - 1} 1 {after} {start} 0 25 0 0\n"
        (self.directory / str(pid) / "stat").write_text(stat)
        (self.directory / str(pid) / "cmdline").write_text(command.replace(" ", "\0"))

    def busiest(self) -> list[tuple[int, str, float | None]]:
        return [(found.pid, found.name, found.utilization_percent) for found in self.scans.busiest()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_processes_are_in_the_order_of_their_time_since_the_scan_before(machine: Machine) -> None:
    for pid, worked_s in ((1, 500.0), (2, 1.0), (3, 1.0)):
        machine.has(pid, worked_s)
    (machine.directory / "meminfo").write_text("no process")
    assert machine.busiest() == []
    machine.now_ns += 2 * SECOND_NS
    machine.has(2, 1.5)
    machine.has(3, 5.0)
    assert machine.busiest() == [(3, "work", pytest.approx(200.0)), (2, "work", pytest.approx(25.0))]
    (found, _) = machine.scans.busiest()
    assert found.memory_bytes == 25 * os.sysconf("SC_PAGE_SIZE")


def test_at_most_ten_are_shown_and_none_below_one_percent(machine: Machine) -> None:
    for pid in range(1, 40):
        machine.has(pid, 1.0)
    machine.busiest()
    machine.now_ns += 10 * SECOND_NS
    for pid in range(1, 40):
        machine.has(pid, 1.05 if pid > 5 else 1.0 + pid)
    assert [pid for pid, _, _ in machine.busiest()] == [5, 4, 3, 2, 1]
    machine.now_ns += 10 * SECOND_NS
    for pid in range(1, 40):
        machine.has(pid, 20.0 + pid)
    assert len(machine.busiest()) == MAX_BUSY


def test_a_new_process_with_the_pid_of_an_ended_one_has_no_rate_yet(machine: Machine) -> None:
    machine.has(7, 1.0)
    machine.busiest()
    machine.now_ns += SECOND_NS
    machine.has(7, 1.9, start=6)
    assert machine.busiest() == []


def test_scanning_takes_half_a_percent_of_a_processor_at_most(machine: Machine) -> None:
    machine.has(7, 1.0)
    machine.cost_ns = 15_000_000
    machine.busiest()
    for _ in range(30):
        machine.now_ns += SECOND_NS
        machine.has(7, machine.now_ns / 1e9)
        machine.busiest()
    assert machine.spent_ns / 2 <= 0.005 * (machine.now_ns + 3 * SECOND_NS)
    assert machine.busiest() == [(7, "work", pytest.approx(100.0))]  # repeated between two scans


@pytest.mark.parametrize(
    ("name", "command", "shown"),
    [
        ("python3.11", "python3 -u /srv/train.py --lr 1", "python3.11 train.py"),
        ("python3", "python3 -m torch.distributed.run x", "python3 -m torch.distributed.run"),
        ("python3", "python3 -c secret", "python3"),
        ("python3", "python3 -Ic secret", "python3"),
        ("python3", "python3 -W ignore -X faulthandler --check-hash-based-pycs never -Es a.py", "python3 a.py"),
        ("python3", "python3 -Wignore -uX dev a.py", "python3 a.py"),
        ("python3", "python3 -um http.server", "python3 -m http.server"),
        ("python3", "python3", "python3"),
        ("a) b (c", "x --password=1", "a) b (c"),
    ],
)
def test_a_python_process_is_named_by_its_script_without_arguments(
    name: str, command: str, shown: str, machine: Machine
) -> None:
    machine.has(7, 1.0)
    machine.busiest()
    machine.now_ns += SECOND_NS
    machine.has(7, 2.0, name, command=command)
    assert [found for _, found, _ in machine.busiest()] == [shown]


def test_a_system_without_proc_has_no_busy_processes(tmp_path: Path) -> None:
    assert BusyProcesses(tmp_path / "none").busiest() == ()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_a_real_busy_process_has_the_time_that_psutil_gives() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            peer, scans = psutil.Process(process.pid), BusyProcesses(cost_ns=lambda: 0)
            begun_s, times = time.perf_counter(), [peer.cpu_times()]
            scans.busiest()
            while sum(peer.cpu_times()[:2]) - sum(times[0][:2]) < 0.3:
                time.sleep(0.02)
            (found,) = [each for each in scans.busiest() if each.pid == process.pid]
            times.append(peer.cpu_times())
            lasted_s = time.perf_counter() - begun_s
        finally:
            process.kill()
    assert found.process_start == process_start(process.pid) or process.poll() is not None
    assert found.utilization_percent is not None
    worked_s = sum(times[1][:2]) - sum(times[0][:2])
    assert found.utilization_percent == pytest.approx(100 * worked_s / lasted_s, rel=0.25)
