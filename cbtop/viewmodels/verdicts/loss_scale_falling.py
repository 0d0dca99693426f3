"""The verdict "loss scale falling": a gradient scaler lowers the loss scale again and again."""

from __future__ import annotations

from cbtop.units import count, number
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

# A healthy loss scale grows every 2,000 steps (torch's default), and falls once when it is too large. It falls at
# least this often to be reported.
MIN_FALLS = 4


def _find(view: SourceView) -> Finding | None:
    gradients = view.training.gradients if view.training else None
    scale = gradients.loss_scale if gradients else None
    if view.steps is None or scale is None or scale.latest_falls - scale.latest_rises < MIN_FALLS:
        return None
    fell = f"fell from {_scale(scale.before)} to {_scale(scale.scale)}" if scale.scale else "is 0"
    return Finding(
        f"Loss scale {fell} in {count(scale.latest)} steps; {count(scale.latest_falls)} of these steps were skipped",
        (
            Evidence("loss scale before", scale.before, ""),
            Evidence("loss scale", scale.scale, ""),
            Evidence("steps", scale.latest, "steps"),
            Evidence("skipped", scale.latest_falls, "steps"),
            Evidence("skipped of all", scale.falls, "steps"),
            Evidence("all", scale.updates, "steps"),
        ),
        Subject(About.STEPS, view.steps.phase),
    )


def _scale(value: float) -> str:
    return count(value) if value >= 1 else number(value)


LOSS_SCALE_FALLING = Rule(
    id="loss-scale-falling",
    severity=Severity.WARNING,
    means="Gradients overflow again and again, so the gradient scaler lowers the scale and skips "
    "steps, which then train nothing. Small gradients become 0.",
    fires=f"In the latest 64 updates of the scaler, the falls of the scale outnumber its rises by {MIN_FALLS}. "
    "The first 32 updates do not count, because a scaler begins with too large a scale.",
    advice="Find where float16 overflows: clip gradients after unscale_, lower the learning rate, keep the loss and "
    "normalisations in float32. Or use bfloat16, which needs no scale.",
    find=_find,
)
