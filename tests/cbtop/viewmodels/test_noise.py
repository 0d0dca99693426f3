"""Chance alone makes no change, however alike steps are to their neighbours; what is planted is found."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import lgamma

import numpy as np
import pytest

from cbtop.viewmodels.comparison import compare
from cbtop.viewmodels.noise import CONFIDENCE, LEAST_PERCENT, Change, Figure, change, figures, learned
from tests.cbtop.viewmodels.made_snapshots import DOWN, Noise, made

COMPARISONS = 200
NOISES = {
    "no memory": Noise(memory=0.0),
    "of ten steps": Noise(memory=0.9),
    "of twenty steps, and louder": Noise(memory=0.95, machine=0.02, call=0.05),
    "of fifty steps, and louder": Noise(memory=0.98, machine=0.02, call=0.05),
}


@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(noise, id=name, marks=() if name == "of fifty steps, and louder" else pytest.mark.slow)
        for name, noise in NOISES.items()
    ],
)
def test_of_two_hundred_comparisons_of_one_stationary_process_at_most_one_in_a_hundred_finds_a_change(
    noise: Noise,
) -> None:
    found = 0
    for seed in range(COMPARISONS):
        comparison = compare(made(2 * seed, noise), made(2 * seed + 1, noise), "decode")
        found += any(one.change.is_beyond_noise for one in comparison.changes)
    print(f"{found} of {COMPARISONS} comparisons of the same find a change")  # noqa: T201
    assert found <= COMPARISONS // 100


@pytest.mark.parametrize(
    ("noise", "share"),
    [
        pytest.param(Noise(memory=0.0), 0.97, id="no memory", marks=pytest.mark.slow),
        pytest.param(Noise(memory=0.9), 0.95, id="of ten steps"),
    ],
)
def test_ten_percent_on_one_brick_of_one_layer_is_named(noise: Noise, share: float) -> None:
    named = wrong = 0
    for seed in range(COMPARISONS):
        comparison = compare(made(2 * seed, noise), made(2 * seed + 1, noise, slower=1.1), "decode")
        worst = [(one.brick, one.layer) for one in comparison.slower[:1]]
        named += worst == [(DOWN, "Layer 5")]
        wrong += bool(worst) and worst != [(DOWN, "Layer 5")]
    print(f"{named} of {COMPARISONS} planted changes are named, {wrong} times another is")  # noqa: T201
    assert named >= share * COMPARISONS
    assert wrong == 0


def test_an_interval_is_students_shared_out_among_what_is_compared() -> None:
    """Two means of ten blocks each: 18 degrees of freedom. From the tables: 2.878 at 99 %, 3.922 at 99.9 %."""
    one = Figure(100.0, 1.0, 10)
    for compared, quantile in ((1, 2.878), (10, 3.922)):
        assert change(one, one, compared).half == pytest.approx(quantile * 2**0.5, rel=1e-3)
    # 4 degrees: 4.604, where all of the noise is in one of them.
    assert change(Figure(100.0, 0.0, 5), Figure(100.0, 1.0, 5), 1).half == pytest.approx(4.604, rel=1e-3)


def beyond(t: float, freedom: float) -> float:
    """The probability that a Student's t is beyond t, either way: its density, by Simpson's rule over the angle
    whose tangent is t / sqrt(freedom)."""
    angles = np.linspace(np.arctan(t / np.sqrt(freedom)), np.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    weights = np.array([1.0, *[4.0, 2.0] * 9_999, 4.0, 1.0])
    share = np.exp(lgamma((freedom + 1) / 2) - lgamma(freedom / 2)) / np.sqrt(np.pi)
    return float(2 * share * (weights @ density) * (angles[1] - angles[0]) / 3)


@pytest.mark.parametrize("compared", [1, 3, 40, 2_000])
@pytest.mark.parametrize("blocks", [5, 6, 10, 30, 200])
def test_the_quantile_is_students_for_few_blocks_and_many_and_however_many_are_compared(
    blocks: int, compared: int
) -> None:
    half = change(Figure(100.0, 0.0, blocks), Figure(100.0, 1.0, blocks), compared).half
    assert beyond(half, blocks - 1) == pytest.approx((1 - CONFIDENCE) / compared, rel=5e-5)


def test_two_means_have_welchs_degrees_of_freedom_rounded_down_to_a_quarter() -> None:
    found = change(Figure(100.0, 1.0, 10), Figure(104.0, 2.0, 20), 1)
    freedom = 5.0**2 / (1.0 / 9 + 4.0**2 / 19)  # 26.2
    assert (found.before, found.now) == (100.0, 104.0)
    assert beyond(found.half / 5.0**0.5, int(freedom * 4) / 4) == pytest.approx(1 - CONFIDENCE, rel=5e-5)


def test_the_error_of_a_ratio_is_that_of_block_means_that_are_worth_fewer_where_neighbours_are_alike() -> None:
    """Of one column by hand: residuals d = amount - mean * weight, correlation r of neighbours less its bias."""
    amount, weight = np.array([11.0, 24.0, 30.0, 41.0, 49.0, 63.0]), np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    mean = 218.0 / 21.0
    d = [a - mean * w for a, w in zip(amount, weight, strict=True)]
    squares = sum(one * one for one in d)
    r = sum(one * next_one for one, next_one in pairwise(d)) / squares
    r += (1 + 4 * r) / 6
    r = min(max(r, 0.0), 0.9)
    worth = max(2.0, 6 * (1 - r) / (1 + r))
    (found,) = figures(amount[:, np.newaxis], weight)
    assert found.mean == pytest.approx(mean)
    assert found.error == pytest.approx((squares / (6 * (1 - 1 / worth)) / worth) ** 0.5 / 3.5)
    assert figures(np.zeros((6, 0)), weight) == []


def test_changes_are_given_in_percent_of_what_was_and_of_nothing_there_are_none() -> None:
    one = Change(50.0, 40.0, 5.0)
    assert (one.delta, one.percent, one.half_percent, one.noise_percent) == (-10.0, -20.0, 10.0, 10.0)
    assert Change(50.0, 40.0, 1.0).noise_percent == LEAST_PERCENT
    assert not Change(100.0, 103.0, 0.0).is_beyond_noise  # as much as LEAST_PERCENT is none yet
    of_nothing = Change(0.0, 40.0, 1.0)
    assert (of_nothing.percent, of_nothing.half_percent, of_nothing.noise_percent) == (None, None, None)


def test_a_median_that_moved_by_three_percent_has_moved() -> None:
    assert Change(100.0, 150.0, 1.0, (50.0, 51.5)).is_beyond_noise
    assert not Change(100.0, 150.0, 1.0, (50.0, 51.49)).is_beyond_noise
    assert Change(100.0, 50.0, 1.0, (50.0, 48.5)).is_beyond_noise
    assert not Change(100.0, 50.0, 1.0, (50.0, 48.51)).is_beyond_noise


def test_figures_without_any_noise_have_no_interval() -> None:
    (steady,) = figures(np.full((10, 1), 50.0), np.full(10, 10.0))
    assert steady == Figure(5.0, 0.0, 10)
    assert change(steady, steady, 5).half == 0


def test_a_mean_is_that_of_all_steps_however_many_a_block_has() -> None:
    (found,) = figures(np.array([[10.0], [20.0], [60.0], [10.0], [20.0]]), np.array([1.0, 2.0, 6.0, 1.0, 2.0]))
    assert (found.mean, found.error) == (10.0, 0.0)


def test_blocks_that_are_alike_their_neighbours_count_as_fewer() -> None:
    weight = np.ones(10)
    jumps = np.array([[1.0, 3.0] * 5]).T
    steps = np.sort(jumps, axis=0)
    assert figures(steps, weight)[0].error > 2 * figures(jumps, weight)[0].error


def test_no_figure_passes_for_steadier_than_half_of_those_beside_it() -> None:
    rng = np.random.default_rng(0)
    noisy = 100 * (1 + 0.05 * rng.standard_normal((10, 9)))
    steady = np.full((10, 1), 1_000.0)
    found = figures(np.hstack((noisy, steady)), np.ones(10))
    errors = sorted(one.error / one.mean for one in found[:9])
    assert found[9].error / found[9].mean == pytest.approx(errors[4], rel=0.2)


def test_what_machines_do_by_themselves_is_no_change_however_sure_it_is() -> None:
    assert not Change(100.0, 100.0 + 0.9 * LEAST_PERCENT, 0.1).is_beyond_noise
    assert Change(100.0, 100.0 + 1.1 * LEAST_PERCENT, 0.1).is_beyond_noise
    assert not Change(100.0, 110.0, 10.5).is_beyond_noise
    assert not Change(0.0, 110.0, 0.1).is_beyond_noise  # of nothing there are no percent


def test_what_moves_no_median_call_is_no_change_nor_is_what_moves_it_the_other_way() -> None:
    assert not Change(100.0, 150.0, 1.0, (50.0, 51.0)).is_beyond_noise
    assert not Change(100.0, 150.0, 1.0, (50.0, 40.0)).is_beyond_noise
    assert Change(100.0, 150.0, 1.0, (50.0, 55.0)).is_beyond_noise
    assert Change(100.0, 50.0, 1.0, (50.0, 40.0)).is_beyond_noise


def test_what_all_places_share_is_no_part_of_a_change_beside_them() -> None:
    """All take 1.06 times as long, one 1.166 times: known to 6 % as it is, and to 1 % beside all others."""
    before = Figure(100.0, 4.0, 60, own_error=0.5)
    now = replace(before, mean=116.6)
    found = change(before, now, 30, 1.06)
    assert found.own is not None
    assert (found.percent, found.own.percent) == (pytest.approx(16.6), pytest.approx(10.0))
    assert found.half > 16.6 > found.own.half
    assert found.own.half == pytest.approx(found.half / 8, rel=0.03)
    assert (found.is_beyond_noise, found.is_beyond_others) == (True, True)
    as_all = change(before, replace(before, mean=106.0), 30, 1.06)
    assert (as_all.is_beyond_noise, as_all.is_beyond_others) == (False, False)


def test_what_stays_as_it_was_while_all_others_become_faster_is_not_slower() -> None:
    one = Figure(100.0, 4.0, 60, own_error=0.5)
    for now, shared, is_slower in ((100.0, 0.9, False), (102.9, 0.9, False), (103.1, 0.9, True), (97.0, 0.9, False)):
        assert change(one, replace(one, mean=now), 30, shared).is_beyond_others is is_slower


def test_each_of_two_looks_has_half_of_the_chance_and_what_is_no_surer_beside_all_others_is_not_looked_at() -> None:
    one = Figure(100.0, 1.0, 30)
    told = replace(one, own_error=0.9)
    alone, twice = change(one, one, 5), change(told, told, 5, 1.0)
    assert alone.own is None
    assert twice.own is not None
    assert twice.half == pytest.approx(change(one, one, 10).half)
    assert twice.own.half == pytest.approx(0.9 * twice.half)
    assert change(replace(one, own_error=1.1), replace(one, own_error=1.1), 5, 1.0).own is None
    assert change(told, told, 5).own is None
    assert change(told, one, 5, 1.0).own is None


def test_of_runs_that_a_machine_moves_alike_is_learned_how_they_scatter_beside_each_other() -> None:
    """Runs 10 % apart, in which each place is within one percent of where it usually is."""
    paces = [0.9, 1.0, 1.1]
    rows = [[100.0 * pace * off for pace, off in zip(paces, offs, strict=True)] for offs in ((1.01, 1.0, 0.99),) * 3]
    figures_of = [[Figure(one, 0.1, 20, own_error=0.05) for one in row] for row in rows]
    for found in learned(figures_of, paces):
        assert found.scatter == pytest.approx(9.0, rel=0.03)
        assert found.own_scatter == pytest.approx(1.0, rel=0.01)
        assert found.own_error == pytest.approx(1.0 / 3**0.5, rel=0.01)
    assert [one.own_error for one in learned(figures_of)] == [None] * 3
    figures_of[1][2] = replace(figures_of[1][2], own_error=None)
    assert [one.own_error is None for one in learned(figures_of, paces)] == [False, True, False]
