"""Compute medians and other quantiles of calls with their errors, from blocks of histograms."""

# The interval of a quantile is Woodruff's (R. S. Woodruff, "Confidence intervals for medians and other position
# measures", Journal of the American Statistical Association 47, 1952). The share of calls above a quantile is a mean,
# with an error from blocks. The histogram converts this error to microseconds, over as many calls as the interval of
# a comparison has. With fewer calls, their distances vary by chance. If there are two kinds of calls, the median may
# jump from one kind to the other.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbtop.comparison.noise import MIN_BLOCKS, Figure, divided, figures, telling_blocks
from cbtop.profiler.analysis.growth import Growth
from cbtop.profiler.analysis.histograms import (
    BUCKETS,
    SUB_BUCKETS,
    Column,
    bucket_begin_ns,
    bucket_middle_ns,
    bucket_of,
)

MEDIAN, P99 = 0.5, 0.99
# The error of a quantile is known with at least this many calls above and below it. So a p99 needs at least 400
# calls.
MIN_BEYOND = 4
# The error, a share of calls, is converted to µs over the calls within this many standard errors on either side. The
# interval of a change is as wide.
_COVERED_ERRORS = 4.0
# Within blocks, the error is converted to µs over this many standard errors. Over fewer, the distances between calls
# vary too much by chance.
_NEAR_ERRORS = 2.0
# Limit of `stretch`: the error on a quantile's steep side is at most this many times the error from blocks.
_MAX_STRETCH = 4.0


@dataclass(frozen=True, slots=True)
class Quantile:
    """One quantile of the calls of each place (brick, layer, or brick in a layer).

    `figures` has µs per call for each place, or None with too few calls for an error. `us` has the quantile even with
    few calls (0 without any). `typical_us`, (blocks, places), is the time that a block would take if every call took
    the quantile. The error of its mean must be multiplied by `stretch`.
    """

    figures: list[Figure | None]
    us: NDArray[np.float64]
    typical_us: NDArray[np.float64]
    stretch: NDArray[np.float64]


