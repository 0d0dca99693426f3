"""Statistics are those of the calls themselves: sums exact, percentiles within one percent."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler import histograms
from cbtop.profiler.stats import (
    COLUMNS,
    MAX_HISTOGRAM_NODES,
    MAX_KEPT_INTERVALS,
    MAX_OPEN_PARTS,
    PERCENTILES,
    SANE,
    SPARSE_COLUMNS,
    Growth,
    NodeStats,
    sane,
)
from cbtop.protocol.ring import (
    FLAG_AMOUNTS,
    FLAG_CANCELLED,
    FLAG_FAILED,
    FLAG_LOOSE,
    FLAG_UNCOUNTED,
    LANE_SHIFT,
    LANES,
    UNKNOWN_AMOUNT,
)
from cbtop.protocol.ring_reader import Batch

durations = st.lists(st.integers(0, 10**10) | st.integers(0, 10**16), min_size=1, max_size=200)  # up to months
NO_STEPS = np.full(64, -1, np.int64)
NOTHING = np.zeros(0, np.int64), np.zeros((len(COLUMNS), 0), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)


def batch(rows: list[tuple[int, int, int]], failed: bool = False) -> Batch:
    """Records of (node, duration, elements)."""
    node, duration, elements = np.array(rows, np.int64).reshape(-1, 3).T
    start = np.arange(len(node), dtype=np.int64)
    return Batch(node, np.full(len(node), FLAG_FAILED if failed else 0), start, start + duration, elements, 0)


@given(durations)
def test_percentiles_are_within_one_percent_of_the_exact_ones(values: list[int]) -> None:
    stats = NodeStats()
    stats.add(batch([(1, value, 0) for value in values]), NO_STEPS, NO_STEPS)
    calls = stats.calls([1])
    assert calls is not None
    found = (calls.p50_ns, calls.p95_ns, calls.p99_ns, calls.p999_ns)
    for fraction, percentile in zip(PERCENTILES, found, strict=True):
        exact = sorted(values)[max(1, int(np.ceil(fraction * len(values)))) - 1]
        assert percentile is not None
        assert abs(percentile - exact) <= 0.01 * exact


def test_a_step_that_ends_in_the_future_keeps_no_later_interval_for_ever() -> None:
    stats = NodeStats()
    step_of = np.array([-1, 1], np.int64)
    one = np.ones(4096, np.int64)
    stats.add(Batch(one[:1], one[:1] * 0, one[:1] << 50, (one[:1] << 50) + 5, one[:1], 0), step_of, NO_STEPS)
    for number in range(64):
        begin = 10 * np.arange(4096 * number, 4096 * (number + 1))
        stats.add(Batch(one, one * 0, begin, begin + 1, one, 0), step_of, NO_STEPS)
    assert stats.rare("union_ns", (1,)) >= 64 * 4096
    kept = sum(len(begins) for parts in stats._intervals.values() for begins, _ in parts)
    assert kept <= 2 * (MAX_KEPT_INTERVALS + 4096)  # of the step, and of all steps


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10**9)), max_size=80))
def test_medians_in_one_go_are_those_of_the_calls(rows: list[tuple[int, int]]) -> None:
    stats, nodes = NodeStats(), np.arange(1, 10)
    stats.grow(10)
    stats.add(batch([(node, duration, 0) for node, duration in rows]), NO_STEPS, NO_STEPS)
    for node, median_ns in zip(nodes.tolist(), stats.medians_ns(nodes).tolist(), strict=True):
        calls = stats.calls([node])
        assert median_ns == calls.p50_ns if calls else np.isnan(median_ns)


def test_nothing_counted_is_no_calls() -> None:
    assert NodeStats().calls([]) is None
    assert NodeStats().calls_of([[1], [], [2, 3]]) == [None, None, None]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10**9), st.integers(0, 10**6)), max_size=80))
def test_sums_are_those_of_the_records(rows: list[tuple[int, int, int]]) -> None:
    stats = NodeStats()
    stats.grow(10)
    for at in range(0, len(rows), 7):
        stats.add(batch(rows[at : at + 7]), NO_STEPS, NO_STEPS)
    for node in range(1, 10):
        own = [row for row in rows if row[0] == node]
        assert stats.column("count")[node] == len(own)
        assert stats.column("total_ns")[node] == sum(duration for _, duration, _ in own)
        assert stats.column("elements")[node] == sum(elements for _, _, elements in own)
        assert stats.column("max_ns")[node] == max((duration for _, duration, _ in own), default=0)
        assert stats.histogram([node]).sum() == len(own)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10**9), st.integers(0, 9)), min_size=1, max_size=60))
def test_a_table_fed_only_what_changed_is_the_same_table(rows: list[tuple[int, int, int]]) -> None:
    step_of = np.array([-1, 1, 1, 1, 1, 5, 5, 5, -1, -1], np.int64)  # nodes 1 and 5 are steps
    part_of = np.array([-1, -1, 1, 1, 1, -1, 5, 5, -1, -1], np.int64)
    ours, theirs = NodeStats(), NodeStats()
    ours.grow(10)
    for at in range(0, len(rows), 5):
        node, cell = ours.add(batch(rows[at : at + 5]), step_of, part_of)
        theirs.take_over(node, ours.totals(node), cell, ours.buckets(cell), {})
    theirs.grow(10)
    for name in COLUMNS:
        assert ours.column(name).tolist() == theirs.column(name).tolist()
    assert ours.histogram(range(10)).tolist() == theirs.histogram(range(10)).tolist()


def test_failed_calls_are_counted_apart() -> None:
    stats = NodeStats()
    stats.add(batch([(1, 5, 0)]), NO_STEPS, NO_STEPS)
    stats.add(batch([(1, 5, 0), (1, 6, 0)], failed=True), NO_STEPS, NO_STEPS)
    assert (stats.column("count")[1], stats.column("failed")[1]) == (3, 2)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.integers(1, 7))
def test_what_lies_in_ended_steps_is_closed_wherever_a_batch_was_cut(bricks: list[int], cut: int) -> None:
    step_of, part_of = np.array([[-1, 1, 1], [-1, -1, 1]], np.int64)  # node 1 is a step, node 2 a brick in it
    rows = [row for n in bricks for row in [(2, 10, 1)] * n + [(1, 100, 1)]] + [(2, 10, 1)] * 3
    stats = NodeStats()
    stats.grow(3)
    whole = batch(rows)
    end_ns = 1000 * np.arange(1, len(rows) + 1)  # one after the other
    whole = replace(whole, start_ns=end_ns - (whole.end_ns - whole.start_ns), end_ns=end_ns)
    for at in range(0, len(rows), cut):
        stats.add(whole.only((np.arange(len(rows)) >= at) & (np.arange(len(rows)) < at + cut)), step_of, part_of)
    assert stats.column("closed_ns").tolist() == [0, 100 * len(bricks), 10 * sum(bricks)]
    assert stats.column("total_ns")[2] == 10 * (sum(bricks) + 3)


@pytest.mark.parametrize("cut", [0, 2])
def test_what_lies_in_a_step_that_is_recorded_behind_a_later_one_is_its_own(cut: int) -> None:
    """As of one that waited for a device: its records come in the lane of a step that began and ended after it."""
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
    """A step of 100 ns has a brick of 60; two more that were deferred until after it add 70 and 10."""
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
    """Two steps at the same time, each with a brick; the one that ends first closes its own."""
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


def test_the_last_step_times_are_returned_up_to_a_bound_for_all_nodes() -> None:
    step_of, part_of = np.array([-1, 1, 2]), np.array([-1, -1, -1])
    stats = NodeStats()
    stats.grow(3)
    for at in range(4):
        rows = [(1, 1_000 * at + 100, 1_000 * at + 300), (2, 1_000 * at + 500, 1_000 * at + 600)]
        node, start, end = np.array(rows, np.int64).T
        stats.add(Batch(node, np.zeros(2, np.int64), start, end, np.ones(2, np.int64), 0), step_of, part_of)
    node, begin, length = stats.intervals(0, 100)
    assert node.tolist() == [0] * 8 + [1] * 4 + [2] * 4  # 0: any step
    assert begin[8:].tolist() == [100, 1_100, 2_100, 3_100, 500, 1_500, 2_500, 3_500]
    assert begin[:8].tolist() == sorted(begin[8:].tolist())
    assert length[8:].tolist() == [200] * 4 + [100] * 4
    node, begin, _ = stats.intervals(2_300, 6)
    assert (node.tolist(), begin.tolist()) == ([0] * 4 + [1] * 2, [2_100, 2_500, 3_100, 3_500, 2_100, 3_100])
    assert stats.intervals(2_300, 3)[1].tolist() == [2_500, 3_100, 3_500]
    assert stats.intervals(10_000, 3)[0].tolist() == []


def test_all_that_is_counted_is_the_growth_since_nothing_was() -> None:
    stats = NodeStats()
    stats.add(batch([(1, 5_000, 2), (2, 7_000, 3), (1, 9_000, 4)]), NO_STEPS, NO_STEPS)
    found = stats.everything()
    assert (found.node.tolist(), found.column("total_ns").tolist()) == ([1, 2], [14_000, 7_000])
    assert (found.column("count").tolist(), int(found.count.sum()), found.is_empty) == ([2, 1], 3, False)
    again = NodeStats()
    again.count(found)
    assert again.column("elements").tolist()[1:3] == [6, 3]
    assert found.size_bytes == sum(array.nbytes for array in (found.node, found.sums, found.cell, found.count))
    with_rare = replace(found, rare={(0, 1): 5})
    assert with_rare.size_bytes > found.size_bytes
    assert NodeStats().everything().is_empty


def test_rare_totals_of_several_tables_add_up_where_their_nodes_lie_here() -> None:
    one, other, both = NodeStats(), NodeStats(), NodeStats()
    one.take_over(*NOTHING, {(SPARSE_COLUMNS.index("uncounted"), 1): 3, (SPARSE_COLUMNS.index("uncounted"), 2): 5})
    other.take_over(*NOTHING, {(SPARSE_COLUMNS.index("uncounted"), 1): 4, (SPARSE_COLUMNS.index("uncounted"), 3): 9})
    for each in (one, other):
        both.add_rare(each, np.array([0, 7, 7]))  # node 3 is none that is known here
    assert [both.rare("uncounted", [node]) for node in (1, 3, 7)] == [0, 0, 3 + 5 + 4]


def test_counts_are_kept_in_as_few_bytes_as_they_need() -> None:
    stats = NodeStats()
    stats.add(batch([(1, 5_000, 2)]), NO_STEPS, NO_STEPS)
    few = stats.everything()
    assert few.count.dtype == np.uint32
    before_bytes = stats.size_bytes
    assert before_bytes > few.column("count").nbytes
    stats.add(replace(batch([(1, 5_000, 2)]), flags=np.array([FLAG_UNCOUNTED])), NO_STEPS, NO_STEPS)
    assert stats.size_bytes > before_bytes  # a rare column more
    many = NodeStats()
    many.count(replace(few, count=few.count.astype(np.int64) << 32))
    assert many.everything().count.tolist() == [1 << 32]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10**9), st.just(1)), min_size=1, max_size=80),
    st.lists(st.sets(st.integers(0, 12)), max_size=4),
)
def test_the_calls_of_a_group_are_those_of_its_nodes(
    rows: list[tuple[int, int, int]], groups: list[set[int]]
) -> None:
    stats = NodeStats()
    stats.grow(11)
    stats.add(batch(rows), NO_STEPS, NO_STEPS)
    for group, calls in zip(groups, stats.calls_of([sorted(group) for group in groups]), strict=True):
        own = [(1, duration, elements) for node, duration, elements in rows if node in group]
        alone = NodeStats()
        alone.add(batch(own), NO_STEPS, NO_STEPS)
        expected = alone.calls([1])
        if calls is None or expected is None:
            assert calls is expected
            continue
        # The same squares, added up in another order.
        assert calls.cv == pytest.approx(expected.cv, rel=1e-9)
        assert replace(calls, cv=None) == replace(expected, cv=None)


@given(durations)
def test_the_variation_is_that_of_the_calls(values: list[int]) -> None:
    stats = NodeStats()
    stats.add(batch([(1, value, 0) for value in values]), NO_STEPS, NO_STEPS)
    calls = stats.calls([1])
    assert calls is not None
    if calls.cv is not None:
        assert abs(calls.cv - np.std(values) / np.mean(values)) <= 0.02 * (1 + calls.cv)


@pytest.mark.parametrize("nodes", [[1], [2], [1, 2]])
def test_histograms_of_several_nodes_add_up(nodes: list[int]) -> None:
    stats = NodeStats()
    stats.add(batch([(1, 100, 0), (2, 100, 0), (2, 9000, 0)]), NO_STEPS, NO_STEPS)
    assert stats.histogram(nodes).sum() == sum(int(stats.column("count")[node]) for node in nodes)


rows_of_nodes = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10**9), st.integers(0, 9)), max_size=60)


def grown(stats: NodeStats, into: NodeStats) -> Growth:
    """What `into` has to grow by to be `stats`, as a viewer learns it; `into` is then the same table."""
    node, cell = stats.nodes_with_records(), stats.all_buckets()
    at_node, at, value = (column.tolist() for column in stats.rare_values(node.tolist()))
    rare = {(one, here): int(number) for here, one, number in zip(at_node, at, value, strict=True)}
    return into.take_over(node, stats.totals(node), cell, stats.buckets(cell), rare)


@given(rows_of_nodes, rows_of_nodes, st.integers(1, 20))
def test_the_growth_since_a_moment_is_what_came_after_it(
    before: list[tuple[int, int, int]], after: list[tuple[int, int, int]], cut: int
) -> None:
    stats, alone, viewer = NodeStats(), NodeStats(), NodeStats()
    for table in (stats, alone, viewer):
        table.grow(10)
    stats.add(batch(before), NO_STEPS, NO_STEPS)
    grown(stats, viewer)
    parts = []
    for at in range(0, len(after), cut):
        stats.add(batch(after[at : at + cut]), NO_STEPS, NO_STEPS)
        parts.append(grown(stats, viewer))
    alone.add(batch(after), NO_STEPS, NO_STEPS)
    since = viewer.since(Growth.of(parts))
    for name in ("count", "failed", "total_ns", "elements"):
        assert since.column(name).tolist() == alone.column(name).tolist()
    for node in range(1, 10):
        assert since.histogram([node]).tolist() == alone.histogram([node]).tolist()
    found, expected = since.calls(range(1, 10)), alone.calls(range(1, 10))
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found.p50_ns, found.cv) == (pytest.approx(expected.p50_ns, rel=0.01), expected.cv)
        assert found.min_ns == pytest.approx(expected.min_ns, rel=0.01)
        assert found.max_ns == pytest.approx(expected.max_ns, rel=0.01)


def test_what_said_nothing_new_has_not_grown() -> None:
    stats, viewer = NodeStats(), NodeStats()
    stats.add(batch([(1, 5, 1), (2, 7, 1)]), NO_STEPS, NO_STEPS)
    assert grown(stats, viewer).node.tolist() == [1, 2]
    assert grown(stats, viewer).size_bytes == 0


def test_counts_that_shrank_are_not_counted() -> None:
    stats, viewer = NodeStats(), NodeStats()
    stats.add(batch([(1, 5, 1), (1, 7, 1)]), NO_STEPS, NO_STEPS)
    grown(stats, viewer)
    fewer = NodeStats()
    fewer.add(batch([(1, 5, 1)]), NO_STEPS, NO_STEPS)
    assert viewer.since(grown(fewer, viewer)).calls([1]) is None


BEYOND = MAX_HISTOGRAM_NODES + 1


@given(st.lists(st.tuples(st.integers(BEYOND - 2, BEYOND + 5), st.integers(0, 10**9), st.just(1)), min_size=1))
def test_a_place_beyond_the_bound_has_no_percentiles_but_its_brick_has(
    rows: list[tuple[int, int, int]],
) -> None:
    first_of = np.arange(BEYOND + 6) % 2  # two bricks, in turn
    step_of = np.full(BEYOND + 6, -1, np.int64)
    stats, viewer, one_place = NodeStats(), NodeStats(), NodeStats()
    grown(stats, viewer)
    for at in range(0, len(rows), 3):
        stats.add(batch(rows[at : at + 3]), step_of, step_of, first_of)
    since = viewer.since(grown(stats, viewer))
    one_place.add(batch([(1 + node % 2, duration, n) for node, duration, n in rows]), NO_STEPS, NO_STEPS)
    for table in (stats, viewer, since):
        for brick in (0, 1):
            places = [node for node in range(BEYOND - 2, BEYOND + 6) if node % 2 == brick]
            found, expected = table.calls(places), one_place.calls([1 + brick])
            assert (found and found.count) == (expected and expected.count)
            if found and expected and table is not since:
                assert replace(found, cv=None) == replace(expected, cv=None)
            if found and expected:
                assert (found.p50_ns, found.p99_ns) == pytest.approx((expected.p50_ns, expected.p99_ns), rel=0.01)
            within = [table.calls([node]) for node in places if node < BEYOND]
            assert all(one is None or one.p50_ns is not None for one in within)
            beyond = [node for node in places if node >= BEYOND and table.calls([node])]
            if len(beyond) > 1:
                assert all((calls := table.calls([node])) and calls.p50_ns is None for node in beyond)


def test_where_a_histogram_found_no_room_there_are_no_percentiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histograms, "MAX_PAGES", 3)
    stats = NodeStats()
    stats.add(batch([(1, 10, 0), (1, 100, 0), (1, 1000, 0), (2, 10, 0)]), NO_STEPS, NO_STEPS)
    calls = stats.calls([1])
    assert calls is not None
    assert (calls.count, calls.total_ns, calls.max_ns, calls.p50_ns, calls.cv) == (3, 1110, 1000, None, None)


def test_steps_that_come_one_by_one_for_hours_are_kept_in_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbtop.profiler.stats.MAX_KEPT_INTERVALS", 1024)
    stats = NodeStats()
    one, step_of = np.ones(1, np.int64), np.array([-1, 1], np.int64)
    for at in range(2_500):
        stats.add(Batch(one, 0 * one, one * at * 10, one * (at * 10 + 7), one, 0), step_of, NO_STEPS)
    newest = Batch(one, 0 * one, one * 15_000, one * 25_000, one, 0)  # over the last 1,000 of them
    stats.add(newest, step_of, NO_STEPS)
    assert stats.rare("union_ns", [1]) == 1_500 * 7 + 10_000
    assert len(stats._intervals[1]) <= MAX_OPEN_PARTS
    assert sum(part[0].nbytes for part in stats._intervals[1]) < 25_000


def test_a_copy_of_a_table_counts_for_itself() -> None:
    stats = NodeStats()
    stats.add(batch([(1, 5, 1)]), NO_STEPS, NO_STEPS)
    copied = deepcopy(stats)
    copied.add(batch([(1, 7, 1)]), NO_STEPS, NO_STEPS)
    node = np.array([1])
    copied.take_over(node, copied.totals(node) + 1, *NOTHING[2:], {})
    assert [table.column("count").tolist()[1] for table in (stats, copied)] == [1, 3]


TELLING = {  # of a call: node, start, end, elements; three nodes are known
    "the first node": ((1, 5, 9, 2), True),
    "the last node": ((3, 5, 9, 2), True),
    "no node": ((0, 5, 9, 2), False),
    "a node beyond": ((4, 5, 9, 2), False),
    "from zero": ((1, 0, 9, 2), True),
    "before zero": ((1, -1, 9, 2), False),
    "at once": ((1, 5, 5, 2), True),
    "back in time": ((1, 5, 4, 2), False),
    "as long as can be": ((1, 0, SANE - 1, 2), True),
    "longer": ((1, 0, SANE, 2), False),
    "late by its clock": ((1, SANE - 5, SANE + 5, 2), True),
    "half as late by its clock": ((1, SANE // 2, SANE // 2 + 5, 2), True),
    "no elements": ((1, 5, 9, 0), True),
    "fewer than none": ((1, 5, 9, -1), False),
    "as many as can be": ((1, 5, 9, SANE - 1), True),
    "more": ((1, 5, 9, SANE), False),
}


@pytest.mark.parametrize(("call", "tells"), TELLING.values(), ids=TELLING)
def test_what_a_record_must_be_to_tell_something(call: tuple[int, int, int, int], tells: bool) -> None:
    node, start, end, elements = (np.array([each], np.int64) for each in call)
    assert sane(Batch(node, np.zeros(1, np.int64), start, end, elements, 0), 3).tolist() == [tells]


@pytest.mark.parametrize(
    ("flops", "moved", "tells"),
    [
        (7, 5, True),  # no times: they may fall
        (UNKNOWN_AMOUNT, UNKNOWN_AMOUNT, True),
        (UNKNOWN_AMOUNT - 1, 5, False),
        (5, UNKNOWN_AMOUNT - 1, False),
    ],
)
def test_amounts_of_work_tell_something_if_both_are_given_or_unknown(flops: int, moved: int, tells: bool) -> None:
    one = np.ones(1, np.int64)
    found = sane(Batch(one, FLAG_AMOUNTS * one, flops * one, moved * one, one, 0), 3)
    assert found.tolist() == [tells]


def test_received_counts_calls_amounts_and_cancelled_steps_once_each() -> None:
    """Two calls, one of them without a count of elements; amounts; two cancelled steps, one without a count."""
    step = 4
    node = np.array([1, 1, 1, step, step], np.int64)
    flags = np.array([0, FLAG_UNCOUNTED, FLAG_AMOUNTS, FLAG_CANCELLED, FLAG_CANCELLED | FLAG_UNCOUNTED], np.int64)
    start = np.arange(5, dtype=np.int64)
    step_of = NO_STEPS.copy()
    step_of[step] = step
    stats = NodeStats()
    stats.add(Batch(node, flags, start, start + 10, np.ones(5, np.int64), 0), step_of, NO_STEPS)
    assert stats.received == 5
    assert stats.rare("uncounted", (1,)) == 1
    assert stats.rare("uncounted", (step,)) == 0
    assert stats.rare("cancelled", (step,)) == 2


def records(*rows: tuple[int, int, int], flags: Sequence[int] = ()) -> Batch:
    """Records of (node, start, end)."""
    node, start, end = np.array(rows, np.int64).T
    return Batch(
        node, np.array(flags or [0] * len(rows), np.int64), start, end, np.zeros(len(rows), np.int64), overwritten=0
    )


STEP_AND_BRICK = np.array([-1, 1, 1]), np.array([-1, -1, 1])  # node 1 is a step, node 2 a brick in it


def test_steps_that_begin_where_the_last_ended_are_one_interval() -> None:
    stats = NodeStats()
    stats.add(records((1, 10, 20), (1, 20, 30), (1, 31, 40)), *STEP_AND_BRICK)
    node, begin, length = stats.intervals(0, 100)
    assert [begin[node == 1].tolist(), length[node == 1].tolist()] == [[10, 31], [20, 9]]
    assert stats.rare("union_ns", [1]) == 29


def test_what_is_deferred_until_after_the_second_of_two_steps_is_the_seconds() -> None:
    stats = NodeStats()
    stats.add(records((1, 10, 20), (1, 30, 50), (2, 35, 45)), *STEP_AND_BRICK)
    assert stats.column("closed_ns")[2] == 10
    assert not stats.is_open(1, 0)


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
    assert (stats.column("closed_ns")[2], stats.is_open(1, 0)) == (5, False)


def test_what_takes_no_time_as_a_step_ends_is_of_the_next() -> None:
    stats = NodeStats()
    stats.add(records((1, 10, 20)), *STEP_AND_BRICK)
    stats.add(records((2, 20, 20)), *STEP_AND_BRICK)
    assert stats.is_open(1, 0)


def test_a_step_has_the_square_of_its_tokens_up_to_a_largest_count() -> None:
    stats = NodeStats()
    for tokens, squared in ((3, 9), (4, 9 + 16), (1 << 40, 9 + 16 + (1 << 64))):
        stats.add(replace(records((1, 10, 20)), elements=np.array([tokens])), *STEP_AND_BRICK)
        assert stats.rare("squared_tokens", [1]) == squared


def test_what_begins_with_the_clock_is_open_until_its_step_ends() -> None:
    """No step has ended before it: it is late for none."""
    stats = NodeStats()
    stats.grow(3)
    stats.add(records((2, 0, 1)), *STEP_AND_BRICK)
    assert (stats.column("closed_ns")[2], stats.is_open(1, 0)) == (0, True)
    stats.add(records((1, 0, 5)), *STEP_AND_BRICK)
    assert (stats.column("closed_ns")[2], stats.is_open(1, 0)) == (1, False)


@pytest.mark.parametrize("lanes", [(2, 4), (4, 2)])
def test_what_is_late_in_one_lane_may_be_early_in_another(lanes: tuple[int, int]) -> None:
    """A step ended at 100 in one lane, at 50 in the other; 80 to 90 is late in the one, and of a later step in the
    other."""
    first, second = (lane << LANE_SHIFT for lane in lanes)
    stats = NodeStats()
    stats.add(records((1, 40, 50), (1, 10, 100), flags=(second, first)), *STEP_AND_BRICK)
    stats.add(records((2, 80, 90), (2, 80, 90), flags=(first, second)), *STEP_AND_BRICK)
    assert stats.column("closed_ns")[2] == 10
    assert [stats.is_open(1, lane) for lane in lanes] == [False, True]


def test_a_cancelled_step_is_told_among_what_has_changed() -> None:
    stats = NodeStats()
    changed, _ = stats.add(records((2, 10, 20), (1, 5, 30), flags=(0, FLAG_CANCELLED)), *STEP_AND_BRICK)
    assert changed.tolist() == [1, 2]
    assert (stats.rare("cancelled", [1]), stats.rare("cancelled_ns", [2])) == (1, 10)


def test_of_a_node_that_has_no_row_yet_nothing_is_left_out_as_plain() -> None:
    stats = NodeStats()
    stats.add(records((1, 10, 30)), *STEP_AND_BRICK)
    stats.take_over(*NOTHING, {(SPARSE_COLUMNS.index("plain"), 1): 1, (SPARSE_COLUMNS.index("plain"), 2): 7})
    assert stats.of_recorded("count").tolist() == [0, 0]
    assert stats.rare_column("plain").tolist() == [0, 1]


# Node 1 is a step, 2 a layer in it, 3 and 4 bricks in that.
LAYERED = np.array([-1, 1, 1, 1, 1]), np.array([-1, -1, 1, 2, 2])


@given(
    st.lists(st.tuples(st.integers(3, 4), st.integers(0, 90), st.integers(0, 30)), max_size=12), st.integers(0, 12)
)
def test_what_ran_beside_its_like_is_counted_once_however_many_did(
    parts: list[tuple[int, int, int]], steps_before: int
) -> None:
    """As on streams of a device: what all took added up is the time in which any ran, and the overlap."""
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
    """A step of 100 ns: two bricks of 80 beside each other fit, one behind the other they do not."""
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
    assert stats.rare("overlap_ns", [2]) == 0  # it has not ended
    stats.add(records((1, 0, 30_000)), *LAYERED)
    assert stats.rare("overlap_ns", [2]) == 3 * MAX_OPEN_PARTS * 30
