"""The results of a benchmark, and functions that time calls in interleaved rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two measured values: the median of the ratios of all rounds, and the bounds of the middle half of
    these ratios.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], peers: Sequence[float]) -> Ratio:
        """Divide values by the peer's values, round by round.

        A disturbance in a round affects both values, so it hardly changes the ratio.
        """
        low, median, high = statistics.quantiles(
            [value / peer for value, peer in zip(values, peers, strict=True)], n=4, method="inclusive"
        )
        return cls(median, low, high)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the printed table: what was measured, its value, its peer, and the ratio of value to peer."""

    what: str
    value: float
    unit: str
    peer: str = ""
    ratio: Ratio | None = None


def interleaved_ns(calls: dict[str, Callable[[], object]], repeats: int, rounds: int = 15) -> dict[str, float]:
    """Return the median time (ns) of one call of each function.

    The functions take turns in rounds, so that a busy machine slows all of them equally.
    """

    def loop(call: Callable[[], object]) -> Callable[[int], None]:
        def run(times: int) -> None:
            for _ in range(times):
                call()

        return run

    found = interleaved_loops_ns({name: loop(call) for name, call in calls.items()}, repeats, rounds)
    return {name: statistics.median(times) for name, times in found.items()}


def interleaved_loops_ns(
    loops: dict[str, Callable[[int], None]], repeats: int, rounds: int
) -> dict[str, list[float]]:
    """Return the time (ns) of one turn of each loop, in every round.

    A loop is a function. Its argument is the number of turns that it makes.
    """
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            begun_ns = time.perf_counter_ns()
            loop(repeats)
            found[name].append((time.perf_counter_ns() - begun_ns) / repeats)
    return found


def interleaved_cpu_ns(
    calls: Mapping[str, Callable[[], object]], repeats: int, rounds: int
) -> dict[str, list[float]]:
    """Return the processor time (ns) of one call of each function, in every round except the first."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            begun_ns = time.process_time_ns()
            for _ in range(repeats):
                call()
            if turn:
                found[name].append((time.process_time_ns() - begun_ns) / repeats)
    return found
