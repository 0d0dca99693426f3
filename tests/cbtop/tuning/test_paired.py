"""Tests of paired comparisons, which measure two sides, A and B, in turns.

They test the order of the measurements, and which differences are reported.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from cbtop.comparison.noise import MIN_BLOCKS
from cbtop.tuning.paired import CONFIDENCE_PERCENT, PairedTest, in_turns, mean_and_deviation, pairs_of, with_deviation
from tests.representatives import first_by_default

RUNS = 1000
ROUNDS = 10


def made(
    rng: np.random.Generator, ratio: float, *, own: float, drift: float = 0.0, spikes: float = 0.0
) -> PairedTest:
    """Return simulated times of two sides, A and B.

    A slow drift of the machine affects both. Each side has its own noise and a few long times.
    """
    shared = np.exp(np.cumsum(rng.normal(0, drift, 2 * ROUNDS)))
    times = 1e8 * shared * np.exp(rng.normal(0, own, 2 * ROUNDS)) * (1 + 3 * (rng.random(2 * ROUNDS) < spikes))
    a, b = times[0::2].copy(), times[1::2] / ratio
    a[1::2], b[1::2] = times[1::2][1::2], times[0::2][1::2] / ratio  # In every second round, B is measured first.
    return PairedTest("pp8", 8, tuple(map(int, a)), tuple(map(int, b)))


def test_every_second_round_begins_with_b_and_pairs_of_turns_stay_together() -> None:
    seen: list[str] = []

    def turn(name: str) -> Mapping[str, int]:
        seen.append(name)
        return {name[1:]: len(seen)}

    pairs = [(lambda: turn("a1"), lambda: turn("b1")), (lambda: turn("a2"), lambda: turn("b2"))]
    said: list[tuple[int, int]] = []
    rounds = list(in_turns(pairs, 3, lambda number, side: said.append((number, side))))
    assert seen == ["a1", "b1", "a2", "b2", "b1", "a1", "b2", "a2", "a1", "b1", "a2", "b2"]
    assert rounds[:2] == [({"1": 1, "2": 3}, {"1": 2, "2": 4}), ({"1": 6, "2": 8}, {"1": 5, "2": 7})]
    assert said[:6] == [(0, 0), (0, 1), (0, 0), (0, 1), (1, 1), (1, 0)]


def test_a_round_that_is_cut_short_is_none() -> None:
    times = [3, 2, 1]
    rounds = in_turns([(lambda: {"x": times.pop()}, lambda: {"x": times.pop()})], 3, lambda *_: None)
    found = [next(rounds)]
    with pytest.raises(IndexError):
        next(rounds)
    assert found == [({"x": 1}, {"x": 2})]
    (pair,) = pairs_of(found, {"x": 5})
    assert (pair.a_ns, pair.b_ns) == ((1,), (2,))
    assert pairs_of([], {"x": 5}) == []


def test_the_ratio_is_of_speed_and_lies_in_its_interval() -> None:
    pair = PairedTest("tg4", 4, (200, 220, 190, 210, 205), (100, 111, 96, 104, 102))
    assert pair.ratio == pytest.approx(1025 / 513)
    interval = pair.interval
    assert interval is not None
    assert 1 < interval[0] < pair.ratio < interval[1] < 2.2
    assert (pair.is_beyond_noise, pair.verdict) == (True, "B is faster")
    assert pair.rates(1)[0] == 1e9 * 4 / 100
    back = PairedTest("tg4", 4, pair.b_ns, pair.a_ns)
    assert (back.is_beyond_noise, back.verdict) == (True, "B is slower")
    assert back.ratio == pytest.approx(1 / pair.ratio)


def test_an_interval_is_as_wide_as_students_quantile_and_never_below_zero() -> None:
    """All times of B are 100, so the ratio is the mean of A divided by 100.

    The half width of its interval is the error of the mean times 4.604 (Student's t, 99 %, four degrees of freedom).
    """
    pair = PairedTest("tg1", 1, (100, 110, 90, 105, 95), (100,) * 5)
    half = 4.604 * (250 / (5 - 1) / 5) ** 0.5 / 100
    assert pair.interval == (pytest.approx(1 - half, rel=1e-3), pytest.approx(1 + half, rel=1e-3))
    assert pair.change is not None
    assert pair.change.percent == pytest.approx(100 * (pair.ratio - 1))
    wild = PairedTest("tg1", 1, (10, 900, 10, 10, 10), (100,) * 5)
    assert wild.interval is not None
    assert wild.interval[0] == 0.0


def test_tests_without_tokens_have_runs_a_second_and_are_compared_together() -> None:
    rounds = [({"whole": 2 * 10**9, "x": 4}, {"whole": 10**9, "x": 4})] * 2
    whole, other = pairs_of(rounds, {"whole": None, "x": 4})
    assert (whole.rates(0), whole.rates(1), whole.compared, other.compared) == ([0.5, 0.5], [1.0, 1.0], 2, 2)
    assert mean_and_deviation([2.0, 4.0]) == (3.0, pytest.approx(2**0.5))
    assert mean_and_deviation([7.0]) == (7.0, None)
    assert (with_deviation([2.0, 4.0], 1), with_deviation([7.0], 2)) == ("3.0 ± 1.4", "7.00 ± n/a")
    assert CONFIDENCE_PERCENT == 99


def test_what_is_compared_with_more_is_less_sure() -> None:
    rng = np.random.default_rng(3)
    alone = made(rng, 1.0, own=0.02)
    of_ten = PairedTest(alone.name, alone.tokens, alone.a_ns, alone.b_ns, compared=10)
    assert alone.change is not None
    assert of_ten.change is not None
    assert of_ten.change.half > 1.3 * alone.change.half


def test_too_few_rounds_have_no_interval_and_no_verdict() -> None:
    times = tuple(range(100, 100 + MIN_BLOCKS))
    few = PairedTest("pp8", 8, times[1:], times[1:])
    assert (few.interval, few.is_beyond_noise) == (None, None)
    assert few.verdict == "5 rounds or more would tell"
    assert few.ratio == 1.0
    assert PairedTest("pp8", 8, times, times).verdict == "noise"


@first_by_default(
    "noise",
    [
        pytest.param({"own": 0.03}, id="steady"),
        pytest.param({"own": 0.01, "drift": 0.03}, id="drifting clocks"),
        pytest.param({"own": 0.02, "spikes": 0.1}, id="a noisy neighbour"),
    ],
)
def test_about_one_in_a_hundred_comparisons_of_the_same_finds_a_difference(
    noise: Mapping[str, float],
) -> None:
    rng = np.random.default_rng(15)
    found = sum(bool(made(rng, 1.0, **noise).is_beyond_noise) for _ in range(RUNS))
    print(f"{found} of {RUNS}")  # noqa: T201
    # The error rate is 1 %. In one of twelve runs of this test, 15 or more of 1,000 comparisons are wrong by chance.
    assert found <= RUNS // 100 + 4


def test_a_side_that_is_five_percent_faster_is_found_beside_a_drift_as_large() -> None:
    rng = np.random.default_rng(16)
    verdicts = [made(rng, 1.05, own=0.01, drift=0.01).verdict for _ in range(RUNS)]
    assert verdicts.count("B is faster") >= 0.95 * RUNS
    assert verdicts.count("B is slower") == 0
