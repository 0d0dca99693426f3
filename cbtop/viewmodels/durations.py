"""Make a bar chart of the durations of calls. A bar consists of one or more buckets of a histogram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cbtop.profiler.analysis.histograms import BUCKETS, Column, bucket_begin_ns

MAX_BARS = 64  # A brick has at most this many bars.


@dataclass(frozen=True, slots=True)
class DurationBar:
    """One bar of a histogram: the number of calls that took at least `from_us` and less than `to_us`."""

    from_us: float
    to_us: float
    count: int


def duration_bars(counts: Column, buckets_a_bar: int) -> tuple[DurationBar, ...]:
    """Return a histogram as bars, from short calls to long ones.

    A bar merges `buckets_a_bar` buckets (a power of two).
    """
    ran = np.flatnonzero(counts) // buckets_a_bar
    if not len(ran):
        return ()
    bars = np.arange(ran[0], ran[-1] + 2)
    edges_us = (bucket_begin_ns(np.minimum(bars * buckets_a_bar, BUCKETS)) / 1e3).tolist()
    # Buckets after the last bar contain no calls.
    summed = np.add.reduceat(counts, bars[:-1] * buckets_a_bar).tolist()
    return tuple(DurationBar(*edges, count) for edges, count in zip(pairwise(edges_us), summed, strict=True))


def at_most(bars: int, counts: Column) -> int:
    """Return the number of histogram buckets per bar, a power of two. It is the smallest number that gives at most
    `bars` bars.
    """
    ran = np.flatnonzero(counts)
    width = 1
    while len(ran) and ran[-1] // width - ran[0] // width >= bars:
        width *= 2
    return width


def coarser(bars: Sequence[DurationBar], most: int) -> tuple[DurationBar, ...]:
    """Return at most `most` bars. If there are more bars, each new bar merges the same number of old bars.

    The last new bar may merge fewer old bars.
    """
    each = -(-len(bars) // max(1, most))
    groups = [bars[at : at + each] for at in range(0, len(bars), max(1, each))]
    return tuple(DurationBar(group[0].from_us, group[-1].to_us, sum(bar.count for bar in group)) for group in groups)
