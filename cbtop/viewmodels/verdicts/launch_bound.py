"""Verdict "launch-bound": the device waits for its host."""

from __future__ import annotations

from cbtop.protocol.vocabulary import UNTIL_THERE, TrainingPart
from cbtop.units import duration, percent
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.time_breakdown import GPU_WAITED
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain

# The device waits for its host in at least this percentage of the time in steps. If stamps record the steps, the
# bricks that wait must also have this percentage of all calls. Otherwise one long wait (the first step, a pause)
# could cause the verdict.
LAUNCH_BOUND_PERCENT = 20.0


LEAST_STEPS = 3  # At least this many steps were recorded by their kernels.


def _find(view: SourceView) -> Finding | None:
    if view.training is not None:
        return _found_in_training(view)
    return _found_by_stamps(view) or _found_by_kernels(view)


def _found_in_training(view: SourceView) -> Finding | None:
    steps, training = view.steps, view.training
    idle = training.part(TrainingPart.NO_KERNEL) if training else None
    if steps is None or training is None or idle is None:
        return None
    # The parts are of the newest steps, even if the shown time is shorter. So count the recorded ones among these.
    recorded = training.by_kernels or steps.recorded
    if recorded < LEAST_STEPS or idle.percent < LAUNCH_BOUND_PERCENT:
        return None
    return Finding(
        f"Launch-bound: no kernel runs in {percent(idle.percent)} of a {steps.phase} step while its host launches: "
        f"{duration(idle.mean_us)} of {duration(training.mean_us)}",
        (
            Evidence("no kernel", idle.percent, "%"),
            Evidence("no kernel, a step", idle.mean_us, "µs"),
            Evidence("step", training.mean_us or 0.0, "µs"),
            Evidence("steps recorded by their kernels", recorded, ""),
        ),
        Subject(About.STEPS, steps.phase),
        gain(view, idle.percent),
        "the GPU never waited in a step",
    )


def _found_by_kernels(view: SourceView) -> Finding | None:
    """Find waits for launches in steps that were recorded by their kernels.

    The few recorded steps may be slow, so their kernels are compared with the median of all steps.
    """
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
        f"Launch-bound: the GPU waits for its host {percent(share)} of {steps.phase}'s step time; the median step "
        f"takes {duration(steps.p50_us)}, its kernels {duration(kernels_us)}",
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
    means="Kernels end before the host has launched the next ones, so the device idles. The speed of launches limits "
    "it, not the speed of kernels.",
    fires=f"If steps are recorded by their kernels: the kernels take {100 - LAUNCH_BOUND_PERCENT:g} % or less of the "
    f"median step, {LEAST_STEPS} steps or more are recorded, and the GPU was idle as most of them began. Training: "
    f"for {LAUNCH_BOUND_PERCENT:g} % of a step or more no kernel runs, not counting waits for data and other work of "
    "the loop. If steps are recorded by stamps: bricks whose device waited for the host take "
    f"{LAUNCH_BOUND_PERCENT:g} % or more of the time in steps, and of all calls.",
    advice="Capture the step as a CUDA graph (torch.compile with mode='reduce-overhead'), or process more sequences "
    "in a step.",
    find=_find,
)
