"""Measure two sides A and B in turns in one job, and compute how many times as fast B is as A."""

# Two runs on one machine differ by some percent without a cause, and two machines differ by more. So both sides are
# measured in turns (A B, B A, A B, …). Then no side is always first, and disturbances and drifts affect both sides
# equally.

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cbtop.comparison.noise import CONFIDENCE, MIN_BLOCKS, Change, Figure, change, figures

SIDES = ("A", "B")
# A function that runs one side once. It returns the time (ns) of each speed test of this side, by name of the test.
Turn = Callable[[], Mapping[str, int]]
Round = tuple[Mapping[str, int], Mapping[str, int]]  # the times of one round: (times of A, times of B)
# A progress function is called with the number of the round from 0, and the index of the side.
Progress = Callable[[int, int], None]


def in_turns(pairs: Sequence[tuple[Turn, Turn]], rounds: int, progress: Progress) -> Iterator[Round]:
    """Run both sides of each pair once per round. Yield the times of each round when it is complete."""
    for number in range(rounds):
        found: tuple[dict[str, int], dict[str, int]] = {}, {}
        for pair in pairs:
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                progress(number, side)
                found[side].update(pair[side]())
        yield found


@dataclass(frozen=True, slots=True)
class PairedTest:
    """The times of one speed test on both sides, in each round.

    `compared` tests are compared together. `tokens` is the number of tokens of the test, or None if the test does not
    count tokens.
    """

    name: str
    tokens: int | None
    a_ns: tuple[int, ...]
    b_ns: tuple[int, ...]
    compared: int = 1

    @property
    def sides_ns(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.a_ns, self.b_ns

    @property
    def ratio(self) -> float:
        """The speed of B relative to A: tokens/s of B divided by tokens/s of A."""
        return sum(self.a_ns) / sum(self.b_ns)

    @property
    def change(self) -> Change | None:
        """The change of the speed from A (1.0) to B with its noise. None if there are too few rounds to know how they
        scatter.

        The noise is how much the ratio of B to A varies between rounds. Both sides of a round are measured together.
        """
        if len(self.a_ns) < MIN_BLOCKS:
            return None
        (found,) = figures(np.array(self.a_ns, np.float64)[:, np.newaxis], np.array(self.b_ns, np.float64))
        return change(Figure(1.0, 0.0, found.blocks), found, self.compared)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the ratio B to A. With probability CONFIDENCE, the intervals of all compared tests contain
        the true values.
        """
        found = self.change
        return None if found is None else (max(found.now - found.half, 0.0), found.now + found.half)

    @property
    def is_beyond_noise(self) -> bool | None:
        """Whether the difference between both sides is larger than chance explains, or None if there are too few
        rounds.
        """
        interval = self.interval
        return None if interval is None else not interval[0] <= 1 <= interval[1]

    @property
    def verdict(self) -> str:
        if self.is_beyond_noise is None:
            return f"{MIN_BLOCKS} rounds or more would tell"
        if not self.is_beyond_noise:
            return "noise"
        return "B is faster" if self.ratio > 1 else "B is slower"

    def rates(self, side: int) -> list[float]:
        """Return the rate of one side in each round: tokens/s, or runs/s if tokens are not counted."""
        return [1e9 * (self.tokens or 1) / each for each in self.sides_ns[side]]


def pairs_of(rounds: Sequence[Round], tokens: Mapping[str, int | None]) -> list[PairedTest]:
    """Return a PairedTest for each test, with its times in all rounds."""
    return [
        PairedTest(name, of, tuple(a[name] for a, _ in rounds), tuple(b[name] for _, b in rounds), len(tokens))
        for name, of in tokens.items()
        if rounds
    ]


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation of the values. For a single value, the deviation is None."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def with_deviation(values: Sequence[float], digits: int) -> str:
    """Return the text `mean ± deviation`, each number with `digits` decimals."""
    mean, deviation = mean_and_deviation(values)
    return f"{mean:.{digits}f} ± {'n/a' if deviation is None else f'{deviation:.{digits}f}'}"


CONFIDENCE_PERCENT = round(100 * CONFIDENCE)
