"""Histograms count what a table of every bucket counts, in the memory of the octaves that were used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler import histograms
from cbtop.profiler.histograms import (
    BUCKETS,
    MAX_DURATION_NS,
    OCTAVES,
    SUB_BUCKETS,
    Histograms,
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


def test_a_table_takes_the_octaves_that_were_used_and_not_the_buckets_there_are() -> None:
    sparse = Histograms()
    node = np.arange(1, 366)
    for duration_ns in (900, 5_000, 5_100, 40_000):  # three octaves of each
        sparse.add(node * BUCKETS + bucket_of(np.full(len(node), duration_ns)), np.ones(len(node), np.int64))
    assert sparse.size_bytes < 2 * (365 * 3 * SUB_BUCKETS * 2 + 365 * 4 * OCTAVES)
    assert sparse.size_bytes < 365 * BUCKETS * 8 / 10


def test_who_names_every_octave_of_every_node_gets_no_more_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histograms, "MAX_PAGES", 100)
    sparse = Histograms()
    cell = np.arange(0, NODES * BUCKETS, SUB_BUCKETS)
    sparse.add(cell, np.ones(len(cell), np.int64))
    sparse.add(cell, np.ones(len(cell), np.int64))
    assert len(sparse.cells()) == 99
    assert set(sparse.counts(cell).tolist()) == {0, 2}
