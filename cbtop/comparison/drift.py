"""Measure the drift inside a run: its median step in the last third, relative to the first third. Both are derived
from records.
"""

# Rules
# - The time of a step includes the time before it, without pauses. Warm-up steps are already excluded.
# - A step takes longer with more cached positions. This is not drift. The size of this effect is taken from the
#   baseline, because in a single run the cache grows while it drifts.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

import numpy as np
from numpy.typing import NDArray

from cbtop.comparison.noise import MIN_BLOCKS, MIN_LEARNED, Change, Figure, change_between_runs, figures, learned
from cbtop.comparison.quantiles import MEDIAN, CallTimes
from cbtop.profiler.analysis.growth import Growth
from cbtop.profiler.analysis.histograms import Column

ALIKE_TOKENS = 0.02  # The two thirds may differ in tokens per step by this relative difference.
# A longer time between steps than the median plus this many median absolute deviations is a pause.
USUAL_SPREADS = 4.0
LEAST_PERCENT = 10.0  # If the program is the same, clocks drift by less than this percentage between two runs.


@dataclass(frozen=True, slots=True)
class Thirds:
    """The median step (µs) in the first and last third of a run, with the usual time before it."""

    first: Figure
    last: Figure
    # mean cached positions in the first and last third; None if not reported
    cached: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Drift:
    """How step times drift within a run: the median of the last third of the steps, divided by the median of the
    first third.
    """

    change: Change  # change of this ratio, without the growth that the cache explains
    base_ratios: tuple[float, ...]  # for each base run, the ratio of the last third to the first

    @property
    def base_runs(self) -> int:
        """Number of base runs with a known drift, or 1 if they are too few to show how much drift scatters."""
        return len(self.base_ratios) if len(self.base_ratios) >= MIN_LEARNED else 1

    @property
    def percent(self) -> float:
        """Growth of the step time inside the new run, minus the base runs' growth, in percent. At least 0."""
        least = 100 * (self.change.now - 1)
        return max(0.0, min(least, self.change.percent or 0.0))

    @property
    def is_slower(self) -> bool:
        """Whether steps became longer inside the new run, by more than noise."""
        return self.percent > LEAST_PERCENT and self.change.delta > self.change.half


def without_pauses(between_ns: NDArray[np.float64], units: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the time between steps in each block, with values far above the median (per unit) reduced.

    Rare delays come from other programs. A delay before every step comes from the process itself, and stays.
    """
    each = between_ns / units
    usual = np.median(each)
    most = USUAL_SPREADS * np.median(np.abs(each - usual))
    found: NDArray[np.float64] = np.clip(each, usual - most, usual + most) * units
    return found


def thirds_of(
    growths: Sequence[Growth],
    place_of: Column,
    between_ns: NDArray[np.float64],
    steps: NDArray[np.float64],
    tokens: NDArray[np.float64],
    cached: NDArray[np.float64] | None,
) -> Thirds | None:
    """Return the first and the last third of a run. None with too few blocks, or with different tokens per step.

    Arguments have one entry per block, except `place_of`, which is 0 for the step's node and -1 for others.
    """
    third = len(growths) // 3
    if third < MIN_BLOCKS:
        return None
    sides = slice(0, third), slice(len(growths) - third, None)
    first_tokens, last_tokens = (tokens[side].sum() / steps[side].sum() for side in sides)
    if abs(last_tokens - first_tokens) > ALIKE_TOKENS * max(first_tokens, last_tokens):
        return None
    found = []
    for side in sides:
        along = None if cached is None else cached[side]
        (median,) = CallTimes(growths[side], [place_of], 1, steps[side], along).quantile(MEDIAN).figures
        before_us = without_pauses(between_ns[side], steps[side])[:, None] / 1e3
        (before,) = figures(before_us, steps[side], along)
        if median is None:
            return None
        error = hypot(median.error, before.error)
        found.append(Figure(median.mean + before.mean, error, min(median.blocks, before.blocks)))
    if cached is None:
        return Thirds(found[0], found[1], None)
    of_first, of_last = (float(np.average(cached[side], weights=steps[side])) for side in sides)
    return Thirds(found[0], found[1], (of_first, of_last))


def drift_of(before: Sequence[Thirds], now: Sequence[Thirds], step: Figure | None, compared: int) -> Drift | None:
    """Return the new runs' drift compared with the base runs', or None if unknown.

    `step` is the baseline's median step. Its slope is the growth with the cache. `compared` figures are tested
    together.
    """
    if not (before and now):
        return None
    slope = step.slope if step else 0.0
    befores, nows = ([_ratio(one, slope) for one in thirds] for thirds in (before, now))
    if any(figure.mean <= 0 for figure in (*befores, *nows)):
        return None
    found = change_between_runs(_mean(befores), _mean(nows), compared)
    return Drift(found, tuple(figure.mean for figure in befores))


def _ratio(thirds: Thirds, slope: float) -> Figure:
    first, last = thirds.first, thirds.last
    grown_us = slope * (thirds.cached[1] - thirds.cached[0]) if thirds.cached else 0.0
    ratio = (last.mean - grown_us / 2) / (first.mean + grown_us / 2)
    error = abs(ratio) * hypot(first.error / first.mean, last.error / last.mean)
    return Figure(ratio, error, min(first.blocks, last.blocks))


def _mean(ratios: Sequence[Figure]) -> Figure:
    return learned([ratios])[0] if len(ratios) >= MIN_LEARNED else ratios[0]
