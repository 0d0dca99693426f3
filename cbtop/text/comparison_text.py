"""Write how figures have changed since a baseline."""

from __future__ import annotations

from cbtop.comparison.comparison import Comparison
from cbtop.comparison.items import WHOLE_STEP
from cbtop.comparison.noise import Change
from cbtop.text.time_text import date
from cbtop.units import NOT_MEASURED, duration, number, percent, percent_number
from cbtop.viewmodels.lanes import TimelineSpan

RELATIVE_TO_OTHERS = " relative to all others"


def change(found: Change) -> str:
    """Format the change of a figure: `+10.1 % ± 1.2`, or `noise: ± 4.0 %`."""
    if found.percent is None:
        return NOT_MEASURED
    if not found.is_beyond_noise:
        return f"noise: ± {percent(found.noise_percent)}"
    told = found.decisive
    beside = "" if told is found else RELATIVE_TO_OTHERS
    return f"{told.percent:+,.1f} % ± {percent_number(told.half_percent)}{beside}"


def rate_change(found: Change) -> str:
    """Format the change of a token rate: `41.20 tokens/s, was 42.10 (noise: ± 4.0 %)`."""
    return f"{number(found.now)} tokens/s, was {number(found.before)} ({change(found)})"


def step_beside(found: Comparison, step: TimelineSpan) -> str:
    """Format the time of a step next to the baseline's median: `decode 11.85 ms, was 11.20 ms (+5.8 %), the
    baseline's median`.

    Without a median, the reason. A single step is not called slower or faster.
    """
    median_us = found.median_us(step.name, WHOLE_STEP)
    if median_us is None:
        other = "" if step.name == found.phase else f"it is no {found.phase} step, as those compared"
        return f"{step.name} n/a: {found.why_not or other or 'no median is known'}"
    us = step.duration_ns / 1e3
    off = f" ({100 * (us / median_us - 1):+,.1f} %)" if median_us else ""
    return f"{step.name} {duration(us)}, was {duration(median_us)}{off}, the baseline's median"


def baseline_rates(found: Comparison) -> list[str]:
    """Return texts with the changes of the token rate and the step, such as `41.20 tokens/s, was 42.10 (noise: ±
    4.0 %)`.
    """
    parts = []
    if found.tokens_per_sec is not None:
        parts.append(rate_change(found.tokens_per_sec))
    if found.step_us is not None:
        step = found.step_us
        parts.append(f"{duration(step.now)} a step, was {duration(step.before)} ({change(step)})")
    return parts


def baseline(found: Comparison) -> str:
    """Format the time range of the baseline: `the 10.0 s before 20:02:11`. If the baseline is of a different process,
    the text names this process.
    """
    base, where = found.base, found.base.surroundings
    is_other = base.key != found.now.key
    when = "" if base.ended_s is None else f" before {date(base.ended_s)[0 if is_other else 11 :]}"
    return f"the {base.covers_s:.1f} s{when}{f' of pid {where.pid} on {where.host}' if is_other else ''}"
