"""Launch-bound: the device waits for its host."""

from __future__ import annotations

from cbtop.protocol.vocabulary import UNTIL_THERE
from cbtop.units import duration, percent
from cbtop.viewmodels.books import GPU_WAITED
from cbtop.viewmodels.model import About, Evidence, Severity, SourceView, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain

# Of the bricks' time, and of their calls: one step that waited long (the first one, a pause) is no reason to say it.
LAUNCH_BOUND_PERCENT = 20.0


LEAST_STEPS = 3  # recorded by their kernels


def _find(view: SourceView) -> Finding | None:
    return _found_by_stamps(view) or _found_by_kernels(view)


def _found_by_kernels(view: SourceView) -> Finding | None:
    """Compare the kernels of a step with the median of all steps: few are recorded, and one may be a slow one."""
    books, steps = view.books, view.steps
    if books is None or steps is None or not books.close or steps.recorded < LEAST_STEPS or not steps.p50_us:
        return None
    if GPU_WAITED not in [gap.name for gap in books.gaps]:
        return None
    kernels_us = books.bricks_us / steps.recorded
    share = 100 * (1 - kernels_us / steps.p50_us)
    if share < LAUNCH_BOUND_PERCENT:
        return None
    return Finding(
        f"Launch-bound: the GPU waits for its host {percent(share)} of {steps.phase}'s step time; of "
        f"{duration(steps.p50_us)}, the median step, its kernels take {duration(kernels_us)}",
        (
            Evidence("GPU waits", share, "%"),
            Evidence("kernels of a step", kernels_us, "µs"),
            Evidence("median step", steps.p50_us, "µs"),
            Evidence("steps recorded by their kernels", steps.recorded, ""),
        ),
        Subject(About.STEPS, steps.phase),
        gain(view, share),
        "the GPU never waited in a step",
    )


def _found_by_stamps(view: SourceView) -> Finding | None:
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
    fires=f"Of steps that are recorded by their kernels, these take {100 - LAUNCH_BOUND_PERCENT:g} % or less of the "
    f"median step, in {LEAST_STEPS} or more of them, and the GPU was idle as most of them began. Of steps "
    "recorded by stamps, bricks whose device waited for the host take "
    f"{LAUNCH_BOUND_PERCENT:g} % or more of the time in steps, and are as large a part of all calls.",
    advice="Capture the step as a CUDA graph (torch.compile with mode='reduce-overhead'), or work on more sequences "
    "a step.",
    find=_find,
)
