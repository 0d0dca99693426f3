"""Tests of the benchmark that compares variants of a step with the bare step."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from benchmarks.beside_bare import Variant, median_of, run_beside_bare, run_beside_plain


class World:
    """A fake step and a fake clock that only this step advances. Each variant of the step has its own duration."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpu_ns = 0
        self.step_ns = 1000
        self.is_first = False  # True for the first step after a change of the variant
        monkeypatch.setattr("time.thread_time_ns", lambda: self.cpu_ns)

    def step(self) -> None:
        self.cpu_ns += 100 * self.step_ns if self.is_first else self.step_ns
        self.is_first = False

    def switch(self, step_ns: int) -> Callable[[], Callable[[], None]]:
        def begin() -> Callable[[], None]:
            self.step_ns, self.is_first = step_ns, True
            return end

        def end() -> None:
            self.cpu_ns += 1_000_000  # CPU time outside steps

        return begin

    def run(self, *variants: Variant) -> float:
        bare = self.switch(1000)
        return run_beside_bare(self.step, bare, variants, seconds=0, settle=1, timed=4)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.mark.slow
def test_a_ratio_is_that_of_steps_that_have_settled_and_of_no_switch(world: World) -> None:
    again, dearer = Variant(world.switch(1000)), Variant(world.switch(1100))
    assert world.run(again, dearer) == 1000
    assert (again.ratios, dearer.ratios) == ([1.0], [pytest.approx(1.1)])


@pytest.mark.slow
def test_what_a_recorded_step_adds_is_its_own_and_what_those_after_it_pay(world: World) -> None:
    told: list[bool] = []
    # Distance from the recorded step -> time of the step in ns. All other steps take 1,000 ns.
    pays = {0: 3000, 1: 1500}

    def tell(is_recorded: bool) -> None:
        told.append(is_recorded)
        since = len(told) - 1 - told.index(True) if True in told else -1
        world.step_ns = pays.get(since, 1000)

    found = run_beside_plain(world.step, tell, seconds=0)
    assert found.ratios == [pytest.approx(2.5)]
    assert told.count(True) == 1
    assert told[-1] is False  # later steps are not recorded


def test_the_median_is_inside_its_interval_also_if_several_are_combined() -> None:
    one = Variant(lambda: lambda: None, ratios=[1.0, 1.01, 1.02, 1.5, 1.01])
    other = Variant(lambda: lambda: None, ratios=[2.0])
    found = median_of(one)
    assert (found.median, found.low <= 1.01 <= found.high) == (1.01, True)
    assert found.high > found.low
    assert median_of(one, other, made=lambda a, b: b - a).median == pytest.approx(0.99)


@pytest.mark.slow
def test_garbage_is_collected_again_behind_a_run_that_failed(world: World) -> None:
    def fails() -> Callable[[], None]:
        raise OSError("no variant")

    with pytest.raises(OSError, match="no variant"):
        world.run(Variant(fails))
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
