"""Host-bound: much of a step lies in none of its bricks."""

from __future__ import annotations

from cbtop.profiler.books import INNER_STEPS
from cbtop.units import duration, percent
from cbtop.viewmodels.model import About, Evidence, Severity, SourceView, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain_inside

# An instrumented decoder leaves some percent between its bricks; a quarter is more than most single bricks take.
OUTSIDE_PERCENT = 25.0


def _find(view: SourceView) -> Finding | None:
    books, steps = view.books, view.steps
    if books is None or steps is None or not books.close or not books.wall_us or not view.bricks:
        return None
    parts = {gap.name: gap.us for gap in books.gaps if gap.name != INNER_STEPS}
    parts["in no layer"] = books.unattributed_us
    outside_us = sum(parts.values())
    share = 100 * outside_us / books.wall_us
    if share < OUTSIDE_PERCENT:
        return None
    named = ", ".join(f"{name} {duration(us)}" for name, us in parts.items() if us)
    return Finding(
        f"{percent(share)} of {steps.phase}'s step time lies in none of its bricks ({named}): the host between "
        "them, or work that nobody times",
        (
            Evidence("in no brick", share, "%"),
            *(Evidence(name, us, "µs") for name, us in parts.items() if us),
            Evidence("time in steps", books.wall_us, "µs"),
        ),
        Subject(About.STEPS, steps.phase),
        gain_inside(view, share),
        "nothing lay between the bricks",
        is_inside=True,
    )


HOST_BOUND = Rule(
    id="host-bound",
    severity=Severity.WARNING,
    means="Much of a step passes between its bricks: interpreter, dispatch, allocation, or work that is not timed "
    "as a brick. Faster bricks change little.",
    fires=f"Gaps and unattributed time are {OUTSIDE_PERCENT:g} % or more of the steps' time (steps inside steps do "
    "not count), and the books close.",
    advice="Time what runs there as bricks to see what it is; compile or capture the step if it is the interpreter.",
    find=_find,
)
