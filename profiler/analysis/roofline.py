"""Roofline arithmetic: intensity, attainable rate, and the distance of a point from its roof.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009: attainable FLOP/s
= min(peak FLOP/s, intensity x peak bandwidth).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cbtop.protocol.attributes import UNKNOWN_TYPE
from cbtop.protocol.messages import UNSURE_PERCENT

# If a brick is slower than this percentage of every roof, neither memory nor arithmetic limits it.
LIMITING_PERCENT = 60
MEMORY, COMPUTE, NO_ROOF = "memory", "compute", "latency or overhead"
# Steps that run at the same time share the roofs, so it is unknown what limits their bricks.
SHARED = "several at once"


@dataclass(frozen=True, slots=True)
class Distance:
    """A measured rate compared with the roof above it."""

    attainable_gflops: float
    percent_of_roof: float
    bound: str  # what limits the rate: MEMORY, COMPUTE, NO_ROOF or SHARED
    is_unsure: bool | None = None  # True if the measured rounds of the roof differ much; None if unknown

    @property
    def above_roof(self) -> bool:
        """Whether the rate exceeds the roof. Then the brick's declared work or the measured roof is wrong."""
        return self.percent_of_roof > 100


def spread_percent(value: float, median: float | None) -> float | None:
    """Return by how many percent the median of a roof's rounds is below the best round, `value`. None without a
    median.
    """
    return None if median is None else 100 * max(value - median, 0.0) / value


def is_unsure(value: float, median: float | None) -> bool | None:
    """Return whether the rounds of a roof differ so much that comparisons with it are unsure. None if unknown."""
    spread = spread_percent(value, median)
    return None if spread is None else spread > UNSURE_PERCENT


def is_integer(dtype: str) -> bool:
    """Return whether `dtype` is an integer type. "" means floats of an unknown type."""
    return dtype.startswith(("int", "uint"))


def roof_applies(dtype: str, roof_dtype: str) -> bool:
    """Return whether a compute roof for `roof_dtype` applies to numbers of `dtype`.

    A roof applies if both types are equal, or if one is "" and the other is a float type. No roof applies to a
    type that begins with UNKNOWN_TYPE.
    """
    if dtype.startswith(UNKNOWN_TYPE):
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
    """Compare a measured rate with the roof above it. None unless FLOP and byte ceilings are known.

    The roof consists of the highest ceiling of each kind. A point near a lower ceiling (DRAM below a cache) is
    limited by that one.
    """
    if not peaks_gflops or not peaks_gb_per_sec:
        return None
    peak, slope = max(peaks_gflops), flop_per_byte * max(peaks_gb_per_sec)
    attainable = min(peak, slope)
    if not 0 < attainable < math.inf:
        return None  # with such peaks, the attainable rate would be infinite or 0
    percent, bound = 100 * gflops / attainable, MEMORY if slope < peak else COMPUTE
    if percent < LIMITING_PERCENT:
        lower = [(flop_per_byte * each, MEMORY) for each in peaks_gb_per_sec] + [
            (each, COMPUTE) for each in peaks_gflops
        ]
        lowest, its_kind = min(lower)
        bound = its_kind if 100 * gflops >= LIMITING_PERCENT * lowest else NO_ROOF
    return Distance(attainable, percent, bound)
