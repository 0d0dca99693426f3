"""Tests of the machine's pace (how long fixed work takes). It is measured and recorded with each run of a command."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

from cbtop.commands.shared import machine_pace
from cbtop.commands.shared.runs import run_of_command
from cbtop.comparison.runs import Pace

TWO_STEPS = """
from cbtop import BrickProfiler

profiler = BrickProfiler()
for _ in range(40):
    with profiler.step("decode", tokens=1), profiler.brick("RmsNorm"):
        pass
profiler.close("done")
"""


def test_work_that_takes_longer_is_another_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    # A fixture has replaced `machine_pace` by a constant. Reloading the module restores the real function.
    measured = importlib.reload(machine_pace).machine_pace
    ns = 0

    def clock_ns() -> int:
        nonlocal ns
        ns += 7_000
        return ns

    monkeypatch.setattr(machine_pace.time, "thread_time_ns", clock_ns)
    assert measured() == Pace(7.0, 7.0)
    monkeypatch.undo()
    usual = machine_pace.machine_pace()
    assert usual.cache_us > 0
    assert usual.memory_us > 0


def test_a_run_of_a_command_has_the_pace_before_it_and_behind_it(runtime: Path, steady_pace: list[Pace]) -> None:
    around = [Pace(1_000.0, 5_000.0), Pace(1_010.0, 5_300.0)]
    steady_pace[:] = around[:]
    nobody = argparse.Namespace(connect=None, server_key=None, key=None, source=None)
    run = run_of_command([sys.executable, "-c", TWO_STEPS], "the program", nobody, "one")
    assert run.paces == tuple(around)
