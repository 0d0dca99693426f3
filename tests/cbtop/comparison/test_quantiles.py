"""Tests of quantiles that are computed from histograms of blocks of steps.

They equal the quantiles of the calls, and their errors are right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cbtop.comparison.quantiles import MEDIAN, MIN_BEYOND, P99, CallTimes
from cbtop.profiler.analysis.growth import Growth
from cbtop.profiler.analysis.histograms import BUCKETS, Column, bucket_of
from cbtop.profiler.analysis.node_columns import SUMS
from tests.representatives import first_by_default

BLOCKS = 6
PER_BUCKET = 1 / 64  # width of a histogram bucket, relative to its value, for values above 64 ns
Calls = dict[int, Sequence[int]]  # durations in ns by node
durations = st.lists(st.integers(1, 10**8), min_size=8, max_size=80)


def block(calls: Calls) -> Growth:
    """Return the histograms of these durations, by node."""
    cells = np.concatenate(
        [np.full(len(each), node) * BUCKETS + bucket_of(np.array(each, np.int64)) for node, each in calls.items()]
    )
    cell, count = np.unique(cells, return_counts=True)
    return Growth.made(np.zeros(0, np.int64), np.zeros((len(SUMS), 0), np.int64), cell, count, {})


def call_times(
    blocks: Sequence[Calls],
    place_of: Sequence[Sequence[int]] = ((0,),),
    places: int = 1,
    along: NDArray[np.float64] | None = None,
    pace: NDArray[np.float64] | None = None,
) -> CallTimes:
    columns: list[Column] = [np.array(column) for column in place_of]
    return CallTimes([block(each) for each in blocks], columns, places, np.full(len(blocks), 4.0), along, pace)


def in_blocks(calls: Sequence[int], node: int = 0) -> list[Calls]:
    return [{node: calls[at::BLOCKS]} for at in range(BLOCKS)]


def wandering(seed: int, steps: int, blocks: int) -> list[Calls]:
    """Return blocks of calls of about 100 µs: the calls of a block vary by 3 %, the means of the blocks by 1 %."""
    random = np.random.default_rng(seed)
    of_block = random.normal(1, 0.01, blocks)
    return [{0: (1e5 * one * random.normal(1, 0.03, steps)).astype(np.int64).tolist()} for one in of_block]


@given(durations, durations)
def test_the_median_of_each_place_is_that_of_its_calls_within_a_bucket(first: list[int], second: list[int]) -> None:
    blocks = [{0: first[at::BLOCKS], 1: second[at::BLOCKS]} for at in range(BLOCKS)]
    found = call_times(blocks, [[0, 1]], 2)
    assert found.calls.tolist() == [len(first), len(second)]
    for one, calls in zip(found.quantile(MEDIAN).figures, (first, second), strict=True):
        if one is not None:  # With an even number of calls, the median may be anywhere between the two middle values.
            ordered = sorted(calls)
            low, high = ordered[(len(calls) - 1) // 2 - (len(calls) % 2 == 0)], ordered[len(calls) // 2]
            assert low * (1 - PER_BUCKET) <= one.mean * 1e3 <= high * (1 + PER_BUCKET) + 1


@pytest.mark.parametrize(("fraction", "is_us"), [(MEDIAN, 500.0), (P99, 990.0)])
def test_a_quantile_is_as_long_as_that_share_of_calls_of_every_length(fraction: float, is_us: float) -> None:
    (found,) = call_times(in_blocks(range(1, 1_000_001, 97))).quantile(fraction).figures
    assert found is not None
    # The result is closer than the width of a bucket, because positions inside a bucket are interpolated.
    assert found.mean == pytest.approx(is_us, rel=0.002)


def test_a_node_is_of_the_places_its_columns_name_or_of_none_if_it_has_none() -> None:
    blocks: list[Calls] = [{0: [1_000] * 4, 1: [2_000] * 8, 2: [9_000] * 16, 7: [9_000] * 32} for _ in range(BLOCKS)]
    found = call_times(blocks, [[0, 1, -1], [2, 2, -1]], 4)
    assert found.calls.tolist() == [24, 48, 72, 0]
    figures = found.quantile(MEDIAN).figures
    assert [one and round(one.mean) for one in figures] == [1, 2, 2, None]


@pytest.mark.parametrize(
    ("fraction", "calls", "is_known"),
    [(MEDIAN, 2 * MIN_BEYOND, True), (MEDIAN, 2 * MIN_BEYOND - 1, False), (P99, 400, True), (P99, 399, False)],
)
def test_a_quantile_is_known_of_so_many_calls_that_four_are_on_either_side(
    fraction: float, calls: int, is_known: bool
) -> None:
    quantile = call_times(in_blocks([1_000] * calls)).quantile(fraction)
    assert (quantile.figures[0] is not None) == is_known
    # The value of the quantile is known even if its error is not.
    assert quantile.us == pytest.approx(1.0, rel=PER_BUCKET)


def test_a_quantile_is_unknown_if_blocks_leave_open_whether_calls_exceed_it() -> None:
    """All calls of a block of steps have the same duration, so the p99 depends on only a few blocks."""
    blocks: list[Calls] = [{0: [1_000] * 100} for _ in range(11)] + [{0: [5_000] * 100}]
    assert call_times(blocks).quantile(P99).figures == [None]


@first_by_default("fraction", [MEDIAN, 0.9])
def test_a_quantile_is_off_by_what_its_error_says(fraction: float) -> None:
    found = [call_times(wandering(seed, 40, 24)).quantile(fraction).figures[0] for seed in range(60)]
    figures = [one for one in found if one is not None]
    assert len(figures) == 60
    off = np.std([one.mean for one in figures])
    # The reported error of a p90 is the error towards long calls. It is larger than the error towards short calls.
    assert 0.9 < np.median([one.error for one in figures]) / off < (1.4 if fraction == MEDIAN else 1.7)


def test_typical_times_sum_to_that_many_medians_and_slow_blocks_have_more() -> None:
    blocks = wandering(7, 40, 24)
    quantile = call_times(blocks).quantile(MEDIAN)
    figure = quantile.figures[0]
    assert figure is not None
    typical_us = quantile.typical_us[:, 0]
    assert typical_us.sum() == pytest.approx(24 * 40 * figure.mean, rel=1e-6)
    medians = [np.median(one[0]) for one in blocks]
    assert np.corrcoef(typical_us, medians)[0, 1] > 0.9
    assert np.polyfit(medians, typical_us / 40 * 1e3, 1)[0] == pytest.approx(1.0, abs=0.25)


def growing(by_ns: float, pace: NDArray[np.float64], along: NDArray[np.float64]) -> list[Calls]:
    """Return blocks of steps. In each block, two nodes have 80 calls of 100 µs each.

    The calls of the first node become longer from block to block: by `by_ns` times the value of `along`.
    """
    random = np.random.default_rng(3)
    made = []
    for one, at in zip(pace, along, strict=True):
        vary = random.normal(1, 0.03, (2, 80))
        made.append(
            {
                0: (one * (1e5 * vary[0] + by_ns * at)).astype(np.int64).tolist(),
                1: (one * 1e5 * vary[1]).astype(np.int64).tolist(),
            }
        )
    return made


def test_a_median_of_growing_calls_is_at_the_mean_of_what_they_grow_along() -> None:
    along = np.arange(24.0) * 10
    still = np.ones(24)
    found = call_times(growing(400.0, still, along), [[0, 1]], 2, along).quantile(MEDIAN)
    grows, stays = found.figures
    assert grows is not None
    assert stays is not None
    assert grows.mean == pytest.approx(100 + 0.4 * along.mean(), rel=0.01)
    assert grows.slope == pytest.approx(0.4, rel=0.03)
    assert 0 < grows.slope_error < 0.02
    assert abs(grows.slope - 0.4) < 4 * grows.slope_error
    assert grows.error < 0.01 * grows.mean  # The growth from block to block does not count as noise.
    assert (stays.slope, stays.slope_error) == (0, 0)
    # The median duration also grows from block to block.
    grown_us = np.polyfit(along, found.typical_us[:, 0] / 80, 1)[0]
    assert grown_us == pytest.approx(0.4, rel=0.05)


def test_what_a_clock_that_drifts_does_to_all_places_is_not_growth() -> None:
    along = np.arange(24.0) * 10
    pace = np.linspace(1.0, 1.3, 24)
    blocks = growing(0.0, pace, along)
    assert all(one and one.slope > 0.05 for one in call_times(blocks, [[0, 1]], 2, along).quantile(MEDIAN).figures)
    beside = call_times(blocks, [[0, 1]], 2, along, pace).quantile(MEDIAN).figures
    assert [one and (one.slope, one.slope_error) for one in beside] == [(0, 0), (0, 0)]


def test_what_grows_by_less_than_a_bucket_over_all_blocks_is_left_as_it_is() -> None:
    along = np.arange(24.0)
    blocks = growing(0.9 * PER_BUCKET * 1e5 / 23, np.ones(24), along)
    (figure,) = call_times(blocks, along=along).quantile(MEDIAN).figures
    assert figure is not None
    assert figure.slope == 0


def test_where_steps_alone_are_recorded_nothing_is_known_of_places() -> None:
    along = np.arange(6.0)
    found = call_times([{3: [1_000] * 10}] * BLOCKS, [[-1, 0]], 1, along)
    assert found.calls.tolist() == [0]
    quantile = found.quantile(MEDIAN)
    assert (quantile.figures, quantile.typical_us.tolist()) == ([None], [[0.0]] * BLOCKS)


def random_calls(seed: int, rate: float, blocks: int, long: float = 1.0) -> list[Calls]:
    """Return blocks of four steps in which two bricks run at random.

    Half of their calls take 100 µs, and the other half takes `long` times 100 µs.
    """
    random = np.random.default_rng(seed)
    made = []
    for _ in range(blocks):
        counts = random.binomial(4, [rate, rate, 1.0])
        of_nodes = [1e5 * np.where(random.random(n) < 0.5, long, 1.0) * random.normal(1, 0.03, n) for n in counts]
        made.append({node: us.astype(np.int64).tolist() for node, us in enumerate(of_nodes)})
    return made


@first_by_default("rate", [0.1, 0.3, 1.0])
def test_a_median_is_as_sure_if_blocks_have_other_numbers_of_calls(rate: float) -> None:
    found = [
        call_times(random_calls(seed, rate, 60), [[0, 1, 2]], 3).quantile(MEDIAN).figures[0] for seed in range(60)
    ]
    figures = [one for one in found if one is not None]
    off = np.std([one.mean for one in figures])
    assert 0.85 < np.median([one.error for one in figures]) / off < 1.6
    assert np.median([one.blocks for one in figures]) <= 60 * min(1.0, 5 * rate)


@pytest.mark.slow
def test_a_median_between_two_kinds_of_calls_is_as_unsure_as_they_are_apart() -> None:
    found = [call_times(random_calls(seed, 1.0, 60, 2.0), [[0, 1, 2]], 3).quantile(MEDIAN) for seed in range(40)]
    figures = [one.figures[0] for one in found]
    known = [one for one in figures if one]
    jumps = [abs(one.mean - other.mean) for one, other in zip(known[::2], known[1::2], strict=False)]
    assert max(jumps) > 50
    for one, other in zip(known[::2], known[1::2], strict=False):
        assert abs(one.mean - other.mean) < 4.5 * (one.error**2 + other.error**2) ** 0.5


def test_typical_times_of_blocks_follow_their_number_of_calls() -> None:
    found = call_times(random_calls(1, 0.3, 60), [[0, 1, 2]], 3)
    typical_us = found.quantile(MEDIAN).typical_us[:, 0]
    calls = found.by_block[:, 0]
    assert typical_us[calls == 0].tolist() == [0.0] * np.count_nonzero(calls == 0)
    assert (typical_us[calls > 0] / calls[calls > 0]) == pytest.approx(100.0, rel=0.1)
