"""Tests of cbtop's clocks: the clocks continue, whatever a test of the profiled program does to the module `time`."""

from __future__ import annotations

import subprocess
import sys
import time
from unittest import mock

import pytest
from freezegun import freeze_time

from cbtop.protocol import clock

IMPORTED_IN_FROZEN_TIME = """
from freezegun import freeze_time
with freeze_time("2020-01-01"):
    from cbtop.protocol import clock
    assert clock.perf_counter_ns() < clock.perf_counter_ns()
    from cbtop import BrickProfiler
import time
assert abs(clock.perf_counter_ns() - time.perf_counter_ns()) < 10**9
with freeze_time("2020-01-01"):
    assert abs(clock.time_ns() - 1577836800 * 10**9) > 10**15
"""


def test_the_clocks_read_what_those_of_python_read() -> None:
    for name in ("time", "monotonic", "time_ns", "monotonic_ns", "perf_counter_ns"):
        minute = 60e9 if name.endswith("_ns") else 60
        assert abs(getattr(clock, name)() - getattr(time, name)()) < minute


def test_frozen_time_stops_no_clock_of_ours() -> None:
    # searching the modules of these packages takes up to a minute
    with freeze_time("2020-01-01", ignore=["torch", "transformers"]):
        assert time.perf_counter_ns() == time.perf_counter_ns()
        assert clock.perf_counter_ns() < clock.perf_counter_ns()
        assert clock.time() > time.time() + 10**8


@pytest.mark.parametrize("name", ["time", "monotonic", "perf_counter_ns", "time_ns"])
def test_a_clock_that_a_test_replaces_is_not_ours(name: str) -> None:
    with mock.patch(f"time.{name}", return_value=7):
        assert getattr(clock, name)() > 7


@pytest.mark.slow
def test_a_process_that_imports_them_in_frozen_time_has_them_all_the_same() -> None:
    subprocess.run([sys.executable, "-c", IMPORTED_IN_FROZEN_TIME], check=True)
