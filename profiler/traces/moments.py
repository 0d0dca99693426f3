"""Computes the mean, the deviation and other statistics of a tensor, in one pass over memory."""

# A chunk's mean and sum of squares are computed in float64 while the chunk is in cache. They are merged with earlier
# chunks as in Chan, Golub & LeVeque (1979). This is exact enough at any length, unlike a running sum of squares.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Values per chunk. As float64, a chunk takes 128 KiB and fits into a second-level cache.
CHUNK_ELEMENTS = 1 << 14


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of a tensor's finite values. Without any, they are None.

    `count` includes values that are not finite.
    """

    count: int
    nan_count: int
    inf_count: int
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None  # population standard deviation (divided by the count, not by the count minus one)
    l2_norm: float | None = None

    @property
    def largest(self) -> float:
        """The largest magnitude of the finite values, or 0 without any."""
        return 0.0 if self.min is None or self.max is None else max(abs(self.min), abs(self.max))


@dataclass(frozen=True, slots=True)
class _Moments:
    """The mean of the scaled values, and the sum of squared distances from it."""

    count: int
    mean: float
    distance: float

    def joined(self, other: _Moments) -> _Moments:
        count = self.count + other.count
        apart = other.mean - self.mean
        return _Moments(
            count,
            self.mean + apart * (other.count / count),
            self.distance + other.distance + apart * apart * (self.count * other.count / count),
        )

    def scaled(self, factor: float) -> _Moments:
        return _Moments(self.count, self.mean * factor, self.distance * factor * factor)


def tensor_stats(tensor: NDArray[Any]) -> TensorStats:
    """Return the statistics of `tensor`, of any float type and shape. Squares of large values do not overflow."""
    flat = tensor.reshape(-1)
    nan_count = inf_count = 0
    low, high = math.inf, -math.inf
    scale = 0.0  # the values are scaled by this power of two, at least as large as every magnitude yet
    moments = _Moments(0, 0.0, 0.0)
    for first in range(0, flat.size, CHUNK_ELEMENTS):
        values = flat[first : first + CHUNK_ELEMENTS].astype(np.float64)
        finite = np.isfinite(values)
        if not finite.all():
            nans = int(np.isnan(values).sum())
            nan_count += nans
            inf_count += int(values.size - finite.sum()) - nans
            values = values[finite]
            if not values.size:
                continue
        chunk_low, chunk_high = float(values.min()), float(values.max())
        low, high = min(low, chunk_low), max(high, chunk_high)
        needed = _power_of_two(max(-chunk_low, chunk_high))
        if needed > scale:
            moments = moments.scaled(scale / needed)
            scale = needed
        if scale:
            values /= scale
        chunk_mean = float(values.mean())
        values -= chunk_mean
        chunk = _Moments(values.size, chunk_mean, float(values @ values))
        moments = moments.joined(chunk) if moments.count else chunk
    if not moments.count:
        return TensorStats(flat.size, nan_count, inf_count)
    of_mean = moments.mean * moments.mean
    return TensorStats(
        count=flat.size,
        nan_count=nan_count,
        inf_count=inf_count,
        min=low,
        max=high,
        mean=moments.mean * scale,
        std=math.sqrt(moments.distance / moments.count) * scale,
        l2_norm=math.sqrt(moments.distance + moments.count * of_mean) * scale,
    )


def _power_of_two(magnitude: float) -> float:
    """Return the smallest power of two that is at least `magnitude`, within float64. 0 for 0."""
    if magnitude == 0:
        return 0.0
    return math.ldexp(1.0, min(max(math.frexp(magnitude)[1], -1021), 1023))
