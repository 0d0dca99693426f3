"""A machine is quiet if other processes use almost no processor time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cbtop.commands.shared import machine_load
from cbtop.commands.shared.machine_load import MachineLoad


class Machine:
    """A fake machine: a clock, and a file like /proc/stat with the busy time of the processors (in ticks)."""

    def __init__(self, stat: Path) -> None:
        self.now_s, self._stat = 100.0, stat
        self.work(0)

    def work(self, ticks: int) -> None:
        self._stat.write_text(f"cpu  {ticks} 0 0 9999 9999 0 0 0 0 0\ncpu0 1 1 1 1\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(machine_load, "PROC_STAT", str(tmp_path / "stat"))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    return Machine(tmp_path / "stat")


@pytest.mark.parametrize(("ticks", "is_quiet"), [(0, True), (12, True), (14, False), (400, False)])
def test_a_second_is_quiet_if_others_used_a_tenth_of_a_processor(
    ticks: int, is_quiet: bool, machine: Machine
) -> None:
    load = MachineLoad(clock_s=lambda: machine.now_s)
    machine.now_s += 1.0
    machine.work(ticks)
    assert load.is_quiet() is is_quiet
    assert load.percent() == pytest.approx(ticks / 4)


def test_a_large_machine_may_do_more(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    load = MachineLoad(clock_s=lambda: machine.now_s)
    machine.now_s += 1.0
    machine.work(128)
    assert load.is_quiet()


def test_the_time_of_the_measurement_itself_is_not_that_of_others(machine: Machine) -> None:
    own_s = iter([5.0, 7.0])
    load = MachineLoad(own_s.__next__, lambda: machine.now_s)
    machine.now_s += 1.0
    machine.work(205)
    assert load.others_s() == pytest.approx(0.05)


@pytest.mark.parametrize("text", [None, "", "cpu  a b\n"])
def test_a_machine_whose_load_is_not_known_is_not_quiet(text: str | None, machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "stat").unlink()
    if text is not None:
        (tmp_path / "stat").write_text(text)
    load = MachineLoad(clock_s=lambda: machine.now_s)
    assert load.others_s() is None
    assert not load.is_quiet()
    assert load.percent() == 0
