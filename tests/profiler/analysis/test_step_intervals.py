"""Tests of the time when steps ran: overlapping steps count once, and few intervals are stored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cbtop.profiler.analysis.stats import NodeStats
from cbtop.profiler.analysis.step_intervals import MAX_KEPT_INTERVALS, MAX_PARTS
from cbtop.protocol.ring_reader import Batch
from tests.profiler.analysis.made_batches import NO_STEPS, STEP_AND_BRICK, records


@pytest.mark.slow
def test_a_step_that_ends_in_the_future_keeps_no_later_interval_for_ever() -> None:
    stats = NodeStats()
    step_of = np.array([-1, 1], np.int64)
    one = np.ones(4096, np.int64)
    stats.add(Batch(one[:1], one[:1] * 0, one[:1] << 50, (one[:1] << 50) + 5, one[:1], 0), step_of, NO_STEPS)
    for number in range(64):
        begin = 10 * np.arange(4096 * number, 4096 * (number + 1))
        stats.add(Batch(one, one * 0, begin, begin + 1, one, 0), step_of, NO_STEPS)
    assert stats.rare("union_ns", (1,)) >= 64 * 4096
    kept = len(stats.intervals.since(0, 1 << 40)[0])
    # Intervals are stored twice: for the step itself and for all steps together.
    assert kept <= 2 * (MAX_KEPT_INTERVALS + 4096)


def test_the_last_step_times_are_returned_up_to_a_bound_for_all_nodes() -> None:
    step_of, part_of = np.array([-1, 1, 2]), np.array([-1, -1, -1])
    stats = NodeStats()
    stats.grow(3)
    for at in range(4):
        rows = [(1, 1_000 * at + 100, 1_000 * at + 300), (2, 1_000 * at + 500, 1_000 * at + 600)]
        node, start, end = np.array(rows, np.int64).T
        stats.add(Batch(node, np.zeros(2, np.int64), start, end, np.ones(2, np.int64), 0), step_of, part_of)
    node, begin, length = stats.intervals.since(0, 100)
    assert node.tolist() == [0] * 8 + [1] * 4 + [2] * 4  # Node 0 means all steps together.
    assert begin[8:].tolist() == [100, 1_100, 2_100, 3_100, 500, 1_500, 2_500, 3_500]
    assert begin[:8].tolist() == sorted(begin[8:].tolist())
    assert length[8:].tolist() == [200] * 4 + [100] * 4
    node, begin, _ = stats.intervals.since(2_300, 6)
    assert (node.tolist(), begin.tolist()) == ([0] * 4 + [1] * 2, [2_100, 2_500, 3_100, 3_500, 2_100, 3_100])
    assert stats.intervals.since(2_300, 3)[1].tolist() == [2_500, 3_100, 3_500]
    assert stats.intervals.since(10_000, 3)[0].tolist() == []


@pytest.mark.slow
def test_steps_that_come_one_by_one_for_hours_are_kept_in_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbtop.profiler.analysis.step_intervals.MAX_KEPT_INTERVALS", 1024)
    stats = NodeStats()
    one, step_of = np.ones(1, np.int64), np.array([-1, 1], np.int64)
    for at in range(2_500):
        stats.add(Batch(one, 0 * one, one * at * 10, one * (at * 10 + 7), one, 0), step_of, NO_STEPS)
    # This step overlaps all of the last 1,000 steps.
    newest = Batch(one, 0 * one, one * 15_000, one * 25_000, one, 0)
    stats.add(newest, step_of, NO_STEPS)
    assert stats.rare("union_ns", [1]) == 1_500 * 7 + 10_000
    assert len(stats.intervals._intervals[1]) <= MAX_PARTS
    assert sum(part[0].nbytes for part in stats.intervals._intervals[1]) < 25_000


def test_steps_that_begin_where_the_last_ended_are_one_interval() -> None:
    stats = NodeStats()
    stats.add(records((1, 10, 20), (1, 20, 30), (1, 31, 40)), *STEP_AND_BRICK)
    node, begin, length = stats.intervals.since(0, 100)
    assert [begin[node == 1].tolist(), length[node == 1].tolist()] == [[10, 31], [20, 9]]
    assert stats.rare("union_ns", [1]) == 29


def test_a_step_has_the_square_of_its_tokens_up_to_a_largest_count() -> None:
    stats = NodeStats()
    for tokens, squared in ((3, 9), (4, 9 + 16), (1 << 40, 9 + 16 + (1 << 64))):
        stats.add(replace(records((1, 10, 20)), elements=np.array([tokens])), *STEP_AND_BRICK)
        assert stats.rare("squared_tokens", [1]) == squared
