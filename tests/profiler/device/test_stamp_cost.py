"""Tests of the measured cost of a time stamp. The cost is derived from graph replays with and without time stamps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.device.stamp_cost import ENOUGH, StampCosts

AROUND_NS, STAMPS = 5_000, 300


def watched(replays: int, cost_ns: float, *, drift_ns: int = 0, noise_ns: float = 0.0, seed: int = 0) -> StampCosts:
    """Return the costs after `replays` replays of a graph. Every other replay has time stamps.

    Each replay takes `drift_ns` longer than the one before.
    """
    chance, costs = random.Random(seed), StampCosts()
    for at in range(replays):
        plain_ns = round(2_000_000 + at * drift_ns + chance.gauss(0, noise_ns))
        if at % 2:
            costs.plain(plain_ns + AROUND_NS)
        else:
            inside_ns = round(plain_ns + STAMPS * cost_ns)
            costs.stamped(inside_ns + AROUND_NS, STAMPS, AROUND_NS)
    return costs


@given(cost_ns=st.floats(200, 5_000), noise_ns=st.floats(0, 20_000), seed=st.integers(0, 99))
def test_it_is_found_within_the_error_that_is_told(cost_ns: float, noise_ns: float, seed: int) -> None:
    known = watched(400, cost_ns, noise_ns=noise_ns, seed=seed).known
    assert known is not None
    # In 95 % of cases, the measured cost differs from the true cost by at most one error. The difference never
    # exceeds 2.5 errors.
    assert abs(known.cost_ns - cost_ns) <= 2.5 * known.error_ns
    assert known.error_ns <= 2 + noise_ns / STAMPS


def test_replays_that_become_longer_shift_it_by_one_replays_share() -> None:
    known = watched(100, 1_100, drift_ns=600).known
    assert known is not None
    assert known.cost_ns == pytest.approx(1_100 - 600 / STAMPS)


def test_until_there_are_a_few_it_is_a_guess() -> None:
    assert StampCosts().guess() is None
    costs = watched(2 * ENOUGH - 1, 1_000)
    assert costs.known is None
    guess = costs.guess()
    assert guess is not None
    assert guess.cost_ns == 1_000
    assert watched(2 * ENOUGH, 1_000).known is not None


def test_one_delayed_measurement_moves_the_cost_no_more_than_the_spread() -> None:
    costs = watched(40, 1_000)
    costs.stamped(900_000_000, STAMPS, 0)
    costs.plain(2_005_000)
    assert costs.known is not None
    assert costs.known.cost_ns == 1_000


def test_of_a_whole_what_lies_around_the_graph_is_taken_off() -> None:
    assert StampCosts().inside_ns(2_000_000) == 2_000_000
    assert watched(10, 1_000).inside_ns(2_000_000) == 2_000_000 - AROUND_NS
