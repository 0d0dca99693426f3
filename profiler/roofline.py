"""The roofline's arithmetic: intensity, what is attainable, and how far a point is from it.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009:
attainable FLOP/s = min(peak FLOP/s, intensity x peak bandwidth).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cbtop.protocol.attributes import UNKNOWN_TYPE

UNSURE_PERCENT = 10  # of a roof: rounds further apart than that say little of what is possible
LIMITING_PERCENT = 60  # of a roof: what is below that of every roof is limited by something else
MEMORY, COMPUTE, NO_ROOF = "memory", "compute", "latency or overhead"
SHARED = "several at once"  # steps share the roofs: what limits one of their bricks, its own rate does not say


@dataclass(frozen=True, slots=True)
class Distance:
    """How a measured rate stands to the roof above it."""

    attainable_gflops: float
    percent_of_roof: float
    bound: str  # MEMORY, COMPUTE, NO_ROOF or SHARED
    is_unsure: bool | None = None  # the roof above it is; None: that is not known

    @property
    def above_roof(self) -> bool:
        """Above what was measured to be possible: the work or the ceiling is not what it is said to be."""
        return self.percent_of_roof > 100


def spread_percent(value: float, median: float | None) -> float | None:
    """How far the median of a roof's rounds is below `value`, the best; None where there is only that."""
    return None if median is None else 100 * max(value - median, 0.0) / value


def is_unsure(value: float, median: float | None) -> bool | None:
    """Whether a roof's rounds lie so far apart that what is made of it is unsure; None where that is not known."""
    spread = spread_percent(value, median)
    return None if spread is None else spread > UNSURE_PERCENT


def is_integer(dtype: str) -> bool:
    """Whether numbers of `dtype` are whole; "" are floats of a kind that is not told."""
    return dtype.startswith(("int", "uint"))


def stands_under(dtype: str, roof_dtype: str) -> bool:
    """Whether work on numbers of `dtype` has a compute roof for `roof_dtype` above it: its own, or where one of both
    is not told, any of floats. No roof is above an unknown type."""
    if dtype == UNKNOWN_TYPE:
        return False
    if dtype and roof_dtype:
        return dtype == roof_dtype
    return not is_integer(dtype or roof_dtype)


def intensity(flops: float | None, moved_bytes: float | None) -> float | None:
    """FLOP per byte; None where either is unknown or nothing is moved or computed."""
    if not flops or not moved_bytes:
        return None
    return flops / moved_bytes


def distance(
    flop_per_byte: float, gflops: float, peaks_gflops: Sequence[float], peaks_gb_per_sec: Sequence[float]
) -> Distance | None:
    """The roof above a point, which the highest ceiling of each kind makes; None unless both kinds are known.

    The lower ones (DRAM under a cache) limit a point, too, that comes near to one of them.
    """
    if not peaks_gflops or not peaks_gb_per_sec:
        return None
    peak, slope = max(peaks_gflops), flop_per_byte * max(peaks_gb_per_sec)
    attainable = min(peak, slope)
    if not 0 < attainable < math.inf:
        return None  # the product of two extreme numbers: no roof to stand under
    percent, bound = 100 * gflops / attainable, MEMORY if slope < peak else COMPUTE
    if percent < LIMITING_PERCENT:
        lower = [(flop_per_byte * each, MEMORY) for each in peaks_gb_per_sec] + [
            (each, COMPUTE) for each in peaks_gflops
        ]
        lowest, its_kind = min(lower)
        bound = its_kind if 100 * gflops >= LIMITING_PERCENT * lowest else NO_ROOF
    return Distance(attainable, percent, bound)
