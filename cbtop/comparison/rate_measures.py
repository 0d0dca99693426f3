"""Compute the rate that a threshold limits, and its interval. The rate is that of a phase, a process, or one batch
size.
"""

from __future__ import annotations

from math import exp, hypot, sqrt

from cbtop.comparison.noise import Change, half_of
from cbtop.comparison.part_diff import PartDiff
from cbtop.comparison.phase_rates import IN_STEPS, RATE_UNITS, SAMPLES, STEPS, TOKENS, PhaseRates
from cbtop.comparison.rate_diff import rate_diff
from cbtop.comparison.run_diff import RunDiff
from cbtop.comparison.runs import Run
from cbtop.comparison.step_blocks import LEAST_STEPS
from cbtop.comparison.training_measures import NO_SAMPLES, Measure
from cbtop.protocol.vocabulary import shows_training
from cbtop.units import count, counted, number

NO_TOKENS = "not every step reports its tokens"
NO_RECORD = "some steps left no record, so no rate is known"
_MOST_EXPONENT = 700.0  # exp(x) is finite up to this value.
OLD_FILE = "was written by an older cbtop, which kept no rates: write it again"


def shown_rates(run: Run, phase: str) -> PhaseRates | None:
    """Return all rates of `phase` in both runs ("": the phase that a screen shows first)."""
    if phase:
        return next((one for one in run.rates if one.phase == phase), None)
    return next((one for one in run.rates if one.is_headline), next(iter(run.rates), None))


def phase_measure(found: RunDiff, rate: str, phase: str, *, is_relative: bool) -> Measure:
    """Return a rate of a phase in the new run, or with `is_relative` as a multiple of the baseline."""
    now = shown_rates(found.now, phase)
    if now is None:
        return Measure("", f"{found.now.name} {OLD_FILE}")
    # Without tokens, compare the rate of steps.
    if is_relative and rate == TOKENS:
        rate = now.main
    if rate not in now.times_us:
        return Measure("", _why_not(now, rate))
    if not is_relative:
        time_us = now.times_us[rate]
        return _rate(rate, 1e6, time_us.mean, half_of(time_us))
    before = next((one for one in found.base.rates if one.phase == now.phase), None)
    if before is None:
        has_rates = bool(found.base.rates)
        return Measure("", "the baseline lacks it" if has_rates else f"{found.base.name} {OLD_FILE}")
    change = rate_diff(before, now, rate, found.parts, 1)
    if change is None:
        return Measure("", f"of the baseline: {_why_not(before, rate)}")
    at = f" at {count(change.cached)} positions cached" if change.cached is not None else ""
    return _ratio(change.time_us, 1.0, f"{at}, {number(change.before)} → {number(change.now)} {change.unit}")


def batch_measure(part: PartDiff, rate: str, *, is_relative: bool, compared: int) -> Measure:
    """Return a rate for one batch size.

    It is over the steps' wall-clock time, with the time before each step. The rate in steps and rates of training are
    over the time of the steps only.
    """
    if part.unit != "token" and rate != SAMPLES:
        return Measure("", NO_TOKENS)
    is_in_steps = rate == IN_STEPS or shows_training(part.phase)
    changed = part.step.mean if is_in_steps else part.wall
    side = part.now.wall_us if not is_in_steps else part.step.now.time if part.step.now else None
    a_unit = _samples_a_unit(part) if rate == SAMPLES else (1.0, 1.0)
    if a_unit is None or changed is None or side is None:
        return Measure("", NO_SAMPLES)
    if not is_relative:
        return _rate(rate, 1e6 * a_unit[1], side.mean, half_of(side, compared))
    before, now = 1e6 / changed.before * a_unit[0], 1e6 / changed.now * a_unit[1]
    return _ratio(changed, a_unit[1] / a_unit[0], f", {number(before)} → {number(now)} {RATE_UNITS[rate]}")


def _rate(rate: str, of_us: float, time_us: float, half_us: float) -> Measure:
    """Return the rate `of_us / time_us` with its interval. Chance changes `time_us` by at most `half_us`."""
    value, (least, most) = of_us / time_us, _interval(of_us / time_us, half_us / time_us)
    return Measure(
        "", "", value, least, most, f"{number(value)} {RATE_UNITS[rate]} ({number(least)} to {number(most)})"
    )


def _ratio(changed: Change, amounts: float, more: str) -> Measure:
    """Return the new rate as a multiple of the old one.

    `amounts` is the number of samples per unit now, divided by the number before.
    """
    value = changed.before / changed.now * amounts
    # For the interval of the ratio, assume the same relative error in both times.
    part = sqrt(2) * changed.half / hypot(changed.before, changed.now)
    least, most = _interval(value, part)
    return Measure("", "", value, least, most, f"{number(value)}× ({number(least)} to {number(most)}){more}")


def _interval(rate: float, part: float) -> tuple[float, float]:
    """Return the interval of a rate. Chance may change its time by the relative amount `part`.

    It is symmetric in the logarithm, because times and rates are never negative.
    """
    factor = exp(min(part, _MOST_EXPONENT))
    return rate / factor, rate * factor


def _samples_a_unit(part: PartDiff) -> tuple[float, float] | None:
    """Return the sequences per token (or step), before and now. None if some steps do not report them."""
    found = []
    for group in (part.before, part.now):
        units = group.tokens if group.unit == "token" else 1.0
        if group.sequences is None or not units:
            return None
        found.append(group.sequences / units)
    return found[0], found[1]


def _why_not(rates: PhaseRates, rate: str) -> str:
    if STEPS in rates.times_us:
        return NO_SAMPLES if rate == SAMPLES else NO_TOKENS
    if rates.steps < LEAST_STEPS:
        return f"too few steps: {counted(rates.steps, 'step')} of {count(LEAST_STEPS)} needed"
    return NO_RECORD
