"""Takes fingerprints of a run's results, and finds the first difference from another run."""

# Threads and backends add in different orders, so correct runs differ in their last bits. Fingerprints are therefore
# compared with a tolerance, never bit by bit.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.profiler.traces.moments import TensorStats, tensor_stats

SAMPLED_VALUES = 64  # number of values in a fingerprint, taken from a tensor at equal distances
MAX_FINGERPRINTS = 100_000
# A different order of additions changes a float32 result by far less than this, and a wrong value by far more.
DEFAULT_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The statistics of a tensor, and its values at fixed places."""

    stats: TensorStats
    places: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DivergenceInfo:
    """The first place, in order of execution, where a run differs from its reference.

    `quantity` is the value that differs (`mean`, `value[17]`, …). `expected` is the reference's value, and `actual`
    the run's. None means that the value does not exist. If the run has no fingerprint here, `quantity` is `recorded`.
    """

    brick: str
    layer: int | None
    position: int
    quantity: str
    expected: float | None
    actual: float | None


# Where a fingerprint belongs: the brick, its layer, the position of the token, and how often the brick ran there
# before.
_Place = tuple[str, int | None, int, int]


class Fingerprints:
    """The results of a run: a fingerprint for each brick, layer and token position, in order of execution."""

    def __init__(self) -> None:
        self.dropped = 0  # number of fingerprints beyond MAX_FINGERPRINTS, which were dropped
        self._kept: dict[_Place, Fingerprint] = {}
        self._seen: Counter[tuple[str, int | None, int]] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def record(self, brick: str, layer: int | None, position: int, tensor: NDArray[Any]) -> None:
        """Store the fingerprint of `tensor`. A brick that runs twice in a layer has two."""
        if len(self._kept) >= MAX_FINGERPRINTS:
            self.dropped += 1
            return
        turn = self._seen[brick, layer, position]
        self._seen[brick, layer, position] += 1
        self._kept[brick, layer, position, turn] = fingerprint(tensor)

    def find_divergence(self, reference: Fingerprints, tolerance: float = DEFAULT_TOLERANCE) -> DivergenceInfo | None:
        """Return the first missing or different fingerprint, compared with `reference`. None if all agree.

        `tolerance` is the allowed error of one value, relative to the typical size of the tensor's values.
        """
        for place, expected in reference._kept.items():
            brick, layer, position, _ = place
            actual = self._kept.get(place)
            if actual is None:
                return DivergenceInfo(brick, layer, position, "recorded", 1.0, None)
            for quantity, wanted, found in _differences(expected, actual, tolerance):
                return DivergenceInfo(brick, layer, position, quantity, wanted, found)
        return None

    def clear(self) -> None:
        """Forget everything."""
        self.dropped = 0
        self._kept.clear()
        self._seen.clear()


def fingerprint(tensor: NDArray[Any]) -> Fingerprint:
    """Return the fingerprint of `tensor`, which may have any shape."""
    flat = tensor.reshape(-1)
    places = np.unique(np.linspace(0, max(flat.size - 1, 0), min(SAMPLED_VALUES, flat.size)).astype(np.int64))
    return Fingerprint(
        tensor_stats(flat),
        tuple(int(place) for place in places),
        tuple(float(value) for value in flat[places]),
    )


def _differences(
    expected: Fingerprint, actual: Fingerprint, tolerance: float
) -> Iterator[tuple[str, float | None, float | None]]:
    """Yield each statistic or value that differs by more than `tolerance`, with the expected and the actual
    number.
    """
    wanted, found = expected.stats, actual.stats
    for name in ("count", "nan_count", "inf_count"):
        if getattr(wanted, name) != getattr(found, name):
            yield name, getattr(wanted, name), getattr(found, name)
    of_value = tolerance * wanted.largest
    for place, one, other in zip(expected.places, expected.values, actual.values, strict=False):
        if math.isfinite(one) and math.isfinite(other):
            if not abs(one - other) <= of_value:
                yield f"value[{place}]", one, other
        elif not (one == other or (math.isnan(one) and math.isnan(other))):
            yield f"value[{place}]", one, other
    finite = wanted.count - wanted.nan_count - wanted.inf_count
    # Rounding errors in a tensor are independent. So the mean of n values has the error of one value divided by
    # sqrt(n).
    of_norm = tolerance * _size(wanted)
    of_mean = of_norm / math.sqrt(max(finite, 1))
    bounds = {"mean": of_mean, "std": of_mean, "l2_norm": of_norm, "min": of_value, "max": of_value}
    for name, bound in bounds.items():
        one, other = getattr(wanted, name), getattr(found, name)
        if one is not None and other is not None and not abs(one - other) <= bound:
            yield name, one, other


def _size(stats: TensorStats) -> float:
    """Return the root mean square of a tensor: the size of a typical value."""
    if stats.l2_norm is None:
        return 0.0
    return stats.l2_norm / math.sqrt(stats.count - stats.nan_count - stats.inf_count)
