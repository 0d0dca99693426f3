"""The last seconds of a source, beside its whole life.

Statistics are sums since the source began. A few copies of them are kept, taken about a second apart: what happened
in the last seconds is the sums now, less those in the copy from that long ago.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from cbtop.profiler.stats import NodeStats, Snapshot

DEFAULT_WINDOW_S = 10.0
# A copy is taken every SPACING_S, or ten times in a window that is longer than ten seconds. The window shown begins
# at a copy, so it may be longer than asked for by the time between two copies.
SPACING_S = 1.0
SNAPSHOTS = 10
MAX_CELLS = 1 << 22  # of 12 bytes, in all copies of a source; beyond it, the window is shorter than was asked


@dataclass(frozen=True, slots=True)
class _Taken:
    monotonic_ns: int
    snapshot: Snapshot


class Window:
    """The last `length_s` seconds of one source."""

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._spacing_ns = round(max(SPACING_S, length_s / SNAPSHOTS) * 1e9)
        self._taken: deque[_Taken] = deque()
        self._now_ns = 0

    def tick(self, monotonic_ns: int, stats: NodeStats) -> None:
        """Copy `stats` if that is due at `monotonic_ns` of the daemon's clock, and drop copies that are too old."""
        self._now_ns = monotonic_ns
        if self._taken and monotonic_ns - self._taken[-1].monotonic_ns < self._spacing_ns:
            return
        self._taken.append(_Taken(monotonic_ns, stats.snapshot()))
        # One copy that is older than the window is kept: the window begins there.
        while len(self._taken) > 1 and monotonic_ns - self._taken[1].monotonic_ns >= self.length_s * 1e9:
            self._taken.popleft()
        while sum(len(taken.snapshot.cell) for taken in self._taken) > MAX_CELLS:
            self._taken.popleft()

    def statistics(self, stats: NodeStats) -> tuple[NodeStats, float]:
        """The statistics of the window, where `stats` are those of now, and how many seconds the window covers."""
        if not self._taken:
            return NodeStats(), 0.0
        old_enough = [taken for taken in self._taken if self._now_ns - taken.monotonic_ns >= self.length_s * 1e9]
        begin = old_enough[-1] if old_enough else self._taken[0]
        return stats.since(begin.snapshot), max(0.0, (self._now_ns - begin.monotonic_ns) / 1e9)
