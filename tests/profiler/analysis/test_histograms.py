"""Tests of sparse histograms: their counts equal those of a complete table. They use memory only for used octaves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis import histograms
from cbtop.profiler.analysis.histograms import (
    BUCKETS,
    MAX_DURATION_NS,
    MAX_PAGES,
    OCTAVES,
    SUB_BUCKETS,
    Histograms,
    bucket_begin_ns,
    bucket_middle_ns,
    bucket_of,
    distinct,
)

NODES = 200
COUNTS = [0, 1, 7, 2**16 - 1, 2**16, 2**32 - 1, 2**40]
cells = st.tuples(st.integers(0, NODES - 1), st.integers(0, BUCKETS - 1), st.sampled_from(COUNTS))
turns = st.lists(st.tuples(st.booleans(), st.lists(cells, unique_by=lambda cell: cell[:2], max_size=20)), max_size=8)


@given(st.integers(0, MAX_DURATION_NS))
def test_a_buckets_middle_is_within_one_percent_of_what_falls_into_it(duration_ns: int) -> None:
    bucket = bucket_of(np.array([duration_ns]))
    assert 0 <= bucket[0] < BUCKETS
    assert abs(bucket_middle_ns(bucket)[0] - duration_ns) <= 0.01 * duration_ns
    begin, next_begin = (int(bucket_begin_ns(one)[0]) for one in (bucket, bucket + 1))
    assert begin <= duration_ns < next_begin <= max(begin + 1, begin * (1 + 1 / SUB_BUCKETS))
    assert bucket_middle_ns(bucket)[0] == pytest.approx((begin + next_begin - 1) / 2)


def test_buckets_are_as_recordings_of_any_version_have_them() -> None:
    """Short durations have one bucket per nanosecond. Longer durations have 64 buckets per octave.

    The last bucket also has all durations beyond it.
    """
    for duration_ns, bucket in (
        (-5, 0),
        (0, 0),
        (1, 1),
        (127, 127),
        (129, 128),
        (130, 129),
        (1_000_000, 13 * 64 + 122),
        (MAX_DURATION_NS, BUCKETS - 1),
        (2**63 - 1, BUCKETS - 1),
    ):
        assert bucket_of(np.array([duration_ns])).tolist() == [bucket]
    assert (BUCKETS, SUB_BUCKETS) == (57 * 64, 64)


@given(st.lists(st.integers(0, 2**62)))
def test_the_distinct_values_are_those_of_a_set(values: list[int]) -> None:
    assert distinct(np.array(values, np.int64)).tolist() == sorted(set(values))


@given(turns)
def test_counts_are_those_of_a_table_of_every_bucket(turns: list[tuple[bool, list[tuple[int, int, int]]]]) -> None:
    dense, sparse = np.zeros((NODES, BUCKETS), np.int64), Histograms()
    for is_set, rows in turns:
        node, bucket, count = np.array(rows, np.int64).reshape(-1, 3).T
        if is_set:
            dense[node, bucket] = count
            sparse.set(node * BUCKETS + bucket, count)
        else:
            dense[node, bucket] += count
            sparse.add(node * BUCKETS + bucket, count)
    every = np.arange(NODES * BUCKETS)
    assert sparse.cells().tolist() == np.flatnonzero(dense).tolist()
    assert (sparse.counts(every) == dense.reshape(-1)).all()
    nodes = np.array([3, NODES - 1, NODES + 5, 0])
    place, bucket, count = sparse.cells_of(nodes)
    assert (nodes[place] < NODES).all()
    assert (dense[nodes[place], bucket] == count).all()
    assert sparse.sum(range(NODES)).tolist() == dense.sum(axis=0).tolist()


def test_a_table_stores_only_the_octaves_used_rather_than_all_buckets() -> None:
    sparse = Histograms()
    node = np.arange(1, 366)
    # The two durations near 5,000 ns are in the same octave, so each node uses three octaves.
    for duration_ns in (900, 5_000, 5_100, 40_000):
        sparse.add(node * BUCKETS + bucket_of(np.full(len(node), duration_ns)), np.ones(len(node), np.int64))
    assert sparse.size_bytes < 2 * (365 * 3 * SUB_BUCKETS * 2 + 365 * 4 * OCTAVES)
    assert sparse.size_bytes < 365 * BUCKETS * 8 / 10


def test_room_is_made_for_64_octaves_then_by_quarters_and_only_if_it_is_full() -> None:
    sparse, sizes = Histograms(), {}
    of_nodes, of_page = 64 * OCTAVES * 4, SUB_BUCKETS * 2
    # Use octaves one after another, beginning with node 63. Each new octave adds a page to the first, empty page.
    for used in range(1, 82):
        node, octave = divmod(used - 1, OCTAVES)
        sparse.add(np.array([(63 - node) * BUCKETS + octave * SUB_BUCKETS]), np.array([1]))
        sizes[used] = sparse.size_bytes - of_nodes
    for used, pages in ((1, 64), (63, 64), (64, 80), (79, 80), (80, 100)):
        assert sizes[used] == pages * of_page
    assert len(sparse.cells()) == 81
    sparse.add(np.array([64 * BUCKETS]), np.array([1]))
    assert sparse.size_bytes == 80 * OCTAVES * 4 + 100 * of_page


@pytest.mark.parametrize(("most", "width"), [(2**16 - 1, 2), (2**16, 4), (2**32 - 1, 4), (2**32, 8)])
def test_counts_take_two_bytes_until_one_outgrows_these_then_four_then_eight(most: int, width: int) -> None:
    sparse = Histograms()
    cell = BUCKETS + np.array([5, 6, 7])
    sparse.set(cell[[0, 2]], np.array([1, most]))
    assert sparse.size_bytes == 64 * OCTAVES * 4 + 64 * SUB_BUCKETS * width
    assert sparse.counts(cell).tolist() == [1, 0, most]


def test_who_names_every_octave_of_every_node_gets_no_more_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_PAGES * SUB_BUCKETS * 8 == 64 << 20
    monkeypatch.setattr(histograms, "MAX_PAGES", 100)
    cell = np.arange(0, NODES * BUCKETS, SUB_BUCKETS)
    one = np.ones(len(cell), np.int64)
    sparse = Histograms()
    sparse.add(cell, one)
    sparse.add(cell, one)
    assert len(sparse.cells()) == 99
    assert set(sparse.counts(cell).tolist()) == {0, 2}
    told = Histograms()
    assert told.set(cell, 2 * one).tolist() == [2] * len(cell)
    # The last cells have no room, so their counts are not stored. Their growth is returned in full each time.
    assert told.set(cell, 5 * one).tolist() == [3] * 99 + [5] * (len(cell) - 99)
    assert told.counts(cell).tolist() == [5] * 99 + [0] * (len(cell) - 99)
