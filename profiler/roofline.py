"""The roofline's arithmetic: intensity, what is attainable, and how far a point is from it.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009:
attainable FLOP/s = min(peak FLOP/s, intensity x peak bandwidth).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Distance:
    """How a measured rate stands to the roof above it."""

    attainable_gflops: float
    percent_of_roof: float
    bound: str  # "memory" left of the ridge, "compute" right of it

    @property
    def above_roof(self) -> bool:
        """Above what was measured to be possible: the work or the ceiling is not what it is said to be."""
        return self.percent_of_roof > 100


def intensity(flops: float | None, moved_bytes: float | None) -> float | None:
    """FLOP per byte; None where either is unknown or nothing is moved or computed."""
    if not flops or not moved_bytes:
        return None
    return flops / moved_bytes


def distance(
    flop_per_byte: float, gflops: float, peak_gflops: float | None, peak_gb_per_sec: float | None
) -> Distance | None:
    """The roof above a point; None unless both ceilings are known."""
    if not peak_gflops or not peak_gb_per_sec:
        return None
    slope = flop_per_byte * peak_gb_per_sec
    attainable = min(peak_gflops, slope)
    if not 0 < attainable < math.inf:
        return None  # the product of two extreme numbers: no roof to stand under
    return Distance(attainable, 100 * gflops / attainable, "memory" if slope < peak_gflops else "compute")
