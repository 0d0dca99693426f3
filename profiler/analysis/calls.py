"""The statistics of a group of calls, with percentiles computed from histograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.analysis.histograms import BUCKETS, Column, bucket_middle_ns

# Percentiles to compute. Each is the shortest duration that this fraction of the calls did not exceed (nearest rank,
# no interpolation).
PERCENTILES = (0.50, 0.95, 0.99, 0.999)
MIN_VARIED = 2  # a single call has no variation
# `bincount` is faster than sorting if the possible keys are at most this many times the keys that have a count.
SPARSE = 8


@dataclass(frozen=True, slots=True)
class Calls:
    """The statistics of a group of calls. Percentiles and `cv` come from histograms, and are exact to one percent.

    They are None if the histograms have other calls than these: for nodes after MAX_HISTOGRAM_NODES, or if the
    histograms were full. In these cases, a result of NodeStats.since has no minimum and maximum either.
    """

    count: int
    failed: int
    total_ns: int
    min_ns: int | None
    max_ns: int | None
    elements: int
    cv: float | None  # the coefficient of variation: standard deviation / mean; None for a single call
    p50_ns: float | None
    p95_ns: float | None
    p99_ns: float | None
    p999_ns: float | None

    @property
    def mean_ns(self) -> float:
        return self.total_ns / self.count


def spread(
    cells: tuple[Column, Column, Column],
    group: Column,
    count: Column,
    low: Column,
    high: Column,
    fractions: Sequence[float] = PERCENTILES,
    *,
    with_cv: bool = True,
) -> list[NDArray[np.float64]]:
    """Return the percentiles of each group, and its cv if `with_cv`. `cells` are the nodes' histogram cells.

    They are NaN for a group if its histogram does not have exactly its calls.
    """
    groups = len(low)
    place, bucket, counts = cells
    # A key is group * buckets + bucket. So the counts of all groups are in one sorted array, with one cumulative sum.
    least = int(bucket.min(initial=BUCKETS))
    buckets = int(bucket.max(initial=least)) - least + 1
    key = group[place] * buckets + (bucket - least)
    # `bincount` adds up equal keys without sorting. This is faster if few possible keys have no count.
    if groups * buckets <= SPARSE * len(key):
        together = np.bincount(key, counts)  # sums as float64 are exact below 2 ** 53
        key = (together != 0).nonzero()[0]
        counts = together[key]
    elif np.any(key[1:] < key[:-1]):
        order = np.argsort(key, kind="stable")
        key, counts = key[order], counts[order]
    owner, middle = key // buckets, bucket_middle_ns(key % buckets + least)
    calls = np.bincount(owner, counts, minlength=groups)
    known = np.flatnonzero(calls)
    running, before = np.cumsum(counts, dtype=np.float64), np.cumsum(calls) - calls

    columns: list[NDArray[np.float64]] = []
    if with_cv:
        mean = _ratio(np.bincount(owner, counts * middle, minlength=groups), calls)
        variance = _ratio(np.bincount(owner, counts * (middle - mean[owner]) ** 2, minlength=groups), calls)
        variance[calls < MIN_VARIED] = np.nan
        columns.append(_ratio(np.sqrt(variance), mean))
    rank = before[known] + np.maximum(1, np.ceil(np.reshape(fractions, (-1, 1)) * calls[known]))
    percentiles = np.full((len(fractions), groups), np.nan)
    at = np.searchsorted(running, rank, side="left")
    percentiles[:, known] = np.clip(middle[at], low[known], high[known])
    columns += list(percentiles)
    others = calls != count  # this histogram lacks calls of the group, or has calls of other nodes
    if others.any():
        for column in columns:
            column[others] = np.nan
    return columns


def _ratio(over: NDArray[Any], under: NDArray[Any]) -> NDArray[np.float64]:
    """Return over / under. The result is NaN if `under` is zero."""
    found = np.full(len(over), np.nan)
    np.divide(over, under, out=found, where=under != 0)
    return found
