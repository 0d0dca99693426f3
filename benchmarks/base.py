"""What a benchmark gives, and how rounds are interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: what was measured, against what, and the ratio of the two."""

    what: str
    value: float
    unit: str
    peer: str = ""
    ratio: float | None = None


def interleaved_ns(calls: dict[str, Callable[[], object]], repeats: int, rounds: int = 15) -> dict[str, float]:
    """The median time (ns) of one call of each, in rounds that take turns, so that a busy machine hits all alike."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begun_ns = time.perf_counter_ns()
            for _ in range(repeats):
                call()
            found[name].append((time.perf_counter_ns() - begun_ns) / repeats)
    return {name: statistics.median(times) for name, times in found.items()}
