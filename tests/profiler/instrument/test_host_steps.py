"""The host's times of the calls in a step: exclusive, and without the cost of the readings."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import host_steps  # noqa: E402
from cbtop.profiler.instrument.capturing import CapturedCall  # noqa: E402
from cbtop.profiler.instrument.host_steps import HostCalls, HostSteps, ReadingCost, times_of  # noqa: E402

LAYER = (0, "layer")


def call(key: object, begin_ns: int, end_ns: int, *inside: CapturedCall) -> CapturedCall:
    return CapturedCall(key, None, [begin_ns], [end_ns], 0, list(inside))


def test_a_brick_s_time_is_without_the_bricks_in_it_and_the_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_steps, "_reading_cost", lambda: ReadingCost(inside_ns=2, outside_ns=3))
    inner = call("inner", 20, 40), call("inner", 50, 60)
    spans = [call(None, 0, 200, call(LAYER, 0, 150, call("outer", 10, 100, *inner)), call("head", 160, 161))]
    assert times_of(spans) == {
        (LAYER, "outer"): (1, 90 - 30 - 2 * 3 - 2),
        (LAYER, "outer", "inner"): (2, 30 - 2 * 2),
        ("head",): (1, 0),  # shorter than the readings are said to take: not below zero
    }


def test_a_call_that_sleeps_is_timed_as_long_as_it_sleeps() -> None:
    given: list[HostCalls] = []
    calls = HostCalls(lambda brick: brick, given.append)
    around = calls.begin(None, None)
    for _ in range(20):
        span = calls.begin("sleeps", None)
        time.sleep(0.002)
        calls.end(span)
        calls.end(calls.begin("empty", None))
    calls.end(around)
    calls.end_step()
    ((of_sleeps, sleeps_ns), (_, empty_ns)) = times_of(given[0].spans).values()
    assert of_sleeps == 20
    assert sleeps_ns / 20 >= 2_000_000
    assert empty_ns / 20 < 20_000


def test_the_latest_steps_are_added_up_by_their_kind() -> None:
    steps = HostSteps()
    for number in range(host_steps.KEPT + 5):
        steps.add("decode" if number % 2 else "prefill", [call(None, 0, 9_000_000, call("norm", 0, 1_000_000))])
    steps.add("decode", [])  # nothing in it was timed
    assert len(steps) == host_steps.KEPT
    assert {keys: calls for keys, (calls, _) in steps.times().items()} == {
        ("prefill", "norm"): host_steps.KEPT // 2,
        ("decode", "norm"): host_steps.KEPT // 2,
    }
