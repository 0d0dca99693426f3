"""Tests of the histogram of durations: each call is in exactly one bar.

No bar is narrower than the buckets of the recorded durations.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis.histograms import BUCKETS, MAX_DURATION_NS, Column, bucket_begin_ns, bucket_of
from cbtop.viewmodels.durations import MAX_BARS, at_most, coarser, duration_bars

calls_ns = st.lists(st.integers(0, 50) | st.integers(0, 10**9) | st.integers(0, MAX_DURATION_NS), min_size=1)


def counted(durations_ns: list[int]) -> Column:
    return np.bincount(bucket_of(np.array(durations_ns, np.int64)), minlength=BUCKETS)


@given(calls_ns)
def test_every_call_is_in_the_bar_that_its_time_belongs_to(durations_ns: list[int]) -> None:
    counts = counted(durations_ns)
    bars = duration_bars(counts, at_most(MAX_BARS, counts))
    assert 1 <= len(bars) <= MAX_BARS
    assert all(one.to_us == other.from_us for one, other in pairwise(bars))
    for bar in bars:
        assert bar.count == sum(bar.from_us * 1e3 <= ns < bar.to_us * 1e3 for ns in durations_ns)
    assert bars[0].count
    assert bars[-1].count


@given(calls_ns)
def test_no_bar_is_finer_than_the_buckets_that_calls_are_counted_in(durations_ns: list[int]) -> None:
    counts = counted(durations_ns)
    edges_us = set((bucket_begin_ns(np.arange(BUCKETS + 1)) / 1e3).tolist())
    for bar in duration_bars(counts, at_most(MAX_BARS, counts)):
        assert {bar.from_us, bar.to_us} <= edges_us


@given(calls_ns, st.integers(1, 80))
def test_in_fewer_bars_are_the_same_calls(durations_ns: list[int], most: int) -> None:
    counts = counted(durations_ns)
    bars = duration_bars(counts, at_most(MAX_BARS, counts))
    fewer = coarser(bars, most)
    assert len(fewer) <= most
    assert sum(bar.count for bar in fewer) == len(durations_ns)
    assert (fewer[0].from_us, fewer[-1].to_us) == (bars[0].from_us, bars[-1].to_us)
    assert all(one.to_us == other.from_us for one, other in pairwise(fewer))


def test_bars_are_as_fine_as_there_is_room_for() -> None:
    narrow, wide = counted([1_000_000, 1_100_000]), counted([1_000, 1_000_000_000])
    assert at_most(MAX_BARS, narrow) == 1
    assert at_most(MAX_BARS, wide) > 1
    assert len(duration_bars(wide, at_most(MAX_BARS, wide))) > MAX_BARS / 2


def test_where_nothing_ran_there_is_no_bar() -> None:
    nothing = np.zeros(BUCKETS, np.int64)
    assert duration_bars(nothing, at_most(MAX_BARS, nothing)) == ()
    assert coarser((), 10) == ()
