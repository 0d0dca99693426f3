"""The statistics of a source over its last seconds.

A daemon sends sums since the source began. The viewer stores how much they grow in slices of about a second. The
window is the sum of the last slices.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cbtop.profiler.analysis.growth import Growth
from cbtop.profiler.analysis.histograms import Column, distinct
from cbtop.profiler.analysis.node_columns import SPARSE_COLUMNS
from cbtop.profiler.analysis.sparse_columns import SPARSE_BYTES
from cbtop.profiler.analysis.stats import NodeStats

# A slice begins every SPACING_S seconds, or in a window above ten seconds every tenth of the window. Slices are
# aligned to the daemon's clock, so all viewers show the same numbers. A window begins with a whole slice, so it may
# be one slice too long.
SPACING_S = 1.0
SLICES = 10
SUM_KEPT_S = 5.0  # The sum over a window is dropped this many seconds after its last use.
_UNION = SPARSE_COLUMNS.index("union_ns")


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A time range on the clock of the source's host.

    A step counts when it ends, so some of its time may be from before the range. `before_ns` has this time for each
    step node. None if the daemon does not report when steps ran.
    """

    begin_ns: int
    end_ns: int
    before_ns: Mapping[int, int] | None = None

    @property
    def covers_s(self) -> float:
        return max(0, self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Losses:
    """Number of records since the daemon found the process: `seen` were written, `lost` were lost."""

    lost: int = 0
    seen: int = 0


@dataclass(frozen=True, slots=True)
class SliceGrowth:
    """The growth of the statistics in a finished slice of the window. Begin and end are on the clock of the source's
    host.
    """

    begin_ns: int
    end_ns: int
    growth: Growth


@dataclass(slots=True)
class _Slice:
    begin_ns: int
    losses: Losses | None  # records seen and lost before the slice; None if unknown
    parts: list[Growth] = field(default_factory=list)
    # Step node -> time of its step before this slice. It counts for a range that begins with this slice (see
    # `TimeRange.before_ns`).
    before_ns: dict[int, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts) + SPARSE_BYTES * len(self.before_ns)


def reaches_back_s(length_s: float) -> float:
    """Return the longest wait in seconds until a window of `length_s` seconds begins."""
    return length_s + 3 * _spacing_s(length_s)


def _spacing_s(length_s: float) -> float:
    return max(SPACING_S, length_s / SLICES)


class Window:
    """The statistics of a source over the last `length_s` seconds, or over all of a chosen range."""

    def __init__(self, length_s: float, *, is_range: bool = False) -> None:
        self.length_s = length_s
        self.is_range = is_range
        self.size_bytes = 0
        self._spacing_ns = round(_spacing_s(length_s) * 1e9)
        self._slices: deque[_Slice] = deque()
        self.now_ns = 0  # time of the daemon's clock in its latest message
        self._is_told = False  # whether the daemon reports when steps ran
        self._losses: Losses | None = None
        # The sum of statistics over the window, while it is viewed. New growth is added, and growth that leaves the
        # window is subtracted.
        self._sum: NodeStats | None = None
        self._before = 0  # number of oldest slices that are not in the sum
        self._asked_ns = 0  # when the sum was last used

    @property
    def sum_bytes(self) -> int:
        """Memory of the window's sum in bytes. `size_bytes` leaves it out."""
        return self._sum.size_bytes if self._sum is not None else 0

    @property
    def stored_slices(self) -> int:
        """Number of stored slices. One may be older than the window."""
        return len(self._slices)

    @property
    def has_begun(self) -> bool:
        """Whether statistics of the source have arrived. The first ones are in no slice."""
        return self.now_ns > 0

    def from_now_on(self, length_s: float) -> Window:
        """Return the window of a range of `length_s` seconds that begins now."""
        found = Window(length_s, is_range=True)
        found._is_told = self._is_told
        if self.has_begun:
            found.tick(self.now_ns, losses=self._losses)
        return found

    def tick(self, monotonic_ns: int, growth: Growth | None = None, losses: Losses | None = None) -> None:
        """Set the daemon's clock to `monotonic_ns`, add `growth`, and begin a new slice if the current one is full.

        A keyframe that only repeats statistics begins no slice, because some viewers do not receive keyframes.
        """
        self.now_ns = monotonic_ns
        if self._losses is None:  # Records lost before the daemon's first report of losses do not count.
            for one in self._slices:
                one.losses = losses
        self._losses = losses = losses or self._losses
        if growth is not None and self._slices:  # Growth before the first slice is in no slice.
            self._slices[-1].parts.append(growth)
            self.size_bytes += growth.size_bytes
            if self._sum is not None:
                self._sum.count(growth)
        if monotonic_ns - self._asked_ns > SUM_KEPT_S * 1e9:
            self._sum = None
        is_new = growth is None or not growth.is_empty
        if self._slices and not (is_new and self._is_due(monotonic_ns)):
            return
        if self._slices:
            parts = self._slices[-1].parts
            together = [Growth.of(parts)] if parts else []
            self.size_bytes += sum(part.size_bytes for part in together) - sum(part.size_bytes for part in parts)
            self._slices[-1].parts = together
        self._slices.append(_Slice(monotonic_ns, losses))
        # Keep one slice more than needed, because the window begins with a whole slice and may be longer than
        # `length_s`.
        while len(self._slices) > 1 and monotonic_ns - self._slices[1].begin_ns >= self.length_s * 1e9:
            self.shorten()

    def _is_due(self, monotonic_ns: int) -> bool:
        return monotonic_ns // self._spacing_ns > self._slices[-1].begin_ns // self._spacing_ns

    def clip(self, node: Column, begin_ns: Column, length_ns: Column) -> None:
        """Store for each slice the step time from before it that counts in it or later.

        This is the early part of steps that end after the slice begins. The arguments are the newest intervals of
        steps (see StatsUpdate).
        """
        self._is_told |= len(node) > 0
        grown: Counter[int] = Counter()
        end_ns, steps = begin_ns + length_ns, distinct(node).tolist()
        for one in reversed(self._slices):
            began = begin_ns <= one.begin_ns
            if not began.any():
                # No step began before this slice, so none began before an earlier one.
                return
            for part in one.parts:
                grown.update({step: part.rare.get((_UNION, step), 0) for step in steps})
            before = len(one.before_ns)
            inside_ns = np.maximum(end_ns - np.maximum(begin_ns, one.begin_ns), 0)
            for step in distinct(node[began]).tolist():
                before_ns = grown[step] - int(inside_ns[node == step].sum())
                if before_ns > 0:
                    # A forged message may have long intervals. Their sums would overflow. So limit this time.
                    one.before_ns[step] = min(before_ns, grown[step])
                else:
                    one.before_ns.pop(step, None)
            self.size_bytes += SPARSE_BYTES * (len(one.before_ns) - before)

    def shorten(self) -> None:
        """Drop the oldest slice of the window."""
        if self._sum is not None:
            self._begin_sum_at(self._sum, max(1, self._before))
            self._before -= 1
        self.size_bytes -= self._slices.popleft().size_bytes

    def statistics(self, stats: NodeStats) -> tuple[NodeStats, TimeRange]:
        """Return the statistics and the time range of the window.

        `stats` are the source's current totals. The result changes when more growth arrives.
        """
        if not self._slices:
            return NodeStats(), TimeRange(self.now_ns, self.now_ns)
        first = self._first()
        if self._sum is None:
            self._sum, self._before = NodeStats(), len(self._slices)
        self._asked_ns = self.now_ns
        self._begin_sum_at(self._sum, first)
        begins = self._slices[first]
        before_ns = dict(begins.before_ns) if self._is_told else None
        return stats.recent_part(self._sum), TimeRange(begins.begin_ns, self.now_ns, before_ns)

    def _begin_sum_at(self, total: NodeStats, first: int) -> None:
        """Make `total` begin at slice `first`. The slices in between are added or subtracted."""
        for at in range(min(first, self._before), max(first, self._before)):
            for part in self._slices[at].parts:
                total.count(part, -1 if first > self._before else 1)
        self._before = first

    def blocks(self) -> list[SliceGrowth]:
        """Return the finished slices of the window, oldest first."""
        shown = list(self._slices)[self._first() :] if self._slices else []
        return [SliceGrowth(one.begin_ns, then.begin_ns, Growth.of(one.parts)) for one, then in pairwise(shown)]

    @property
    def losses(self) -> Losses:
        """Numbers of seen and lost records in the window."""
        before, now = self._slices[self._first()].losses if self._slices else None, self._losses
        return Losses(now.lost - before.lost, now.seen - before.seen) if before and now else Losses()

    def _first(self) -> int:
        """Return the index of the first slice of the window."""
        old_enough = [at for at, one in enumerate(self._slices) if self.now_ns - one.begin_ns >= self.length_s * 1e9]
        return old_enough[-1] if old_enough else 0

    @property
    def has_watched(self) -> bool:
        """Whether the window has data of at least one slice.

        True for a chosen range. False if no data has arrived yet, or if the source ended before we connected.
        """
        if self.is_range:
            return True
        return bool(self._slices) and self.now_ns - self._slices[0].begin_ns >= SPACING_S * 1e9
