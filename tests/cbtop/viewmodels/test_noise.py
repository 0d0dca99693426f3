"""Chance alone makes no change, however alike steps are to their neighbours; what is planted is found."""

from __future__ import annotations

import numpy as np
import pytest

from cbtop.viewmodels.comparison import compare
from cbtop.viewmodels.noise import LEAST_PERCENT, Change, Figure, change, figures
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
        pytest.param(
            noise, id=name, marks=() if name in ("of ten steps", "of fifty steps, and louder") else pytest.mark.slow
        )
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
