"""Tests of the host's times of calls: the time of a call excludes calls inside it, and the cost of measuring."""

from __future__ import annotations

import gc
import time
from _thread import get_ident

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import host_steps  # noqa: E402
from cbtop.profiler.instrument.capturing import captures  # noqa: E402
from cbtop.profiler.instrument.host_steps import HostCalls, HostSteps, NotingCost, noting_cost  # noqa: E402

LAYER = (0, "layer")
NOTHING = NotingCost(0, 0)


def calls_of(*calls: tuple[object, int, int, int]) -> HostCalls:
    """Return the timed calls of a step. Each call is (key, index of the call around it, begin, end)."""
    found = HostCalls(lambda brick: brick, lambda ended: None)
    for key, around, begin_ns, end_ns in calls:
        found.keys.append(key)
        found.around.append(around)
        found.begins_ns.append(begin_ns)
        found.ends_ns.append(end_ns)
    return found


def test_a_brick_s_time_is_without_the_bricks_in_it_and_the_notes() -> None:
    calls = calls_of(
        (None, -1, 0, 200),
        (LAYER, 0, 0, 150),
        ("outer", 1, 10, 100),
        ("inner", 2, 20, 40),
        ("inner", 2, 50, 60),
        ("head", 0, 160, 161),
    )
    assert calls.times(NotingCost(inside_ns=2, outside_ns=3)) == {
        (LAYER, "outer"): [90 - 30 - 2 * 3 - 2],
        (LAYER, "outer", "inner"): [20 - 2, 10 - 2],
        ("head",): [0],  # The call takes less than the assumed cost of measuring it, so its time is zero.
    }


def test_a_call_that_sleeps_is_timed_as_long_as_it_sleeps() -> None:
    given: list[HostCalls] = []
    calls = HostCalls(lambda brick: brick, given.append)
    assert calls.begin("outside of the model", None) is None
    around = calls.begin(None, None)
    for _ in range(20):
        span = calls.begin("sleeps", None)
        time.sleep(0.002)
        calls.end(span)
        calls.end(calls.begin("empty", None))
    calls.begin("never ends", None)
    calls.end(around)
    calls.end_step()
    times = given[0].times(NOTHING)
    assert len(times[("sleeps",)]) == 20
    assert min(times[("sleeps",)]) >= 2_000_000
    assert sorted(times[("empty",)])[10] < 20_000
    assert times[("never ends",)] == [0]


def test_noting_calls_makes_nothing_that_is_collected() -> None:
    calls = HostCalls(lambda brick: brick, lambda ended: None)
    around = calls.begin(None, None)
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        for _ in range(200):
            calls.end(calls.begin("brick", None))
        assert gc.get_count()[0] - before < 20
    finally:
        gc.enable()
    calls.end(around)


def test_the_cost_of_a_note_is_measured_and_leaves_nothing() -> None:
    noting_cost.cache_clear()
    cost = noting_cost()
    assert 0 < cost.inside_ns < 1_000_000
    assert 0 < cost.outside_ns < 1_000_000
    assert get_ident() not in captures


def test_the_latest_steps_are_together_by_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_steps, "noting_cost", lambda: NOTHING)
    steps = HostSteps()
    for number in range(host_steps.KEPT + 5):
        steps.add("decode" if number % 2 else "prefill", calls_of((None, -1, 0, 90), ("norm", 0, 10, 20 + number)))
    steps.add("decode", calls_of())  # A step in which no call was timed.
    assert len(steps) == host_steps.KEPT
    assert steps.times() == {
        ("decode", "norm"): [10.0 + number for number in range(5, 17) if number % 2],
        ("prefill", "norm"): [10.0 + number for number in range(5, 17) if not number % 2],
    }


def test_a_function_inside_the_same_function_is_a_part_of_its_brick() -> None:
    calls = HostCalls(lambda brick: brick, lambda ended: None)
    captures[get_ident()] = calls
    try:
        assert calls.innermost is None
        around = calls.begin(None, None)
        span = calls.start_brick("attention")
        assert calls.position.scope.key == "attention"
        assert calls.position.step is calls
        calls.stop_brick(span, 1)
        assert calls.innermost is None
        calls.end(around)
    finally:
        captures.pop(get_ident())
