"""Make a bar chart of the durations of calls. A bar has one or more buckets of a histogram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cbtop.profiler.analysis.histograms import BUCKETS, Column, bucket_begin_ns

MAX_BARS = 64  # A brick has at most this many bars.


@dataclass(frozen=True, slots=True)
class DurationBar:
    """A bar of a histogram: the calls that took `from_us` or longer, and less than `to_us`."""

    from_us: float
    to_us: float
    count: int


def duration_bars(counts: Column, buckets_a_bar: int) -> tuple[DurationBar, ...]:
    """Return a histogram as bars, from short calls to long ones. Each merges `buckets_a_bar` buckets (a power of
    two).
    """
    ran = np.flatnonzero(counts) // buckets_a_bar
    if not len(ran):
        return ()
    bars = np.arange(ran[0], ran[-1] + 2)
    edges_us = (bucket_begin_ns(np.minimum(bars * buckets_a_bar, BUCKETS)) / 1e3).tolist()
    # Buckets after the last bar are empty.
    summed = np.add.reduceat(counts, bars[:-1] * buckets_a_bar).tolist()
    return tuple(DurationBar(*edges, count) for edges, count in zip(pairwise(edges_us), summed, strict=True))


def at_most(bars: int, counts: Column) -> int:
    """Return how many histogram buckets make a bar: the smallest power of two that gives at most `bars` bars."""
    ran = np.flatnonzero(counts)
    width = 1
    while len(ran) and ran[-1] // width - ran[0] // width >= bars:
        width *= 2
    return width


def coarser(bars: Sequence[DurationBar], most: int) -> tuple[DurationBar, ...]:
    """Return at most `most` bars. If there are more, each new bar merges equally many old ones, except perhaps the
    last.
    """
    each = -(-len(bars) // max(1, most))
    groups = [bars[at : at + each] for at in range(0, len(bars), max(1, each))]
    return tuple(DurationBar(group[0].from_us, group[-1].to_us, sum(bar.count for bar in group)) for group in groups)