class CallTimes:
    """The calls of `places` places in blocks of steps. Block i has `steps[i]` steps.

    `by_block` counts calls by block and place. Each column in `place_of` maps a node to the brick or layer that it
    belongs to, or to -1. A node may belong to several places, so there are several columns.

    `along` is a quantity of each block that makes calls longer, such as cached positions. The time of each call is
    converted to its mean. The slope is the median over all pairs of blocks (H. Theil, "A rank-invariant method of
    linear and polynomial regression analysis", 1950), from the median calls of both blocks. With `pace`, slopes are
    relative to the pace of all places.
    """

    def __init__(
        self,
        blocks: Sequence[Growth],
        place_of: Sequence[Column],
        places: int,
        steps: NDArray[np.float64],
        along: NDArray[np.float64] | None = None,
        pace: NDArray[np.float64] | None = None,
    ) -> None:
        parts = [_cells(block, column, at) for at, block in enumerate(blocks) for column in place_of]
        self._block, self._place, self._bucket, self._count = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        self._steps = steps
        self._off = np.zeros(len(steps)) if along is None else along - np.average(along, weights=steps)
        self._growth_us = np.zeros(places)  # growth of a call's time in µs per unit of `along`
        if len(self._block) and np.ptp(self._off) > 0:
            self._straighten(pace)
        self._sorted = _Sorted(self._place, self._bucket, self._count, places)
        self.calls = self._sorted.calls
        self.by_block = np.zeros((len(steps), places))
        np.add.at(self.by_block, (self._block, self._place), self._count)

    def quantile(self, fraction: float) -> Quantile:
        """Return the quantile at `fraction` (0 to 1) of the calls of each brick or layer, with errors as in
        `noise.figures`.
        """
        value_us = np.nan_to_num(self._sorted.at(np.full(len(self.calls), fraction)))
        begin, end = bucket_begin_ns(self._bucket), bucket_begin_ns(self._bucket + 1)
        above = np.zeros(self.by_block.shape)
        part = np.clip((end - value_us[self._place] * 1e3) / (end - begin), 0, 1)
        np.add.at(above, (self._block, self._place), part * self._count)
        shares = figures(above, self.by_block)
        off, blocks = np.array([one.error for one in shares]), np.array([one.blocks for one in shares])
        is_enough = (self.calls * min(fraction, 1 - fraction) >= MIN_BEYOND) & (blocks >= MIN_BLOCKS)
        blocks = np.minimum(blocks, telling_blocks(above - self.by_block * (1 - fraction)))
        known = (fraction - off > 0) & (fraction + off < 1) & is_enough
        steepest = self._steepest(fraction, off, value_us)
        us_a_share = np.maximum(self._us_a_share(fraction, off), steepest / _MAX_STRETCH)
        stretch = np.maximum(1.0, divided(steepest, us_a_share))
        error_us = us_a_share * stretch * off
        typical_us = us_a_share * (above - self.by_block * (1 - fraction))
        typical_us += self.by_block * (value_us + np.outer(self._off, self._growth_us))
        growth_error_us = np.where(self._growth_us, error_us / (self._off.std() or 1.0), 0.0)
        columns = (
            column.tolist() for column in (value_us, error_us, blocks, self._growth_us, growth_error_us, known)
        )
        return Quantile(
            [
                Figure(us, by, of, slope=growth, slope_error=growth_by) if is_known else None
                for us, by, of, growth, growth_by, is_known in zip(*columns, strict=True)
            ],
            value_us,
            typical_us,
            stretch,
        )

    def _us_a_share(self, fraction: float, off: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the slope of a quantile for each brick or layer, in µs per share of calls. It is computed from the
        calls on both sides of the quantile.
        """
        reach = np.minimum(_NEAR_ERRORS * off, min(fraction, 1 - fraction) / 2)
        low_us, high_us = (np.nan_to_num(self._sorted.at(fraction + side * reach)) for side in (-1, 1))
        return divided(high_us - low_us, 2 * reach)

    def _steepest(
        self, fraction: float, off: NDArray[np.float64], value_us: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the slope of a quantile for each brick or layer, in µs per share of calls, on its steeper side.

        At most half of the calls there are used, because a single pause is not typical.
        """
        steepest = np.zeros(len(off))
        for side, most in ((-1, fraction), (1, 1 - fraction)):
            reach = np.minimum(_COVERED_ERRORS * off, most / 2)
            moved_us = side * (np.nan_to_num(self._sorted.at(fraction + side * reach)) - value_us)
            steepest = np.maximum(steepest, divided(moved_us, reach))
        return steepest

    def _straighten(self, pace: NDArray[np.float64] | None) -> None:
        """Correct the calls of each brick or layer for the effect of `along` (the cached positions), unless the
        effect is smaller than a histogram bucket.
        """
        blocks, places = len(self._off), len(self._growth_us)
        each = _Sorted(self._block * places + self._place, self._bucket, self._count, blocks * places)
        median_us = each.at(np.full(blocks * places, MEDIAN)).reshape(blocks, places)
        # indices of the bricks and layers with calls in every block
        known = np.flatnonzero(np.isfinite(median_us).all(axis=0))
        rate_us = median_us[:, known] if pace is None else median_us[:, known] / pace[:, None]
        one, other = np.triu_indices(blocks, 1)
        is_apart = self._off[one] != self._off[other]
        one, other = one[is_apart], other[is_apart]
        growth_us = np.median((rate_us[other] - rate_us[one]) / (self._off[other] - self._off[one])[:, None], axis=0)
        is_told = np.abs(growth_us) * np.ptp(self._off) > np.median(rate_us, axis=0) / SUB_BUCKETS
        self._growth_us[known[is_told]] = growth_us[is_told]
        moved_ns = self._growth_us[self._place] * self._off[self._block] * 1e3
        moves = moved_ns != 0
        middle_ns = bucket_middle_ns(self._bucket[moves]) - moved_ns[moves]
        self._bucket[moves] = bucket_of(np.maximum(np.rint(middle_ns), 0).astype(np.int64))


class _Sorted:
    """The calls of several groups, sorted by duration in each group, to compute quantiles."""

    def __init__(self, group: Column, bucket: Column, count: Column, groups: int) -> None:
        self.calls = np.bincount(group, count, minlength=groups)
        self._key, where = np.unique(group * BUCKETS + bucket, return_inverse=True)
        self._counts = np.bincount(where, count, minlength=len(self._key))
        self._running = np.cumsum(self._counts)
        # number of calls in all groups before each group
        self._before = np.cumsum(self.calls) - self.calls
        self._first = np.searchsorted(self._key // BUCKETS, np.arange(groups))

    def at(self, fraction: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a quantile (µs) of the calls in each group. NaN without calls.

        `fraction` has an entry from 0 to 1 for each group.
        """
        if not len(self._key):
            return np.full(len(fraction), np.nan)
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
