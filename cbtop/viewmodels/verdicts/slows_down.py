"""Verdict "slows down": steps become longer with time, because every brick does by the same factor."""

from __future__ import annotations

from statistics import StatisticsError, correlation

from cbtop.units import duration, number
from cbtop.viewmodels.brick_growth import ALIKE, alike
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, pace_shown, steps_alike

MIN_SECONDS = 8  # At least this many seconds contain steps.
# Steps take this many times as long at the end of the window as at its beginning.
SLOWER = 1.2
CORRELATION = 0.9  # The seconds and their mean step times must correlate at least this much.


def _find(view: SourceView) -> Finding | None:
    steps, shown = steps_alike(view), pace_shown(view)
    if steps is None:
        return None
    if len(shown) < MIN_SECONDS:
        return None
    try:
        follows = correlation([-one.ago_s for one in shown], [one.us for one in shown])
    except StatisticsError:  # all step times are equal, so there can be no correlation
        return None
    if follows < CORRELATION:
        return None
    # Looked at last, because the growth of each brick takes longer than all other verdicts together.
    factor = alike(view.brick_growth)
    if factor is None or factor < SLOWER:
        return None
    return Finding(
        f"{steps.phase} steps slow down, every brick alike: {duration(shown[0].us)} at first, "
        f"{duration(shown[-1].us)} at last; the processor or GPU has become slower",
        (
            Evidence("step at first", shown[0].us, "µs"),
            Evidence("step at last", shown[-1].us, "µs"),
            Evidence("times as long, every larger brick", factor, ""),
        ),
        Subject(About.STEPS, steps.phase),
    )


SLOWS_DOWN = Rule(
    id="slows-down",
    severity=Severity.NOTE,
    means="Everything in a step takes longer from second to second. No brick does more work: a clock falls, or other "
    "programs take more and more of the machine.",
    fires=f"In {MIN_SECONDS} seconds or more the mean step of the same number of tokens grows with time (correlation "
    f"{CORRELATION:g}). Each larger brick takes at least {number(SLOWER)} times as long at the end, within "
    f"{100 * ALIKE:.0f} % of the same factor.",
    advice="Look at clocks, temperature and load in Devices. Fix the clock before you compare runs.",
    find=_find,
)
