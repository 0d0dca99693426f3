"""The roofline's arithmetic: intensity, the attainable rate, and a point's distance from it.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009: attainable FLOP/s
= min(peak FLOP/s, intensity x peak bandwidth).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cbtop.protocol.attributes import UNKNOWN_TYPE
from cbtop.protocol.messages import UNSURE_PERCENT

LIMITING_PERCENT = 60  # share of a roof: a point below it for every roof is limited by something else
MEMORY, COMPUTE, NO_ROOF = "memory", "compute", "latency or overhead"
SHARED = "several at once"  # steps share the roofs: a brick's own rate does not show what limits it


@dataclass(frozen=True, slots=True)
class Distance:
    """The relation of a measured rate to the roof above it."""

    attainable_gflops: float
    percent_of_roof: float
    bound: str  # MEMORY, COMPUTE, NO_ROOF or SHARED
    is_unsure: bool | None = None  # whether the roof above it is unsure; None: not known

    @property
    def above_roof(self) -> bool:
        """Whether it is above the measured maximum: then the declared work or the ceiling is wrong."""
        return self.percent_of_roof > 100


def spread_percent(value: float, median: float | None) -> float | None:
    """Return how far the median of a roof's rounds is below `value`, the best; None if there is no median."""
    return None if median is None else 100 * max(value - median, 0.0) / value


def is_unsure(value: float, median: float | None) -> bool | None:
    """Whether a roof's rounds differ so much that results from it are unsure; None if not known."""
    spread = spread_percent(value, median)
    return None if spread is None else spread > UNSURE_PERCENT


def is_integer(dtype: str) -> bool:
    """Whether numbers of `dtype` are integers; "" means floats of an unknown type."""
    return dtype.startswith(("int", "uint"))


def roof_applies(dtype: str, roof_dtype: str) -> bool:
    """Whether a compute roof for `roof_dtype` applies to work on numbers of `dtype`.

    It does if both are the same, or if one is not known and the other is of floats. No roof applies to an unknown
    type.
    """
    if dtype == UNKNOWN_TYPE:
        return False
    if dtype and roof_dtype:
        return dtype == roof_dtype
    return not is_integer(dtype or roof_dtype)


def intensity(flops: float | None, moved_bytes: float | None) -> float | None:
    """Return FLOP per byte, or None if either is unknown or 0."""
    if not flops or not moved_bytes:
        return None
    return flops / moved_bytes


def distance(
    flop_per_byte: float, gflops: float, peaks_gflops: Sequence[float], peaks_gb_per_sec: Sequence[float]
) -> Distance | None:
    """Return the roof above a point, made of the highest ceiling of each kind; None unless both kinds are known.

    A lower ceiling (DRAM under a cache) also limits a point that comes near to it.
    """
    if not peaks_gflops or not peaks_gb_per_sec:
        return None
    peak, slope = max(peaks_gflops), flop_per_byte * max(peaks_gb_per_sec)
    attainable = min(peak, slope)
    if not 0 < attainable < math.inf:
        return None  # the product of two extreme numbers: not a usable roof
    percent, bound = 100 * gflops / attainable, MEMORY if slope < peak else COMPUTE
    if percent < LIMITING_PERCENT:
        lower = [(flop_per_byte * each, MEMORY) for each in peaks_gb_per_sec] + [
            (each, COMPUTE) for each in peaks_gflops
        ]
        lowest, its_kind = min(lower)
        bound = its_kind if 100 * gflops >= LIMITING_PERCENT * lowest else NO_ROOF
    return Distance(attainable, percent, bound)
