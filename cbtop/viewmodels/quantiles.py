"""Medians and other quantiles of calls, from blocks of histograms, and how far chance may move them; derived."""

# The interval of a quantile is Woodruff's (R. S. Woodruff, "Confidence intervals for medians and other position
# measures", Journal of the American Statistical Association 47, 1952): how many calls are above it is a mean like any
# other, whose error the blocks tell, and what it is off by in calls the histogram turns into microseconds.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.histograms import BUCKETS, Column, bucket_begin_ns
from cbtop.profiler.stats import Growth
from cbtop.viewmodels.noise import Figure, figures

MEDIAN, P99 = 0.5, 0.99
MIN_BEYOND = 4  # calls on either side of a quantile: a p99 is of 400 calls or more


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile of each place: µs of a call, None where there are too few calls to tell how far it may be off; and
    what all calls of a block (row) would take, if each took as long as this quantile was in the block, µs."""

    figures: list[Figure | None]
    typical_us: NDArray[np.float64]


class CallTimes:
    """The calls of `places` places in blocks. `place_of`: of each node the place that its calls are those of, or -1;
    where a node is of several places, several such columns."""

    def __init__(self, blocks: Sequence[Growth], place_of: Sequence[Column], places: int) -> None:
        parts = [_cells(block, column, at) for at, block in enumerate(blocks) for column in place_of]
        self._block, self._place, self._bucket, self._count = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        self._blocks = len(blocks)
        self.calls = np.bincount(self._place, self._count, minlength=places)
        key = self._place * BUCKETS + self._bucket
        self._key, where = np.unique(key, return_inverse=True)
        count = np.bincount(where, self._count, minlength=len(self._key))
        owner = self._key // BUCKETS
        self._running = np.cumsum(count)
        self._counts = count
        self._before = np.cumsum(self.calls) - self.calls  # calls of the places before each
        self._first = np.searchsorted(owner, np.arange(places))

    def quantile(self, fraction: float, steps: NDArray[np.float64], along: NDArray[np.float64] | None) -> Quantile:
        """That quantile of each place, where its blocks are of so many `steps`, see `noise.figures`."""
        value_us = self._at(np.full(len(self.calls), fraction))
        begin, end = bucket_begin_ns(self._bucket), bucket_begin_ns(self._bucket + 1)
        above = np.zeros((self._blocks, len(self.calls)))
        part = np.clip((end - value_us[self._place] * 1e3) / (end - begin), 0, 1)
        np.add.at(above, (self._block, self._place), part * self._count)
        each = self.calls / steps.sum()
        by_block = figures(above, steps, along)
        off = np.divide([one.error for one in by_block], each, out=np.ones(len(each)), where=each > 0)
        low, high = fraction - off, fraction + off
        known = (low > 0) & (high < 1) & (self.calls * min(fraction, 1 - fraction) >= MIN_BEYOND)
        low_us, high_us = (self._at(np.where(known, edge, fraction)) for edge in (low, high))
        error_us = (high_us - low_us) / 2
        us_a_share = np.divide(error_us, off, out=np.zeros(len(off)), where=known & (off > 0))
        moved_us = us_a_share * (above - np.outer(steps, each * (1 - fraction)))
        moved_us += np.outer(steps, each * np.where(known, value_us, 0))
        columns = (column.tolist() for column in (value_us, error_us, known))
        rows = zip(by_block, zip(*columns, strict=True), strict=True)
        return Quantile(
            [Figure(us, by, one.blocks) if is_known else None for one, (us, by, is_known) in rows], moved_us
        )

    def _at(self, fraction: NDArray[np.float64]) -> NDArray[np.float64]:
        """A quantile of each place, µs; not a number where it has no calls."""
        rank = self._before + fraction * self.calls
        at = np.searchsorted(self._running, rank, side="left")
        last = np.append(self._first[1:], len(self._key)) - 1
        at = np.clip(at, self._first, np.maximum(last, self._first)).clip(0, len(self._key) - 1)
        bucket = self._key[at] % BUCKETS
        begin, end = bucket_begin_ns(bucket), bucket_begin_ns(bucket + 1)
        part = 1 - (self._running[at] - rank) / self._counts[at]
        found: NDArray[np.float64] = (begin + np.clip(part, 0, 1) * (end - begin)) / 1e3
        return np.where(self.calls > 0, found, np.nan)


def _cells(block: Growth, place_of: Column, at: int) -> tuple[Column, Column, Column, Column]:
    node = block.cell.astype(np.int64) // BUCKETS
    place = np.where(node < len(place_of), place_of[np.minimum(node, len(place_of) - 1)], -1)
    known = place >= 0
    bucket, count = block.cell[known].astype(np.int64) % BUCKETS, block.count[known].astype(np.int64)
    return np.full(len(bucket), at), place[known], bucket, count
