"""The CPU time of a viewer is read from counters of the Linux kernel, over the last seconds."""

from __future__ import annotations

import os
import time

import pytest

from cbtop.client.own_cost import OwnCost, resident_bytes
from tests.cbtop.recorded import Clock


def test_it_is_processor_time_over_wall_clock_time_of_the_last_seconds() -> None:
    clock, worked = Clock(0), Clock(0)
    cost = OwnCost(10.0, lambda: clock.now_ns / 1e9, lambda: worked.now_ns / 1e9, lambda: 84_000_000)
    assert (cost.cpu_percent, cost.over_s, cost.resident_bytes) == (None, 0, 84_000_000)
    for busy in [0.50] * 20 + [0.02] * 10:
        clock.sleep_us(1e6)
        worked.sleep_us(busy * 1e6)
        cost.tick()
    assert cost.over_s == pytest.approx(10)
    assert cost.cpu_percent == pytest.approx(2.0)


def test_it_is_read_once_a_second_however_often_the_screen_is_drawn() -> None:
    clock, worked = Clock(0), Clock(0)
    cost = OwnCost(10.0, lambda: clock.now_ns / 1e9, lambda: worked.now_ns / 1e9, lambda: None)
    for _ in range(5):
        clock.sleep_us(0.25e6)
        worked.sleep_us(0.1e6)
        cost.tick()
    assert (cost.over_s, cost.cpu_percent) == (1.0, pytest.approx(40))


def test_the_kernel_says_what_this_process_has_worked_and_holds() -> None:
    begun_s = time.process_time()
    cost = OwnCost(clock_s=iter((0.0, 2.0)).__next__)
    while time.process_time() < begun_s + 0.05:
        pass
    cost.tick()
    assert cost.cpu_percent is not None
    assert cost.cpu_percent > 2
    assert resident_bytes() is None or resident_bytes() > os.sysconf("SC_PAGE_SIZE")
