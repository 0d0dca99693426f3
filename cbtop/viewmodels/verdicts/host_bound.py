"""Verdict "host-bound": much of a step is outside of its bricks, and the GPU is often idle."""

from __future__ import annotations

from cbtop.units import duration, percent
from cbtop.viewmodels.not_instrumented import OUTSIDE_PERCENT, not_instrumented
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain_inside

LEAST_STEPS = 3  # At least this many steps were recorded.
LATEST = 10  # Number of newest samples of a GPU that are used, one a second.


def _find(view: SourceView) -> Finding | None:
    outside, idle = not_instrumented(view), _idle_percent(view)
    if outside is None or idle is None or view.steps is None or idle < OUTSIDE_PERCENT:
        return None
    if view.steps.recorded < LEAST_STEPS:
        return None
    named = ", ".join(f"{part.name} {duration(part.us)}" for part in outside.parts)
    return Finding(
        f"{percent(outside.percent)} of {view.steps.phase}'s step time is outside its bricks ({named}), and its "
        f"GPU was idle {percent(idle)} of the time: the host works between the bricks",
        (
            Evidence("in no brick", outside.percent, "%"),
            Evidence("GPU idle", idle, "%"),
            *(Evidence(part.name, part.us, "µs") for part in outside.parts),
            Evidence("time in steps", outside.wall_us, "µs"),
        ),
        Subject(About.STEPS, view.steps.phase),
        gain_inside(view, min(outside.percent, idle)),
        "no time passed between the bricks",
        is_inside=True,
    )


def _idle_percent(view: SourceView) -> float | None:
    """Return how many percent of the last seconds the busiest GPU was idle. None if unknown or without a GPU."""
    busy = []
    for row in [row for machine in view.machines for row in machine.gpus_of(view.key)]:
        known = [each for each in row.busy_percent[-LATEST:] if each is not None]
        if row.is_stale or not known:
            return None
        busy.append(sum(known) / len(known))
    return 100 - max(busy) if busy else None


HOST_BOUND = Rule(
    id="host-bound",
    severity=Severity.WARNING,
    means="Much of a step is spent between its bricks while the GPU is idle: interpreter, dispatch, allocation. "
    "Faster bricks change little.",
    fires=f"{LEAST_STEPS} steps or more are recorded. Gaps and the rest of step are {OUTSIDE_PERCENT:g} % or more "
    "of the steps' time, the parts add up, and each of its GPUs was idle "
    f"{OUTSIDE_PERCENT:g} % or more of the last seconds. Without a GPU that time is only `not instrumented`.",
    advice="Time the code there as bricks to see what it is. Compile or capture the step if it is the interpreter.",
    find=_find,
)
