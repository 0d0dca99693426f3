"""Two sides measured in turns in one job, and how many times as fast the one is as the other."""

# Two runs on one machine differ by some percent without a cause, and two machines by more: what is to be compared
# takes turns, so that whatever the machine does meanwhile hits both. Turns go A B, B A, A B, …: neither is always the
# first, and a drift falls on both alike.

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cbtop.viewmodels.noise import CONFIDENCE, MIN_BLOCKS, Change, Figure, change, figures

SIDES = ("A", "B")
Turn = Callable[[], Mapping[str, int]]  # the time (ns) of each test that it ran, by name
Round = tuple[Mapping[str, int], Mapping[str, int]]  # of A, of B
Progress = Callable[[int, int], None]  # the round that is on, from 0, and the side


def in_turns(pairs: Sequence[tuple[Turn, Turn]], rounds: int, progress: Progress) -> Iterator[Round]:
    """Each pair of turns once a round; a round is given once all of it was measured."""
    for number in range(rounds):
        found: tuple[dict[str, int], dict[str, int]] = {}, {}
        for pair in pairs:
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                progress(number, side)
                found[side].update(pair[side]())
        yield found


@dataclass(frozen=True, slots=True)
class Pair:
    """One test as both sides took it, round by round, one of `compared` that are looked at together.

    `tokens`: of the test; None where what it did is not counted in tokens.
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
        """How many times as fast B was: the tokens/s of B over those of A."""
        return sum(self.a_ns) / sum(self.b_ns)

    @property
    def change(self) -> Change | None:
        """From A, which is 1, to B, with what chance explains; None of fewer rounds than tell how they scatter.

        The two times of a round belong together, so what counts is how their ratio scatters, not each of them.
        """
        if len(self.a_ns) < MIN_BLOCKS:
            return None
        (found,) = figures(np.array(self.a_ns, np.float64)[:, np.newaxis], np.array(self.b_ns, np.float64))
        return change(Figure(1.0, 0.0, found.blocks), found, self.compared)

    @property
    def interval(self) -> tuple[float, float] | None:
        """In which the ratio lies with CONFIDENCE, of all that are compared."""
        found = self.change
        return None if found is None else (max(found.now - found.half, 0.0), found.now + found.half)

    @property
    def is_beyond_noise(self) -> bool | None:
        """Whether chance does not explain the difference; None where too little was measured to say."""
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
        """Of one side in each round: tokens a second; where tokens are not counted, runs a second."""
        return [1e9 * (self.tokens or 1) / each for each in self.sides_ns[side]]


def pairs_of(rounds: Sequence[Round], tokens: Mapping[str, int | None]) -> list[Pair]:
    """Of each test its times, over the rounds."""
    return [
        Pair(name, of, tuple(a[name] for a, _ in rounds), tuple(b[name] for _, b in rounds), len(tokens))
        for name, of in tokens.items()
        if rounds
    ]


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and the standard deviation of a sample; None of a single one, which does not tell."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None


def with_deviation(values: Sequence[float], digits: int) -> str:
    """As `mean ± deviation`, with so many digits behind the point."""
    mean, deviation = mean_and_deviation(values)
    return f"{mean:.{digits}f} ± {'n/a' if deviation is None else f'{deviation:.{digits}f}'}"


CONFIDENCE_PERCENT = round(100 * CONFIDENCE)
