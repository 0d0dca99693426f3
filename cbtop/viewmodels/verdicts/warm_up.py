"""The verdict "warm-up": the first steps took much longer than later steps."""

from __future__ import annotations

from statistics import median

from cbtop.units import count, counted, duration, percent
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule
from cbtop.viewmodels.verdicts.starved import is_explained_by_waiting

# At least this many seconds contain steps. Fewer do not show the usual step time.
MIN_SECONDS = 4
# The first steps take at least this many times the usual time. Steps that compile, tune or fill caches take several
# times as long.
FACTOR = 2.0
# If the first second has more than this many times the usual number of steps, cbtop has found the process late, and
# its warm-up is unknown.
FOUND_LATE = 2.0
# The first steps cost at least this percentage of the time in steps. Less hardly changes a mean.
SHARE_PERCENT = 10.0


def _find(view: SourceView) -> Finding | None:
    steps, pace = view.steps, view.pace
    if steps is None or view.window is not None or len(pace) < MIN_SECONDS:
        return None
    if pace[0].steps > FOUND_LATE * median(second.steps for second in pace[1:]):
        # Steps may have run before cbtop found the process, so it may not have seen the first.
        return None
    if len({second.tokens / second.steps for second in pace}) > 1:
        return None  # Tokens differ, so the first steps may have taken longer because they had more.
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
        f"These figures include warm-up: the first {counted(slow, f'{steps.phase} step')} took "
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
    means="The first steps compiled, tuned or filled caches, and the means and percentiles shown include them.",
    fires="Everything seen is shown, and in the first seconds a step of the same number of tokens took "
    f"{count(FACTOR)} times as long as later or more. The extra time is {SHARE_PERCENT:g} % or more of the time in "
    "steps. Not for a process that was found late.",
    advice="Look at the last seconds (`r`, --window), which leave it out. Run a few steps before you measure.",
    find=_find,
)
