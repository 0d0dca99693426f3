"""Warm-up: the first steps took much longer than those that followed."""

from __future__ import annotations

from statistics import median

from cbtop.units import count, counted, duration, percent
from cbtop.viewmodels.model import About, Evidence, Severity, SourceView, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule
from cbtop.viewmodels.verdicts.starved import is_explained_by_waiting

MIN_SECONDS = 4  # with steps: of fewer nobody can say what they came to
FACTOR = 2.0  # compiling, tuning and filling caches make a step several times as long
FOUND_LATE = 2.0  # times the steps of a second: warm-up makes them fewer
SHARE_PERCENT = 10.0  # of the time in steps: less changes no mean by much


def _find(view: SourceView) -> Finding | None:
    steps, pace = view.steps, view.pace
    if steps is None or view.window is not None or len(pace) < MIN_SECONDS:
        return None
    if pace[0].steps > FOUND_LATE * median(second.steps for second in pace[1:]):
        return None  # its first steps are not known apart from those before it was found
    if len({second.tokens / second.steps for second in pace}) > 1:
        return None  # the first ones may have been of more tokens
    usual_us = median(second.us for second in pace[len(pace) // 2 :])
    first = 0
    while first < len(pace) and pace[first].us >= FACTOR * usual_us:
        first += 1
    slow = sum(second.steps for second in pace[:first])
    slow_us = sum(second.steps * second.us for second in pace[:first])
    total_us = sum(second.steps * second.us for second in pace)
    if not slow or first > len(pace) // 2:
        return None
    share = 100 * (slow_us - slow * usual_us) / total_us
    if share < SHARE_PERCENT or is_explained_by_waiting(view, share):
        return None
    return Finding(
        f"Warm-up is in these figures: the first {counted(slow, f'{steps.phase} step')} took "
        f"{duration(slow_us / slow)} each, later ones {duration(usual_us)}; that is {percent(share)} of the time in "
        "steps",
        (
            Evidence("first steps", slow, "steps"),
            Evidence("of these each", slow_us / slow, "µs"),
            Evidence("later each", usual_us, "µs"),
            Evidence("of the time in steps", share, "%"),
        ),
        Subject(About.STEPS, steps.phase),
    )


WARM_UP = Rule(
    id="warm-up",
    severity=Severity.NOTE,
    means="The first steps compiled, tuned or filled caches; means and percentiles of all that was seen hold them.",
    fires=f"Of all that was seen: in the first seconds with steps, a step of as many tokens took {count(FACTOR)} "
    f"times as long as later or more, and what that cost is {SHARE_PERCENT:g} % of the time in steps or more. Not of "
    "a process that was found late.",
    advice="Look at the last seconds (`r`, --window), which leave it out; run a few steps before you measure.",
    find=_find,
)
