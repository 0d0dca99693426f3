"""Measures the cost of a stamp (a kernel that stores the device's time) inside a CUDA graph, because replays with
stamps take longer.

Each replay without stamps is compared with the last one with stamps. The cost per stamp is the median of the
differences. Its error is the wider side of the median's 95 % interval (by order statistics), or with few values the
largest deviation from the median.

Empty kernels would show too small a cost. On an H100, a stamp costs 0.95 us between them, but 1.10 us in a decoding
model, because the next kernel cannot begin early there.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

ENOUGH = 3
SAMPLES = 121
Z_95 = 1.96


@dataclass(frozen=True, slots=True)
class StampCost:
    """How much longer a replay takes because of one stamp, in ns (never negative), and the error of this figure."""

    cost_ns: float
    error_ns: float


class StampCosts:
    """Measures the cost of a stamp in the replays of one graph."""

    def __init__(self) -> None:
        self._found: deque[float] = deque(maxlen=SAMPLES)
        self._around: deque[int] = deque(maxlen=SAMPLES)
        # The duration in ns of the last replay with stamps, and how many stamps it had.
        self._last: tuple[int, int] | None = None
        self.seen = 0
        self.known: StampCost | None = None

    def stamped(self, took_ns: int, stamps: int, beside_ns: int) -> None:
        """Add a replay with `stamps` stamps inside, which took `took_ns`.

        `beside_ns` is the time from the stamp before the replay to the stamp after it (pairs.py), minus the time from
        the first to the last stamp inside.
        """
        self._last = took_ns, stamps
        self._around.append(beside_ns)

    def plain(self, took_ns: int) -> None:
        """Add a replay without stamps. `took_ns` is measured in the same way as with stamps."""
        last, self._last = self._last, None
        if last is not None and last[1] > 0:
            self._found.append((last[0] - took_ns) / last[1])
            self.seen += 1
            if self.seen >= ENOUGH:
                self.known = _middle_of(sorted(self._found))

    def guess(self) -> StampCost | None:
        """Return the cost of a stamp, or None without comparisons. With fewer than ENOUGH comparisons it is only an
        estimate.
        """
        return self.known or (_middle_of(sorted(self._found)) if self._found else None)

    def inside_ns(self, around_ns: int) -> int:
        """Estimate how long a replay took. `around_ns` is the time from the stamp before it to the stamp after it."""
        around = sorted(self._around)
        return max(0, around_ns - around[len(around) // 2]) if around else around_ns


def _middle_of(ordered: list[float]) -> StampCost:
    count = len(ordered)
    middle = ordered[count // 2] if count % 2 else (ordered[count // 2 - 1] + ordered[count // 2]) / 2
    reach = math.ceil(Z_95 * math.sqrt(count) / 2)
    low, high = ordered[max(0, count // 2 - reach)], ordered[min(count - 1, count // 2 + reach)]
    return StampCost(max(0.0, middle), max(1.0, high - middle, middle - low))
