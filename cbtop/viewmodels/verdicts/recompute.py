"""The verdict "recompute": backward passes repeat forward passes."""

from __future__ import annotations

from cbtop.units import counted, duration, percent
from cbtop.viewmodels.layers import MIN_STEPS
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

# Recomputation is reported above this percentage of a step. If every layer is checkpointed, it takes about a quarter.
# A step is then a forward pass, a repetition of it, and a backward pass that takes twice as long.
RECOMPUTE_PERCENT = 10.0


def _find(view: SourceView) -> Finding | None:
    steps, training = view.steps, view.training
    if steps is None or training is None or steps.recorded < MIN_STEPS or not steps.recorded_mean_us:
        return None
    repeated = {brick.name: brick.recompute_us for brick in training.bricks if brick.recompute_us}
    us = sum(repeated.values())
    share = 100 * us / steps.recorded_mean_us
    if share < RECOMPUTE_PERCENT:
        return None
    most = max(repeated, key=lambda name: repeated[name])
    return Finding(
        f"{percent(share)} of a {steps.phase} step repeats forward passes: {duration(us)} of "
        f"{duration(steps.recorded_mean_us)} in {counted(len(repeated), 'brick')}, most of it in {most}",
        (
            Evidence("repeated forward passes", share, "%"),
            Evidence("repeated a step", us, "µs"),
            Evidence("step", steps.recorded_mean_us, "µs"),
        ),
        Subject(About.STEPS, steps.phase),
        is_inside=True,
    )


RECOMPUTE = Rule(
    id="recompute",
    severity=Severity.NOTE,
    means="Gradient checkpointing saves memory: the backward pass repeats forward passes instead of keeping their "
    "results. The repetition costs time.",
    fires=f"In {MIN_STEPS} recorded training steps or more, repeated forward passes take {RECOMPUTE_PERCENT:g} % of "
    "the time or more.",
    advice="If memory allows, checkpoint fewer layers, or only the parts of a layer with large results and cheap "
    "computation, such as attention scores.",
    find=_find,
)
