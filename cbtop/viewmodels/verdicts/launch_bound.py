"""Launch-bound: the device waits for its host."""

from __future__ import annotations

from cbtop.protocol.vocabulary import UNTIL_THERE
from cbtop.units import percent
from cbtop.viewmodels.model import About, Evidence, Severity, SourceView, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

# Of the bricks' time, and of their calls: one step that waited long (the first one, a pause) is no reason to say it.
LAUNCH_BOUND_PERCENT = 20.0


def _find(view: SourceView) -> Finding | None:
    waiting = [row for row in view.bricks if row.backend.endswith(UNTIL_THERE)]
    share = sum(row.percent or 0.0 for row in waiting)
    calls = 100 * sum(row.count for row in waiting) / max(1, sum(row.count for row in view.bricks))
    if view.steps is None or min(share, calls) < LAUNCH_BOUND_PERCENT:
        return None
    return Finding(
        f"Launch-bound: the device waited for its host in steps whose bricks take {percent(share)} of "
        f"{view.steps.phase}'s time",
        (Evidence("time of bricks that waited for the host", share, "%"), Evidence("calls of bricks", calls, "%")),
        Subject(About.STEPS, view.steps.phase),
        is_inside=True,
    )


LAUNCH_BOUND = Rule(
    id="launch-bound",
    severity=Severity.WARNING,
    means="Kernels end before the host has launched the next ones, so the device idles: what counts is how fast the "
    "host launches, not how fast kernels are.",
    fires="Bricks that are named launch-bound, because their device waited for the host, take "
    f"{LAUNCH_BOUND_PERCENT:g} % or more of the time in steps, and are as large a part of all calls.",
    advice="Capture the step as a CUDA graph (torch.compile with mode='reduce-overhead'), or work on more sequences "
    "a step.",
    find=_find,
)
