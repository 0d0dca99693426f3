"""Tests of statistics: they equal the statistics of the single calls. Sums are exact, percentiles are within 1 %."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis import histograms
from cbtop.profiler.analysis.calls import PERCENTILES
from cbtop.profiler.analysis.growth import Growth
from cbtop.profiler.analysis.node_columns import COLUMNS, SPARSE_COLUMNS
from cbtop.profiler.analysis.stats import MAX_HISTOGRAM_NODES, SANE, NodeStats, sane
from cbtop.protocol.ring import (
    FLAG_AMOUNTS,
    FLAG_CANCELLED,
    FLAG_UNCOUNTED,
    UNKNOWN_AMOUNT,
)
from cbtop.protocol.ring_reader import Batch
from tests.profiler.analysis.made_batches import NO_STEPS, STEP_AND_BRICK, batch, records

durations = st.lists(st.integers(0, 10**10) | st.integers(0, 10**16), min_size=1, max_size=200)  # up to months
NOTHING = np.zeros(0, np.int64), np.zeros((len(COLUMNS), 0), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)


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
    # Nodes 1 and 5 are steps, and nodes 2 to 4 and 6 to 7 are in them.
    step_of = np.array([-1, 1, 1, 1, 1, 5, 5, 5, -1, -1], np.int64)
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
        # These statistics have no node for number 3 (it is mapped to 0), so its counts are left out.
        both.sparse.add_all(each.sparse, np.array([0, 7, 7]))
    assert [both.rare("uncounted", [node]) for node in (1, 3, 7)] == [0, 0, 3 + 5 + 4]


def test_counts_are_kept_in_as_few_bytes_as_they_need() -> None:
    stats = NodeStats()
    stats.add(batch([(1, 5_000, 2)]), NO_STEPS, NO_STEPS)
    few = stats.everything()
    assert few.count.dtype == np.uint32
    before_bytes = stats.size_bytes
    assert before_bytes > few.column("count").nbytes
    stats.add(replace(batch([(1, 5_000, 2)]), flags=np.array([FLAG_UNCOUNTED])), NO_STEPS, NO_STEPS)
    # A record with the flag UNCOUNTED needs an additional column, so the statistics need more memory.
    assert stats.size_bytes > before_bytes
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
        # The squares were added in another order, so the CV may differ by rounding.
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
    if len(values) == 1:
        assert calls.cv is None


@pytest.mark.parametrize("nodes", [[1], [2], [1, 2]])
def test_histograms_of_several_nodes_add_up(nodes: list[int]) -> None:
    stats = NodeStats()
    stats.add(batch([(1, 100, 0), (2, 100, 0), (2, 9000, 0)]), NO_STEPS, NO_STEPS)
    assert stats.histogram(nodes).sum() == sum(int(stats.column("count")[node]) for node in nodes)


rows_of_nodes = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10**9), st.integers(0, 9)), max_size=60)


def grown(stats: NodeStats, into: NodeStats) -> Growth:
    """Update the viewer's statistics `into` from `stats`. Return the growth of `into`."""
    node, cell = stats.nodes_with_records(), stats.all_buckets()
    at_node, at, value = (column.tolist() for column in stats.sparse.values_of(node.tolist()))
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
    first_of = np.arange(BEYOND + 6) % 2  # two alternating bricks
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


def test_a_copy_of_a_table_counts_for_itself() -> None:
    stats = NodeStats()
    stats.add(batch([(1, 5, 1)]), NO_STEPS, NO_STEPS)
    copied = deepcopy(stats)
    copied.add(batch([(1, 7, 1)]), NO_STEPS, NO_STEPS)
    node = np.array([1])
    copied.take_over(node, copied.totals(node) + 1, *NOTHING[2:], {})
    assert [table.column("count").tolist()[1] for table in (stats, copied)] == [1, 3]


TELLING = {  # Calls as (node, start, end, elements), and whether they are valid. Three nodes are known.
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
        # A record of amounts has two amounts in place of its times. The second amount may be less than the first.
        (7, 5, True),
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
    """There are two calls (one without a count of elements), a record of amounts, and two cancelled steps.

    One of the cancelled steps has no count of elements.
    """
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


def test_of_a_node_that_has_no_row_yet_nothing_is_left_out_as_plain() -> None:
    stats = NodeStats()
    stats.add(records((1, 10, 30)), *STEP_AND_BRICK)
    stats.take_over(*NOTHING, {(SPARSE_COLUMNS.index("plain"), 1): 1, (SPARSE_COLUMNS.index("plain"), 2): 7})
    assert stats.of_recorded("count").tolist() == [0, 0]
    assert stats.sparse.dense("plain", len(stats)).tolist() == [0, 1]
