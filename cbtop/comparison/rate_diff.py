"""Compare the rate of a phase between two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt

from cbtop.comparison.comparison import ALIKE
from cbtop.comparison.noise import Change, Figure, change
from cbtop.comparison.part_diff import PartDiff
from cbtop.comparison.phase_rates import RATE_UNITS, PhaseRates


@dataclass(frozen=True, slots=True)
class RateDiff:
    """A phase's rate (per second) in two runs.

    `time_us` is the change of its inverse, the wall-clock time of one token. A token takes longer with a longer
    cache. So if both runs report their cached positions, the time is converted to `cached` positions.
    """

    phase: str
    rate: str
    before: float
    now: float
    time_us: Change
    # mean cached positions; None if they are not reported, or about equal
    cached: float | None = None
    parts: tuple[PartDiff, ...] = ()  # the compared groups of steps of this phase

    @property
    def unit(self) -> str:
        """The unit of the rate as text, for example `tokens/s`."""
        return RATE_UNITS[self.rate]

    @property
    def is_lower(self) -> bool:
        """Whether the wall-clock time of a token increased by more than noise explains."""
        return self.time_us.is_beyond_noise and self.time_us.delta > 0

    @property
    def is_lower_in_the_mean(self) -> bool:
        """Whether the rate is lower only because a few steps became longer, but not the typical time of a token."""
        return not self.is_lower and (self.time_us.percent or 0.0) > (self.time_us.noise_percent or inf)

    @property
    def is_by_others(self) -> bool:
        """Whether most of the additional time comes from other phases or another mix of batches.

        The phase's own steps and the time before each step then explain less than half of the additional time.
        """
        whole = sum(part.now.amount for part in self.parts)
        own_us = sum(part.wall.delta * part.now.amount for part in self.parts)
        return own_us < self.time_us.delta * whole / 2


def rate_diff(
    before: PhaseRates, now: PhaseRates, rate: str, parts: Sequence[PartDiff], compared: int
) -> RateDiff | None:
    """Return the change of a rate, or None if one of the runs lacks it. `compared` rates are tested together."""
    if rate not in before.times_us or rate not in now.times_us:
        return None
    then_us, now_us = before.times_us[rate], now.times_us[rate]
    at = None
    if before.cached is not None and now.cached is not None:
        at = (before.cached + now.cached) / 2
        then_us, now_us = _shifted(then_us, at - before.cached), _shifted(now_us, at - now.cached)
        if abs(now.cached - before.cached) <= ALIKE * at:
            at = None
    of_phase = tuple(part for part in parts if part.phase == now.phase)
    found = replace(change(then_us, now_us, compared), medians_us=_medians_us(of_phase))
    return RateDiff(
        now.phase, rate, 1e6 / before.times_us[rate].mean, 1e6 / now.times_us[rate].mean, found, at, of_phase
    )


def main_rates(
    before: Sequence[PhaseRates], now: Sequence[PhaseRates], parts: Sequence[PartDiff], compared: int
) -> tuple[RateDiff, ...]:
    """Return each compared phase's change of rate: tokens/s, or steps/s if tokens are unknown."""
    then = {one.phase: one for one in before}
    order = list(dict.fromkeys(part.phase for part in parts))
    is_now = {one.phase: one for one in now}
    found = []
    for phase in order:
        # If only one run reports a phase's tokens, the rates are of different kinds.
        if phase in then and phase in is_now and then[phase].main == is_now[phase].main:
            found.append(rate_diff(then[phase], is_now[phase], is_now[phase].main, parts, compared))
    return tuple(one for one in found if one is not None)


def _shifted(figure: Figure, off: float) -> Figure:
    """Return the time of a token with `off` more cached positions. If it would not be positive, the old value."""
    mean = figure.mean + off * figure.slope
    if mean <= 0:
        return figure
    return replace(figure, mean=mean, error=sqrt(figure.error**2 + (off * figure.slope_error) ** 2))


def _medians_us(parts: Sequence[PartDiff]) -> tuple[float, float] | None:
    """Return the time of a token in typical steps, before and now, or None if unknown. Pauses by other programs do
    not affect it.

    Both are for the new run's mix of batches.
    """
    if not parts:
        return None
    whole = sum(part.now.amount for part in parts)
    before_us = now_us = 0.0
    for part in parts:
        if part.wall.medians_us is None:
            return None
        before_us += part.wall.medians_us[0] * part.now.amount / whole
        now_us += part.wall.medians_us[1] * part.now.amount / whole
    return before_us, now_us
