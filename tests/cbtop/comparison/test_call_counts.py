"""Tests of the number of calls per step. The number is either exact or has an error of its own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cbtop.comparison.call_counts import CallsChange, call_figures, calls_change, learned_calls, looks, new_calls
from cbtop.comparison.noise import Figure, telling_blocks
from tests.representatives import first_by_default

STEPS = np.full(60, 4.0)


def drawn(seed: int, *rates: float, blocks: int = 60) -> NDArray[np.float64]:
    """Return random call counts with the shape (blocks, bricks).

    A block is four steps. A brick runs in each step with the given rate.
    """
    return np.random.default_rng(seed).binomial(4, rates, (blocks, len(rates))).astype(np.float64)


def test_calls_in_every_step_alike_are_exact_and_others_have_an_error() -> None:
    exact, twice, half, odd = call_figures(
        np.stack([STEPS, 2 * STEPS, drawn(1, 0.5)[:, 0], np.append(STEPS[:-1], 3.0)], axis=1), STEPS
    )
    assert [(one.mean, one.error) for one in (exact, twice)] == [(1.0, 0.0), (2.0, 0.0)]
    assert half.error == pytest.approx((0.25 / 240) ** 0.5, rel=0.4)
    assert odd.error > 0
    # If there are few calls, only one block differs from the others. So the blocks say little about the variation.
    assert odd.blocks < 6 < half.blocks


def test_a_place_that_is_never_called_changes_no_error_of_another() -> None:
    calls = drawn(1, 0.5)
    called, never = call_figures(np.column_stack([calls, np.zeros(60)]), STEPS)
    assert [called] == call_figures(calls, STEPS)
    assert never == Figure(0.0, 0.0, 60)


@first_by_default("rate", [0.03, 0.1, 0.3, 0.7, 0.97], 2)
def test_chance_moves_calls_by_no_more_than_their_interval(rate: float) -> None:
    places = 40
    beyond = 0
    for seed in range(20):
        before, now = (call_figures(drawn(2 * seed + at, *[rate] * places), STEPS) for at in (0, 1))
        changes = [calls_change(*both, 2 * places) for both in zip(before, now, strict=True)]
        beyond += sum(one.is_beyond_noise for one in changes)
    assert beyond <= 1  # In 800 figures, noise may exceed the limit once.


@pytest.mark.parametrize(("before", "now", "is_more"), [(0.3, 0.6, True), (0.6, 0.3, False), (0.02, 0.2, True)])
def test_calls_that_a_program_makes_more_often_are_beyond_noise(before: float, now: float, is_more: bool) -> None:
    sides = (call_figures(drawn(seed, *[rate] * 20), STEPS) for seed, rate in ((0, before), (50, now)))
    changes = [calls_change(*both, 80) for both in zip(*sides, strict=True)]
    assert sum(one.is_beyond_noise for one in changes) >= 19
    for found in changes:
        assert (found.now > found.before) is is_more
        assert found.ratio
        assert found.ratio_half
        if before > 0.1 and found.is_beyond_noise:
            assert abs(found.ratio - now / before) < found.ratio_half
            assert " as many calls a step" in found.text


def test_another_exact_number_of_calls_is_a_change_and_is_said_as_structure() -> None:
    one, two = Figure(1.0, 0.0, 60), Figure(2.0, 0.0, 60)
    found = calls_change(one, two, 1000)
    assert (found.is_beyond_noise, found.half, found.text) == (True, 0.0, "2 calls a step instead of 1")
    same = calls_change(one, one, 1000)
    assert (same.is_beyond_noise, same.text, same.ratio) == (False, "", 1.0)
    assert calls_change(Figure(100.0, 0.0, 60), Figure(101.0, 0.0, 60), 1000).is_beyond_noise
    # This change is smaller than the usual difference of two runs.
    assert not CallsChange(100.0, 101.0, 0.5).is_beyond_noise


@pytest.mark.parametrize(("rate", "is_new"), [(0.03, False), (0.5, True), (1.0, True)])
def test_a_place_that_a_run_does_not_call_is_gone_if_it_ran_often_enough(rate: float, is_new: bool) -> None:
    (calls,) = call_figures(drawn(3, rate), STEPS)
    for found in (calls_change(None, calls, 200), calls_change(calls, None, 200)):
        assert found.is_beyond_noise is is_new
    new = calls_change(None, calls, 200)
    assert (new.ratio, new.ratio_half) == (None, None)


@pytest.mark.parametrize(
    ("rate", "base_steps", "is_new"),
    [(0.08, 1440, True), (0.08, 240, True), (0.08, 60, False), (0.01, 1440, False), (0.3, 240, True)],
)
def test_a_new_place_is_judged_by_its_calls_and_the_steps_of_the_baseline(
    rate: float, base_steps: int, *, is_new: bool
) -> None:
    (calls,) = call_figures(drawn(3, rate), STEPS)
    assert new_calls(calls, 100, (base_steps, 240)).is_beyond_noise is is_new


def test_one_burst_of_calls_in_a_new_run_may_be_chance() -> None:
    calls = np.zeros((60, 1))
    calls[20:25] = 4.0
    (found,) = call_figures(calls, STEPS)
    assert not new_calls(found, 100, (240, 240)).is_beyond_noise


@given(st.integers(0, 2**32), st.integers(1, 20))
def test_scatter_in_a_few_blocks_is_known_by_few_of_them(seed: int, few: int) -> None:
    rng = np.random.default_rng(seed)
    rare = np.zeros((200, 1))
    rare[rng.choice(200, few, replace=False)] = 1.0
    (found,) = telling_blocks(rare)
    assert min(few, 2) <= found <= 3 * few + 2
    (usual,) = telling_blocks(rng.standard_normal((200, 1)))
    assert usual > 60


def test_runs_that_scatter_more_than_their_blocks_show_do_so_for_all_places() -> None:
    """Each run has other input. So the call rates of all bricks differ by a third from run to run."""
    rng = np.random.default_rng(1)
    rows = [[Figure(0.3 * rng.normal(1, 0.33), 0.01, 60) for _ in range(3)] for _ in range(20)]
    exact = [Figure(1.0, 0.0, 60)] * 3
    *found, always = learned_calls([*rows, exact])
    # The expected variation is 0.33 × 0.3 ≈ 0.1. With three runs, it can be two thirds of this by chance.
    assert 0.05 < min(one.scatter for one in found) < 0.08
    assert (always.error, always.scatter, always.runs) == (0.0, 0.0, 3)
    (rounded,) = learned_calls([[Figure(one, 0.0, 60) for one in (0.3, 0.1 + 0.2, 0.3)]])
    assert (rounded.error, rounded.scatter) == (0.0, 0.0)
    moved = [Figure(1.0, 0.0, 60), Figure(1.0, 0.0, 60), Figure(2.0, 0.0, 60)]
    (one,) = learned_calls([moved])
    assert one.scatter == pytest.approx(3**-0.5)
    (alike,) = learned_calls([[Figure(0.3, 0.02, 60)] * 3])
    # The variation between blocks is larger than the variation between runs. So the variation between blocks is used.
    assert alike.scatter == pytest.approx(0.02)


def test_what_is_compared_counts_calls_a_step_only_where_they_vary() -> None:
    exact, random = Figure(1.0, 0.0, 60), Figure(0.5, 0.1, 60)
    assert looks([exact, exact, random, None], [exact, random, None, exact]) == 6


def test_a_place_called_in_bursts_has_a_larger_error_than_its_neighbours() -> None:
    """Two bricks run in half of the steps. One of them runs in groups of 24 steps."""
    rng = np.random.default_rng(2)
    bursts = np.repeat(rng.permutation(np.arange(10) % 2), 6) * 4.0
    others = drawn(4, *[0.5] * 9)
    *usual, odd = call_figures(np.column_stack([others, bursts]), STEPS)
    assert odd.error > 2.5 * max(one.error for one in usual)
