"""What happened lately: a few snapshots of a source's statistics, to tell its last seconds from its whole life."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from cbtop.profiler.stats import NodeStats, Snapshot

DEFAULT_WINDOW_S = 10.0
SPACING_S = 1.0
SNAPSHOTS = 10  # in a window, or one every SPACING_S where that is fewer: a window is at most so much too long
MAX_CELLS = 1 << 22  # of all snapshots of a source, 12 bytes each; beyond it the window covers less than was asked


@dataclass(frozen=True, slots=True)
class _Taken:
    monotonic_ns: int
    snapshot: Snapshot


class Window:
    """Snapshots enough to show the last `length_s` of one source."""

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._spacing_ns = round(max(SPACING_S, length_s / SNAPSHOTS) * 1e9)
        self._taken: deque[_Taken] = deque()
        self._now_ns = 0

    def tick(self, monotonic_ns: int, stats: NodeStats) -> None:
        """It is `monotonic_ns` on the daemon's clock: take a snapshot if one is due, let go of those too old."""
        self._now_ns = monotonic_ns
        if self._taken and monotonic_ns - self._taken[-1].monotonic_ns < self._spacing_ns:
            return
        self._taken.append(_Taken(monotonic_ns, stats.snapshot()))
        # The newest of those older than the window is where it begins.
        while len(self._taken) > 1 and monotonic_ns - self._taken[1].monotonic_ns >= self.length_s * 1e9:
            self._taken.popleft()
        while sum(len(taken.snapshot.cell) for taken in self._taken) > MAX_CELLS:
            self._taken.popleft()

    def statistics(self, stats: NodeStats) -> tuple[NodeStats, float]:
        """What `stats` has counted in the window, and how many seconds that really covers."""
        if not self._taken:
            return NodeStats(), 0.0
        old_enough = [taken for taken in self._taken if self._now_ns - taken.monotonic_ns >= self.length_s * 1e9]
        begin = old_enough[-1] if old_enough else self._taken[0]
        return stats.since(begin.snapshot), max(0.0, (self._now_ns - begin.monotonic_ns) / 1e9)
