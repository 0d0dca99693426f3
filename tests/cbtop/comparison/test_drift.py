"""Tests of steps that become longer during a run: the explanation is a growing cache, a warm-up or drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cbtop.comparison.drift import Drift, Thirds, drift_of, without_pauses
from cbtop.comparison.noise import Figure
from cbtop.comparison.run_diff import diff_of
from cbtop.comparison.runs import Run, part_of
from cbtop.comparison.step_blocks import StepBlocks
from tests.cbtop.comparison.made_runs import STEADY, Noise, made_batch, made_run, made_table
from tests.representatives import first_by_default

LATE = replace(STEADY, late=0.3)


def drift(bases: Sequence[Run], now: Run) -> Drift:
    (part,) = diff_of(bases, [now]).parts
    assert part.drift is not None
    return part.drift


def three(noise: Noise = STEADY, steps: int = 120, **changed: object) -> list[Run]:
    return [made_run(seed, noise, steps, **changed) for seed in (1, 2, 3)]


def thirds(first_us: float, last_us: float, cached: tuple[float, float] | None = None, error: float = 1.0) -> Thirds:
    return Thirds(Figure(first_us, error, 20), Figure(last_us, error, 20), cached)


def test_steps_that_take_longer_in_the_last_two_fifths_are_drift() -> None:
    found = drift(three(), made_run(4, LATE, 120))
    assert found.is_slower
    assert found.change.now == pytest.approx(1.3, abs=0.02)
    assert found.base_ratios == pytest.approx([1.0] * 3, abs=0.02)
    assert abs(found.change.delta - 0.3) < found.change.half
    assert found.base_runs == 3
    assert drift(three()[:1], made_run(4, LATE, 120)).base_runs == 1


def test_steps_that_become_shorter_are_no_drift_and_nor_is_what_all_runs_do() -> None:
    assert not drift(three(), made_run(4, replace(STEADY, late=-0.3), 120)).is_slower
    assert drift(three(), made_run(4, replace(STEADY, late=-0.3), 120)).percent == 0
    found = drift(three(LATE), made_run(4, LATE, 120))
    assert found.base_ratios == pytest.approx([1.3] * 3, abs=0.03)
    assert not found.is_slower
    assert not drift(three(LATE), made_run(4, STEADY, 120)).is_slower


def test_a_warm_up_of_either_side_is_no_drift() -> None:
    warm = replace(STEADY, warm_up=2.0)
    for before, now in ((STEADY, warm), (warm, STEADY)):
        found = drift(three(before), made_run(4, now, 120))
        assert not found.is_slower
        assert found.change.now == pytest.approx(1.0, abs=0.03)


@pytest.mark.slow
def test_base_runs_that_begin_slowly_make_no_drift_of_a_steady_run() -> None:
    found = drift(three(replace(STEADY, late=-0.3)), made_run(4, STEADY, 120))
    assert found.change.percent == pytest.approx(43, abs=4)
    assert (found.is_slower, found.percent) == (False, pytest.approx(0, abs=2))


@first_by_default("steps", [120, 160])
def test_a_growing_cache_is_no_drift_and_hides_none(steps: int) -> None:
    """Steps become longer because more positions are cached: the last third takes 1.2 times as long as the first."""
    grown = {"cached_from": 0, "us_a_position": 1.2}
    bases = three(**grown)
    first, last = bases[0].parts[0].thirds[0].first.mean, bases[0].parts[0].thirds[0].last.mean
    assert last / first > 1.15
    found = drift(bases, made_run(4, STEADY, steps, **grown))
    assert (*found.base_ratios, found.change.now) == pytest.approx([1.02] * 4, abs=0.02)
    assert not found.is_slower
    found = drift(bases, made_run(4, LATE, steps, **grown))
    assert found.is_slower
    assert found.change.now == pytest.approx(1.3, abs=0.06)


def test_the_growth_with_the_cache_is_taken_from_the_baseline() -> None:
    step = Figure(1000.0, 1.0, 20, slope=0.5)
    found = drift_of([thirds(1000.0, 1100.0, (0.0, 200.0))], [thirds(1000.0, 1300.0, (0.0, 200.0))], step, 1)
    assert found is not None
    assert found.base_ratios == pytest.approx((1050 / 1050,))
    assert found.change.now == pytest.approx(1250 / 1050)
    without = drift_of([thirds(1000.0, 1100.0)], [thirds(1000.0, 1300.0)], step, 1)
    assert without is not None
    assert (without.change.before, without.change.now) == pytest.approx((1.1, 1.3))
    unknown = drift_of([thirds(1000.0, 1100.0, (0.0, 200.0))], [thirds(1000.0, 1300.0, (0.0, 200.0))], None, 1)
    assert unknown == without


def test_drift_is_named_beyond_a_tenth_and_its_interval() -> None:
    bases = [thirds(1000.0, ratio * 1000.0) for ratio in (0.99, 1.0, 1.01)]
    for ratio, is_slower in ((1.09, False), (1.5, True)):
        found = drift_of(bases, [thirds(1000.0, 1000.0 * ratio)], None, 1)
        assert found is not None
        assert (found.is_slower, found.percent) == (is_slower, pytest.approx(100 * (ratio - 1)))
    unsure = drift_of(bases, [thirds(1000.0, 1500.0, error=150.0)], None, 1)
    assert unsure is not None
    assert not unsure.is_slower
    scattered = drift_of([thirds(1000.0, one * 1000.0) for one in (0.9, 1.0, 1.1)], [thirds(1000.0, 1500.0)], None, 1)
    assert scattered is not None
    assert not scattered.is_slower


def test_what_is_not_known_of_one_side_is_no_drift() -> None:
    one = [thirds(1000.0, 1000.0)]
    assert drift_of([], one, None, 1) is drift_of(one, [], None, 1) is None
    for slope in (20.0, 50.0):  # These slopes are so steep that the last third would get a duration of zero or less.
        steep = Figure(1000.0, 1.0, 20, slope=slope)
        assert drift_of([thirds(1000.0, 1000.0, (0.0, 100.0))], one, steep, 1) is None


@pytest.mark.parametrize(("last", "is_known"), [(49, True), (50, True), (51, True), (52, False)])
def test_thirds_with_other_numbers_of_tokens_tell_no_drift(last: int, is_known: bool) -> None:
    """Steps have 50 tokens in the first half of the run and `last` tokens in the second.

    Drift is reported only if the two numbers of tokens differ by at most 2 %.
    """
    batch, table = made_batch(1, STEADY, 60), made_table()
    elements = np.where(np.arange(len(batch.node)) < len(batch.node) // 2, 50, last) * batch.elements
    blocks = StepBlocks(table)
    blocks.take(replace(batch, elements=elements))
    ((work, found),) = blocks.blocks().items()
    part = part_of(table, work, found)
    assert part is not None
    assert (len(part.thirds) == 1) is is_known


def test_thirds_need_sixty_steps() -> None:
    assert [len(made_run(1, STEADY, steps).parts[0].thirds) for steps in (56, 60, 120)] == [0, 1, 1]
    (part,) = diff_of(three(steps=56), [made_run(4, LATE, 120)]).parts
    assert part.drift is None


def test_a_pause_before_a_step_is_no_time_of_steps() -> None:
    between = np.array([10.0, 11.0, 9.0, 10.0, 500.0])
    assert without_pauses(between, np.ones(5)).tolist() == [10.0, 11.0, 9.0, 10.0, 14.0]
