"""Tests of open steps: the parts of a step count only when the step ends.

This holds wherever batches of records are cut.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis.running_steps import MAX_OPEN_PARTS
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.ring import FLAG_CANCELLED, FLAG_LOOSE, LANE_SHIFT, LANES
from cbtop.protocol.ring_reader import Batch
from tests.profiler.analysis.made_batches import STEP_AND_BRICK, batch, records


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.integers(1, 7))
def test_what_lies_in_ended_steps_is_closed_wherever_a_batch_was_cut(bricks: list[int], cut: int) -> None:
    # For each node: its step, and the part of the step that contains it. Node 1 is a step, and node 2 is a brick in
    # it.
    step_of, part_of = np.array([[-1, 1, 1], [-1, -1, 1]], np.int64)
    rows = [row for n in bricks for row in [(2, 10, 1)] * n + [(1, 100, 1)]] + [(2, 10, 1)] * 3
    stats = NodeStats()
    stats.grow(3)
    whole = batch(rows)
    end_ns = 1000 * np.arange(1, len(rows) + 1)  # one after another
    whole = replace(whole, start_ns=end_ns - (whole.end_ns - whole.start_ns), end_ns=end_ns)
    for at in range(0, len(rows), cut):
        stats.add(whole.only((np.arange(len(rows)) >= at) & (np.arange(len(rows)) < at + cut)), step_of, part_of)
    assert stats.column("closed_ns").tolist() == [0, 100 * len(bricks), 10 * sum(bricks)]
    assert stats.column("total_ns")[2] == 10 * (sum(bricks) + 3)


@pytest.mark.parametrize("cut", [0, 2])
def test_what_lies_in_a_step_that_is_recorded_behind_a_later_one_is_its_own(cut: int) -> None:
    """A step may wait for a device, so its records may come late.

    Here, another step in the same lane has begun and ended before the late records come.
    """
    start = np.array([1_000, 1_000, 100, 100], np.int64)
    end = np.array([1_090, 1_100, 180, 200], np.int64)
    node = np.array([2, 1, 2, 1], np.int64)
    nothing = np.zeros(4, np.int64)
    both = Batch(node, nothing, start, end, nothing, 0)
    step_of, part_of = np.array([-1, 1, 1]), np.array([-1, -1, 1])
    stats = NodeStats()
    for part in (np.arange(4) < cut, np.arange(4) >= cut):
        stats.add(both.only(part), step_of, part_of)
    assert stats.column("closed_ns")[2] == 170
    assert not stats.rare("over", [1])


@pytest.mark.parametrize(("lane", "noted"), [(3, [(0, 0), (1, 30), (1, 40)]), (LANES - 1, [(0, 0)] * 3)])
def test_what_is_late_makes_a_step_too_full_but_in_the_lane_that_many_share(
    lane: int, noted: list[tuple[int, int]]
) -> None:
    """A step of 100 ns has a brick of 60 ns. Two deferred bricks arrive after the end of the step.

    The first adds 70 ns and the second 10 ns.
    """
    step_of, part_of = np.array([-1, 1, 1]), np.array([-1, -1, 1])
    stats = NodeStats()
    stats.grow(3)
    found = []
    for rows in ([(2, 1_000, 1_060), (1, 1_000, 1_100)], [(2, 1_020, 1_090)], [(2, 1_050, 1_060)]):
        node, start, end = np.array(rows, np.int64).T
        flags = np.full(len(node), lane << LANE_SHIFT)
        stats.add(Batch(node, flags, start, end, np.zeros(len(node), np.int64), 0), step_of, part_of)
        found.append((stats.rare("over", [1]), stats.rare("over_ns", [1])))
    assert found == noted
    assert stats.column("closed_ns").tolist() == [0, 100, 140]
    assert stats.rare("crowded", [1]) == (lane == LANES - 1)


@pytest.mark.parametrize("lanes", [(2, 4), (1, 3), (0, LANES - 2)])
def test_a_step_closes_what_lies_in_its_own_lane(lanes: tuple[int, int]) -> None:
    """Two steps run at the same time, and each has a brick.

    The end of one step closes only the brick of this step.
    """
    node, start, end = np.array([(2, 1_000, 1_060), (2, 1_010, 1_160), (1, 1_000, 1_100), (1, 1_000, 1_200)]).T
    flags = np.array([lanes[0], lanes[1], lanes[0], lanes[1]]) << LANE_SHIFT
    both = Batch(node, flags, start, end, np.zeros(4, np.int64), 0)
    step_of, part_of = np.array([-1, 1, 1]), np.array([-1, -1, 1])
    stats = NodeStats()
    closed = []
    for part in (np.arange(4) < 3, np.arange(4) == 3):
        stats.add(both.only(part), step_of, part_of)
        closed.append(int(stats.column("closed_ns")[2]))
    assert closed == [60, 60 + 150]


def test_what_is_deferred_until_after_the_second_of_two_steps_is_the_seconds() -> None:
    stats = NodeStats()
    stats.add(records((1, 10, 20), (1, 30, 50), (2, 35, 45)), *STEP_AND_BRICK)
    assert stats.column("closed_ns")[2] == 10
    assert not stats.running.is_open(1, 0)


@pytest.mark.parametrize("cut", [0, 1])
def test_a_brick_deferred_past_a_cancelled_step_belongs_to_that_step(
    cut: int,
) -> None:
    all_of_it = records((1, 10, 100), (2, 50, 60), (1, 200, 300), flags=(FLAG_CANCELLED, 0, 0))
    stats = NodeStats()
    stats.grow(3)
    for part in (np.arange(3) < cut, np.arange(3) >= cut):
        stats.add(all_of_it.only(part), *STEP_AND_BRICK)
    assert stats.column("closed_ns").tolist() == [0, 100, 0]
    assert stats.rare("cancelled_ns", [2]) == 10


def test_what_ends_with_a_step_is_its_own_also_where_it_comes_after_it() -> None:
    stats = NodeStats()
    stats.add(records((1, 10, 20)), *STEP_AND_BRICK)
    stats.add(records((2, 15, 20)), *STEP_AND_BRICK)
    assert (stats.column("closed_ns")[2], stats.running.is_open(1, 0)) == (5, False)


def test_what_takes_no_time_as_a_step_ends_is_of_the_next() -> None:
    stats = NodeStats()
    stats.add(records((1, 10, 20)), *STEP_AND_BRICK)
    stats.add(records((2, 20, 20)), *STEP_AND_BRICK)
    assert stats.running.is_open(1, 0)


def test_what_begins_with_the_clock_is_open_until_its_step_ends() -> None:
    """A brick begins at time 0. No step has ended before, so it belongs to a step that is still open."""
    stats = NodeStats()
    stats.grow(3)
    stats.add(records((2, 0, 1)), *STEP_AND_BRICK)
    assert (stats.column("closed_ns")[2], stats.running.is_open(1, 0)) == (0, True)
    stats.add(records((1, 0, 5)), *STEP_AND_BRICK)
    assert (stats.column("closed_ns")[2], stats.running.is_open(1, 0)) == (1, False)


@pytest.mark.parametrize("lanes", [(2, 4), (4, 2)])
def test_what_is_late_in_one_lane_may_be_early_in_another(lanes: tuple[int, int]) -> None:
    """In one lane, a step has ended at 100. In another lane, a step has ended at 50.

    A brick from 80 to 90 is late in the first lane. In the second lane, this brick belongs to the next step.
    """
    first, second = (lane << LANE_SHIFT for lane in lanes)
    stats = NodeStats()
    stats.add(records((1, 40, 50), (1, 10, 100), flags=(second, first)), *STEP_AND_BRICK)
    stats.add(records((2, 80, 90), (2, 80, 90), flags=(first, second)), *STEP_AND_BRICK)
    assert stats.column("closed_ns")[2] == 10
    assert [stats.running.is_open(1, lane) for lane in lanes] == [False, True]


def test_a_cancelled_step_is_told_among_what_has_changed() -> None:
    stats = NodeStats()
    changed, _ = stats.add(records((2, 10, 20), (1, 5, 30), flags=(0, FLAG_CANCELLED)), *STEP_AND_BRICK)
    assert changed.tolist() == [1, 2]
    assert (stats.rare("cancelled", [1]), stats.rare("cancelled_ns", [2])) == (1, 10)


# Node 1 is a step, node 2 a layer in it, and nodes 3 and 4 are bricks in this layer.
LAYERED = np.array([-1, 1, 1, 1, 1]), np.array([-1, -1, 1, 2, 2])


@given(
    st.lists(st.tuples(st.integers(3, 4), st.integers(0, 90), st.integers(0, 30)), max_size=12), st.integers(0, 12)
)
def test_what_ran_beside_its_like_is_counted_once_however_many_did(
    parts: list[tuple[int, int, int]], steps_before: int
) -> None:
    """Bricks overlap, as on streams of a device.

    The sum of their times is the time in which at least one brick ran, plus the time of overlap.
    """
    stats = NodeStats()
    stats.grow(5)
    rows, took_ns, union_ns = [], 0, 0
    for step in range(steps_before + 1):
        at_ns = 1_000 * step
        here = parts if step == steps_before else parts[:step]
        rows += [(node, at_ns + start, at_ns + start + long) for node, start, long in here]
        rows += [(2, at_ns, at_ns + 120), (1, at_ns, at_ns + 130)]
        took_ns += sum(long for _, _, long in here)
        union_ns += len({ns for _, start, long in here for ns in range(start, start + long)})
    stats.add(records(*rows), *LAYERED)
    assert stats.rare("overlap_ns", [2]) == took_ns - union_ns
    assert stats.rare("overlap_ns", [1, 3, 4]) == stats.rare("over", [1]) == 0


@pytest.mark.parametrize("cut", range(5))
@pytest.mark.parametrize(
    ("flags", "found"), [(0, 60 + 10), (LANES - 1 << LANE_SHIFT, 0), (FLAG_CANCELLED, 0), (FLAG_LOOSE, 0)]
)
def test_overlap_is_known_wherever_a_batch_is_cut_except_in_uncounted_steps(cut: int, flags: int, found: int) -> None:
    rows = [(3, 100, 200), (4, 140, 260), (3, 250, 300), (2, 100, 310), (1, 90, 320)]
    own = [flags if flags != FLAG_CANCELLED or node == 1 else 0 for node, _, _ in rows]
    stats, whole = NodeStats(), records(*rows, flags=own)
    stats.grow(5)
    changed = [stats.add(whole.only(part), *LAYERED)[0] for part in (np.arange(5) < cut, np.arange(5) >= cut)]
    assert stats.rare("overlap_ns", [2]) == found
    assert stats.rare("overlap_ns", [1, 3, 4]) == 0
    assert not found or 2 in changed[1]


def test_parts_that_ran_at_the_same_time_fit_into_a_step_and_others_do_not() -> None:
    """Two bricks of 80 ns fit into a step of 100 ns if they overlap, but not one after the other."""
    for second_ns, over_ns in ((1_010, 0), (1_080, 60)):
        for cut in range(3):
            stats, whole = NodeStats(), records((2, 1_000, 1_080), (2, second_ns, second_ns + 80), (1, 1_000, 1_100))
            stats.grow(3)
            for part in (np.arange(3) < cut, np.arange(3) >= cut):
                stats.add(whole.only(part), *STEP_AND_BRICK)
            assert stats.rare("over_ns", [1]) == over_ns
            assert stats.rare("overlap_ns", [1]) == (0 if over_ns else 70)


def test_a_long_step_keeps_its_overlap_however_many_batches_it_takes() -> None:
    stats = NodeStats()
    stats.grow(5)
    for at in range(3 * MAX_OPEN_PARTS):
        stats.add(records((3, 100 * at, 100 * at + 80), (4, 100 * at + 50, 100 * at + 90)), *LAYERED)
    assert stats.rare("overlap_ns", [2]) == 0  # the step has not ended
    stats.add(records((1, 0, 30_000)), *LAYERED)
    assert stats.rare("overlap_ns", [2]) == 3 * MAX_OPEN_PARTS * 30


@pytest.mark.parametrize("cut", range(7))
def test_calls_in_several_threads_are_steps_without_overlap(cut: int) -> None:
    """A call of a library is a step with one brick, in the first lane, although other threads' calls overlap it."""
    rows = [(2, 100, 200), (1, 100, 200), (2, 110, 210), (1, 110, 210), (2, 90, 400), (1, 90, 400)]
    stats, whole = NodeStats(), records(*rows)
    stats.grow(3)
    for part in (np.arange(6) < cut, np.arange(6) >= cut):
        stats.add(whole.only(part), *STEP_AND_BRICK)
    assert stats.column("closed_ns")[2] == 100 + 100 + 310
    assert stats.rare("overlap_ns", [1]) == stats.rare("over_ns", [1]) == 0
