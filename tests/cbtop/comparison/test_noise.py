"""Tests of noise: noise alone is not reported as a change, even if neighbouring steps are similar.

Planted changes are found.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import lgamma

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cbtop.comparison.comparison import compare
from cbtop.comparison.noise import (
    CONFIDENCE,
    LEAST_LEARNED_PERCENT,
    LEAST_PERCENT,
    Change,
    Figure,
    change,
    figures,
    half_of,
    learned,
)
from tests.cbtop.viewmodels.made_snapshots import DOWN, Noise, made
from tests.representatives import first_by_default

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
@first_by_default("comparisons", [COMPARISONS // 2, COMPARISONS])
def test_at_most_one_of_100_comparisons_of_a_stationary_process_has_a_change(noise: Noise, comparisons: int) -> None:
    found = 0
    for seed in range(comparisons):
        comparison = compare(made(2 * seed, noise), made(2 * seed + 1, noise), "decode")
        found += any(one.change.is_beyond_noise for one in comparison.changes)
    print(f"{found} of {comparisons} comparisons of the same find a change")  # noqa: T201
    assert found <= comparisons // 100


@pytest.mark.parametrize(
    ("noise", "share"),
    [
        pytest.param(Noise(memory=0.0), 0.97, id="no memory", marks=pytest.mark.slow),
        pytest.param(Noise(memory=0.9), 0.95, id="of ten steps"),
    ],
)
@first_by_default("comparisons", [COMPARISONS // 4, COMPARISONS])
def test_ten_percent_on_one_brick_of_one_layer_is_named(noise: Noise, share: float, comparisons: int) -> None:
    named = wrong = 0
    for seed in range(comparisons):
        comparison = compare(made(2 * seed, noise), made(2 * seed + 1, noise, slower=1.1), "decode")
        worst = [(one.brick, one.layer) for one in comparison.slower[:1]]
        named += worst == [(DOWN, "Layer 5")]
        wrong += bool(worst) and worst != [(DOWN, "Layer 5")]
    print(f"{named} of {comparisons} planted changes are named, {wrong} times another is")  # noqa: T201
    assert named >= share * comparisons
    assert wrong == 0


def test_an_interval_is_students_shared_out_among_what_is_compared() -> None:
    """The interval of a change uses quantiles of Student's t for 18 degrees of freedom:

    2.878 at 99 %, 3.922 at 99.9 %.
    """
    one = Figure(100.0, 1.0, 10)
    for compared, quantile in ((1, 2.878), (10, 3.922)):
        assert change(one, one, compared).half == pytest.approx(quantile * 2**0.5, rel=1e-3)
    # Only one of the two runs has noise, so there are 4 degrees of freedom. For 4 degrees of freedom, Student's t is
    # 4.604 at 99 %.
    assert change(Figure(100.0, 0.0, 5), Figure(100.0, 1.0, 5), 1).half == pytest.approx(4.604, rel=1e-3)


def beyond(t: float, freedom: float) -> float:
    """Return the two-sided probability that Student's t exceeds t.

    Simpson's rule integrates the density over the angle whose tangent is t / sqrt(freedom).
    """
    angles = np.linspace(np.arctan(t / np.sqrt(freedom)), np.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    weights = np.array([1.0, *[4.0, 2.0] * 9_999, 4.0, 1.0])
    share = np.exp(lgamma((freedom + 1) / 2) - lgamma(freedom / 2)) / np.sqrt(np.pi)
    return float(2 * share * (weights @ density) * (angles[1] - angles[0]) / 3)


@pytest.mark.parametrize("compared", [1, 3, 40, 2_000])
@pytest.mark.parametrize("blocks", [5, 6, 7, 10, 30, 200])
def test_the_quantile_is_students_for_any_number_of_blocks_and_comparisons(blocks: int, compared: int) -> None:
    half = change(Figure(100.0, 0.0, blocks), Figure(100.0, 1.0, blocks), compared).half
    assert beyond(half, blocks - 1) == pytest.approx((1 - CONFIDENCE) / compared, rel=2e-5)


@pytest.mark.parametrize(
    ("error", "blocks", "freedom"), [(2.0, 20, 26.0), (1.0, 20, 24.25), (4.0, 5, 4.5), (2.7, 5, 5.0), (2.4, 5, 5.25)]
)
def test_two_means_have_welchs_degrees_of_freedom_rounded_down_to_a_quarter(
    error: float, blocks: int, freedom: float
) -> None:
    found = change(Figure(100.0, 1.0, 10), Figure(104.0, error, blocks), 1)
    variance = 1 + error**2
    assert freedom == int(4 * variance**2 / (1 / 9 + error**4 / (blocks - 1))) / 4
    assert (found.before, found.now) == (100.0, 104.0)
    assert beyond(found.half / variance**0.5, freedom) == pytest.approx(1 - CONFIDENCE, rel=2e-5)


def alike_their_neighbours(seed: int, blocks: int, columns: int = 3) -> NDArray[np.float64]:
    """Return noise with shape (blocks, columns).

    Neighbouring blocks are correlated, and the columns have different scales.
    """
    rng = np.random.default_rng(seed)
    memory = rng.uniform(-0.5, 0.9)
    found = rng.standard_normal((blocks, columns))
    for at in range(1, blocks):
        found[at] += memory * found[at - 1]
    return found * rng.uniform(0.5, 2.0, columns)


@given(st.integers(0, 2**32), st.integers(5, 19), st.booleans())
def test_a_ratio_has_the_error_of_block_means_and_like_neighbours_count_less(
    seed: int, blocks: int, is_line: bool
) -> None:
    """The test computes the expected values itself, from the residuals and the correlation of neighbours.

    The correlation is corrected for bias.
    """
    rng = np.random.default_rng(seed)
    weight = rng.uniform(1.0, 6.0, blocks)
    along = rng.uniform(0.0, 100.0, blocks)
    amount = weight[:, None] * (100.0 + along[:, None] * [0.5, 0.0, 2.0]) + alike_their_neighbours(seed, blocks)
    middle = sum(weight * along) / sum(weight)
    spread = sum(weight * (along - middle) ** 2)
    fitted, r, squares = 1 + is_line, [], []
    means = [sum(column) / sum(weight) for column in amount.T]
    slopes = [sum((along - middle) * column) / spread if is_line else 0.0 for column in amount.T]
    for column, mean, slope in zip(amount.T, means, slopes, strict=True):
        d = (column - weight * (mean + slope * (along - middle))).tolist()
        squares.append(sum(one * one for one in d))
        alike = sum(one * next_one for one, next_one in pairwise(d)) / squares[-1]
        r.append(alike + fitted * (1 + 4 * alike) / blocks)
    usual = min(max(sorted(r)[1], 0.0), 0.9)
    worth = max(2.0, blocks * (1 - usual) / (1 + usual))
    errors = [
        (one / (blocks * max(1 - fitted / worth, 0.5)) / worth) ** 0.5 / float(np.mean(weight)) for one in squares
    ]
    least = sorted(error / mean for error, mean in zip(errors, means, strict=True))[1]
    found = figures(amount, weight, along if is_line else None)
    assert [one.mean for one in found] == pytest.approx(means)
    assert [one.slope for one in found] == pytest.approx(slopes)
    expected = [max(error, least * mean) for error, mean in zip(errors, means, strict=True)]
    assert [one.error for one in found] == pytest.approx(expected)
    # The result reports the degrees of freedom plus 1 as its number of blocks.
    assert {one.blocks for one in found} == {blocks + 1 - fitted}
    of_slope = blocks**0.5 * float(np.mean(weight)) * sum((along - middle) ** 2) ** 0.5 / spread if is_line else 0.0
    assert [one.slope_error for one in found] == pytest.approx([error * of_slope for error in expected])


def test_of_no_columns_there_are_no_figures_and_of_nothing_nothing() -> None:
    assert figures(np.zeros((6, 0)), np.ones(6)) == []
    assert figures(np.zeros((20, 2)), np.ones(20)) == [Figure(0.0, 0.0, 20)] * 2


def test_a_line_has_the_textbook_error_if_its_blocks_are_not_alike() -> None:
    """The expected error is that of ordinary least squares with n - 2 degrees of freedom."""
    along = np.arange(10.0)
    amount = 50.0 + 3.0 * along + [1, -1, 1, -1, 1, -1, 1, -1, 1, -1]
    slope, height = np.polyfit(along, amount, 1)
    s = (((amount - height - slope * along) ** 2).sum() / 8) ** 0.5
    (found,) = figures(4 * amount[:, None], np.full(10, 4.0), along)
    assert (found.mean, found.slope) == (pytest.approx(amount.mean()), pytest.approx(slope))
    assert found.error == pytest.approx(s / 10**0.5)
    assert found.slope_error == pytest.approx(s / ((along - 4.5) ** 2).sum() ** 0.5)


def test_where_blocks_all_lie_at_one_place_there_is_no_line_through_them() -> None:
    """The mean number of cached positions is equal in all blocks except for rounding."""
    for thirds in range(1, 100):
        amount = 100.0 + alike_their_neighbours(thirds, 12)
        weight = np.random.default_rng(thirds).integers(1, 30, 12).astype(float)
        assert figures(amount, weight, np.full(12, thirds / 3)) == figures(amount, weight)


@given(st.integers(0, 2**32), st.integers(20, 45))
def test_a_mean_is_no_surer_than_of_double_blocks_and_the_last_has_the_rest(seed: int, blocks: int) -> None:
    weight = np.random.default_rng(seed).uniform(1.0, 2.0, blocks)
    amount = 100.0 * weight[:, None] + alike_their_neighbours(seed, blocks, 1)

    def twice_as_long(each: NDArray[np.float64]) -> NDArray[np.float64]:
        pairs = [each[at : at + 2].sum(axis=0) for at in range(0, len(each) - 1, 2)]
        if len(each) % 2:
            pairs[-1] = each[-3:].sum(axis=0)
        return np.array(pairs)

    (short,), (long,) = figures(amount, weight), figures(twice_as_long(amount), twice_as_long(weight))
    assert short.mean == pytest.approx(long.mean)
    assert short.error >= long.error * (1 - 1e-9)
    # If the error comes from pairs of blocks, the reported number of blocks is the number of pairs.
    assert short.blocks == blocks or (short.error, short.blocks) == (pytest.approx(long.error), long.blocks)


def test_twenty_unlike_blocks_give_their_own_scatter_and_nineteen_do_not() -> None:
    for blocks, is_as_others in ((19, True), (20, False)):
        sign = np.resize([1.0, -1.0], blocks)
        loud, louder, steady = (one.error for one in figures(100 + np.outer(sign, [1.0, 3.0, 0.0]), np.ones(blocks)))
        assert (steady == pytest.approx(loud, rel=0.01)) is is_as_others
        assert louder == pytest.approx(3 * loud, rel=0.01)


@given(st.integers(0, 2**32), st.integers(5, 45), st.sampled_from([1e-6, 1e-3, 1e3]))
def test_whatever_the_unit_figures_and_changes_are_the_same(seed: int, blocks: int, unit: float) -> None:
    rng = np.random.default_rng(seed)
    weight, along, pace = rng.uniform(1.0, 2.0, blocks), rng.uniform(0.0, 9.0, blocks), rng.uniform(0.9, 1.1, blocks)
    amount = (20.0 + along[:, None] + alike_their_neighbours(seed, blocks)) * pace[:, None]
    one, other = (figures(each, weight, along, pace) for each in (amount, unit * amount))
    for name in ("mean", "error", "slope", "slope_error", "own_error"):
        assert [getattr(each, name) for each in other] == pytest.approx([unit * getattr(each, name) for each in one])
    (before, *runs), (same_before, *same_runs) = (learned([each, each[::-1], each[:1] * 3]) for each in (one, other))
    for figure, same in zip((before, *runs), (same_before, *same_runs), strict=True):
        assert (same.error, same.scatter) == (
            pytest.approx(unit * figure.error),
            pytest.approx(unit * figure.scatter),
        )
    # In another unit of `along`, the slope changes by the inverse factor.
    elsewhere = figures(amount, weight, along / unit, pace)
    for name in ("slope", "slope_error"):
        assert [getattr(each, name) for each in elsewhere] == pytest.approx(
            [unit * getattr(each, name) for each in one]
        )
    assert [each.own_error for each in elsewhere] == pytest.approx([each.own_error for each in one])
    found, as_well = change(before, one[0], 7, 1.1), change(same_before, other[0], 7, 1.1)
    assert as_well.percent == pytest.approx(found.percent)
    assert as_well.noise_percent == pytest.approx(found.noise_percent)
    assert as_well.is_beyond_noise is found.is_beyond_noise


def test_told_by_others_alone_means_beyond_noise_only_relative_to_them() -> None:
    own = Change(100.0, 110.0, 1.0)
    for one, is_told in (
        (Change(100.0, 110.0, 20.0, own=own), True),
        (Change(0.1, 0.11, 0.02, own=Change(0.1, 0.11, 0.001)), True),
        # The measured time by itself also shows this change beyond noise. A comparison with other bricks is not
        # needed.
        (Change(100.0, 110.0, 1.0, own=own), False),
        (Change(100.0, 110.0, 20.0), False),
        (Change(100.0, 110.0, 1.0), False),
        (Change(100.0, 90.0, 20.0, own=own), False),
        (Change(100.0, 110.0, 20.0, own=Change(100.0, 110.0, 20.0)), False),
    ):
        assert one.is_told_by_others is is_told
    # A change must have a minimum size. The minimum is smaller if several base runs show how much runs vary.
    small = Change(100.0, 102.0, 20.0, own=Change(100.0, 110.0, 1.0))
    assert (small.is_beyond_others, replace(small, least_percent=1.0).is_beyond_others) == (False, True)
    assert not replace(small, now=103.0).is_beyond_others


def test_a_change_is_of_median_calls_where_both_sides_know_theirs() -> None:
    known, unknown = Figure(100.0, 1.0, 10, median_us=5.0), Figure(100.0, 1.0, 10)
    assert change(known, replace(known, median_us=6.0), 1).medians_us == (5.0, 6.0)
    for before, now in ((known, unknown), (unknown, known), (unknown, unknown)):
        assert change(before, now, 1).medians_us is None


def test_a_single_run_is_no_surer_than_runs_scatter_and_few_runs_tell_little() -> None:
    """Student's t at 99.5 % is 4.773 for six runs (5 degrees of freedom). It is 14.089 for three runs (2 degrees of
    freedom).

    The two tests (of bricks, and of bricks of single layers) share an error of 1 %. Each test gets half, so the level
    is 99.5 %.
    """
    now = Figure(100.0, 0.1, 1_000)
    for runs, error, quantile in ((6, 1.0, 4.773), (6, 2.0, 4.773), (3, 1.0, 14.089)):
        found = change(Figure(100.0, 0.0, 1_000, scatter=error, runs=runs), now, 1)
        assert found.half == pytest.approx(quantile * error, rel=1e-3)
        assert found.error == error
        assert found.least_percent == LEAST_LEARNED_PERCENT == 1.0
    assert change(Figure(100.0, 0.0, 1_000, scatter=0.01, runs=6), now, 1).error == 0.1
    before = Figure(100.0, 0.0, 1_000, scatter=1.0, runs=6, own_error=0.0, own_scatter=0.5)
    beside = change(before, replace(now, own_error=0.1), 1, 1.0)
    assert beyond(beside.half, 5) == pytest.approx((1 - CONFIDENCE) / 4, rel=2e-5)
    assert beside.own is not None
    assert beside.own.half == pytest.approx(beside.half / 2)
    # If a thousand figures are compared, the interval is wide because each run has only a few blocks.
    assert change(replace(before, blocks=5), replace(now, error=1.0, blocks=5), 1_000).half > 15
    (one,) = learned([[now, now]])
    assert change(one, now, 1).least_percent == LEAST_LEARNED_PERCENT
    assert change(now, now, 1).least_percent == LEAST_PERCENT == 3.0


def test_several_runs_give_their_mean_how_sure_it_is_and_how_they_scatter() -> None:
    """The means of three runs are 2 apart. Their standard deviation is 2, so the error of the overall mean is 2 / √3.

    The overall error is never below the error of the runs themselves.
    """
    rows = [
        [Figure(mean, error, 10, 5.0 + mean, 2.0 + mean, error) for mean in (98.0, 100.0, 102.0)] for error in (1, 9)
    ]
    sure, unsure = learned(rows)
    for one, error, slope_error in ((sure, 2 / 3**0.5, 1 / 3**0.5), (unsure, 9 / 3**0.5, 9 / 3**0.5)):
        assert (one.mean, one.blocks, one.runs, one.median_us, one.slope) == (100.0, 30, 3, 105.0, 102.0)
        assert (one.scatter, one.error) == (pytest.approx(2.0), pytest.approx(error))
        assert (one.slope_error, one.own_error) == (pytest.approx(slope_error), None)
    (forgotten,) = learned([[*rows[0][:2], replace(rows[0][2], median_us=None)]])
    assert forgotten.median_us is None


def test_no_place_counts_as_less_scattered_than_half_of_those_next_to_it() -> None:
    off = ((0.0, 0.0, 0.0), (-1.0, 0.0, 1.0), (-2.0, 0.0, 2.0))
    rows = [[Figure(10.0 * (100 + by) / 100, 0.0, 10) for by in each] for each in off]
    nothing = [Figure(0.0, 0.0, 10)] * 3
    found = learned([*rows, nothing])
    assert [one.scatter for one in found] == [pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.2), 0.0]
    assert learned([nothing]) == [replace(nothing[0], blocks=30, runs=3)]


def test_changes_are_percentages_of_the_earlier_value_and_unknown_for_zero() -> None:
    one = Change(50.0, 40.0, 5.0)
    assert (one.delta, one.percent, one.half_percent, one.noise_percent) == (-10.0, -20.0, 10.0, 10.0)
    assert Change(50.0, 40.0, 1.0).noise_percent == LEAST_PERCENT
    assert not Change(100.0, 103.0, 0.0).is_beyond_noise  # A change of exactly LEAST_PERCENT still counts as noise.
    of_nothing = Change(0.0, 40.0, 1.0)
    assert (of_nothing.percent, of_nothing.half_percent, of_nothing.noise_percent) == (None, None, None)


def test_a_median_that_moved_by_three_percent_has_moved() -> None:
    assert Change(100.0, 150.0, 1.0, (50.0, 51.5)).is_beyond_noise
    assert not Change(100.0, 150.0, 1.0, (50.0, 51.49)).is_beyond_noise
    assert Change(0.1, 0.15, 0.001, (0.05, 0.0515001)).is_beyond_noise  # both values are in µs
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
    # The baseline is zero, so the change has no percentage and is not beyond noise.
    assert not Change(0.0, 110.0, 0.1).is_beyond_noise


def test_a_change_must_move_the_median_call_and_in_the_same_direction() -> None:
    assert not Change(100.0, 150.0, 1.0, (50.0, 51.0)).is_beyond_noise
    assert not Change(100.0, 150.0, 1.0, (50.0, 40.0)).is_beyond_noise
    assert Change(100.0, 150.0, 1.0, (50.0, 55.0)).is_beyond_noise
    assert Change(100.0, 50.0, 1.0, (50.0, 40.0)).is_beyond_noise


def test_what_all_places_share_is_no_part_of_a_change_beside_them() -> None:
    """All places (bricks and bricks of a layer) take 1.06 times as long, and one place takes 1.166 times as long.

    Compared with the other places, the change of this place is known to 1 %. By itself, the change is known to 6 %.
    """
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


def test_each_of_two_looks_has_half_the_chance_and_one_no_surer_is_skipped() -> None:
    one = Figure(100.0, 1.0, 30)
    told = replace(one, own_error=0.9)
    alone, twice = change(one, one, 5), change(told, told, 5, 1.0)
    assert alone.own is None
    assert twice.own is not None
    assert twice.half == pytest.approx(change(one, one, 10).half)
    assert twice.own.half == pytest.approx(0.9 * twice.half)
    for as_sure in (replace(one, own_error=1.0), replace(one, own_error=1.1)):
        assert change(as_sure, as_sure, 5, 1.0).own is None
    assert change(told, told, 5).own is None
    assert change(told, one, 5, 1.0).own is None


def test_runs_moved_alike_by_a_machine_give_a_scatter_relative_to_others() -> None:
    """The runs differ by 10 % from each other.

    Relative to the other bricks of its run, each brick varies by only 1 %.
    """
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


def test_a_clock_that_drifts_while_caches_grow_is_no_cache() -> None:
    """The clock slows down, so every brick takes 1 % longer in each block of steps.

    One brick takes another 1 % longer. Only this additional part comes from the brick's growing cache.
    """
    along = np.arange(40.0)
    pace = 1 + along / 100
    amount = np.stack([100 * pace, 100 * pace * (1 + along / 100)], axis=1)
    steady, growing = figures(amount, np.ones(40), along, pace)
    assert (steady.slope, steady.own_error) == (pytest.approx(0, abs=1e-9), pytest.approx(0, abs=1e-9))
    assert (growing.slope, growing.own_error) == (pytest.approx(1), pytest.approx(0, abs=1e-9))
    # The drift of the clock remains in the error, because it may differ in the next run.
    assert min(steady.error, growing.error) > 5
    (alone,) = figures(amount[:, :1], np.ones(40), along)
    assert (alone.slope, alone.own_error) == (pytest.approx(1), None)


def test_a_line_through_blocks_is_found_with_its_error_and_explains_its_part() -> None:
    rng = np.random.default_rng(0)
    along = np.arange(40.0)
    slopes, errors = [], []
    for _ in range(200):
        amount = 100 + 2 * along + rng.standard_normal(40)
        (found,) = figures(amount[:, None], np.ones(40), along)
        slopes.append((found.slope - 2) / found.slope_error)
        assert found.mean == pytest.approx(amount.mean())
        errors.append(found.error)
    # The expected error is about 1 / √40. If the growth counted as noise, it would be ten times as large.
    assert np.median(errors) < 0.4
    assert 0.7 < np.std(slopes) < 1.3


def test_what_lasts_longer_than_two_blocks_makes_a_mean_less_sure() -> None:
    """White noise plus a slow wave with a period of thirty blocks.

    Neighbouring blocks are hardly correlated, but means of eight blocks are.
    """
    rng = np.random.default_rng(1)
    wave = np.sin(np.arange(60) * 2 * np.pi / 30)
    noise = rng.standard_normal(60)
    (with_wave,) = figures((100 + noise + wave)[:, None], np.ones(60))
    shuffled = rng.permutation(wave)
    (without,) = figures((100 + noise + shuffled)[:, None], np.ones(60))
    assert with_wave.error > 1.5 * without.error


@pytest.mark.parametrize("factor", [1000.0, 1 / 1000])
def test_a_brick_a_thousand_times_as_slow_or_fast_is_beyond_any_scatter(factor: float) -> None:
    """The variation grows in proportion to the time, so only the ratio of the times shows the change.

    Blocks vary by 60 %, as on a busy host.
    """
    random, weight = np.random.default_rng(5), np.full(5, 60.0)
    found = 0
    for _ in range(40):
        before, now = (random.lognormal(0, 0.6, (5, 65)) * weight[:, None] for _ in range(2))
        now[:, 0] *= factor
        changes = [change(*pair, 65) for pair in zip(figures(before, weight), figures(now, weight), strict=True)]
        found += changes[0].is_beyond_noise
        assert not any(one.is_beyond_noise for one in changes[1:])
    assert found >= 30


def test_a_figure_per_call_has_the_error_of_its_calls() -> None:
    """Each call takes 100 ± 3 µs. Blocks have either 0 to 4 calls or always 4 calls."""
    rng = np.random.default_rng(5)
    calls = np.stack([rng.binomial(4, 0.3, 200), np.full(200, 4), np.zeros(200)], axis=1).astype(np.float64)
    us = 100.0 * calls + 3.0 * np.sqrt(calls) * rng.standard_normal(calls.shape)
    rare, always, never = figures(us, calls)
    for one, of in ((rare, calls[:, 0]), (always, calls[:, 1])):
        assert one.mean == pytest.approx(100.0, abs=5 * 3 / of.sum() ** 0.5)
        assert one.error == pytest.approx(3 / of.sum() ** 0.5, rel=0.3)
    assert rare.blocks < always.blocks
    assert (never.mean, never.error, never.blocks) == (0.0, 0.0, 2)


def test_a_time_far_from_before_has_an_interval_as_wide_as_itself_scatters() -> None:
    """The measured time is five times as long as before. The true ratio may be anything between 3 and 8."""
    before, now = Figure(100.0, 10.0, 60), Figure(500.0, 90.0, 60)
    found = change(before, now, 100)
    assert found.is_beyond_noise
    assert 1.5 < found.half / found.before < 4.0
    faster = change(now, before, 100)
    assert faster.is_beyond_noise
    assert 0.1 < faster.half / faster.before < 0.8


def test_a_figure_that_is_judged_alone_is_one_figure() -> None:
    assert half_of(Figure(10.0, 1.0, 20)) == half_of(Figure(10.0, 1.0, 20), 1) < half_of(Figure(10.0, 1.0, 20), 2)
