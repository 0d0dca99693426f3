"""Writes the parts of training steps."""

from __future__ import annotations

from cbtop.units import NOT_MEASURED, counted, duration, percent
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.training import TrainingView


def parts(view: SourceView, found: TrainingView) -> str:
    """Return the parts in one line: `training step 104.2 ms: data wait 3.1 %, forward 30.0 %, … (…)`.

    Parts that took no time are left out.
    """
    if not found.parts:
        return f"training step: parts {NOT_MEASURED} ({no_parts(view)})"
    shares = ", ".join(f"{part.name} {percent(part.percent)}" for part in found.parts if part.percent)
    return f"training step {duration(found.mean_us)}: {shares} ({of_steps(found)})"


def of_steps(found: TrainingView) -> str:
    """Return which steps the parts are of: `mean of the latest 64 steps`."""
    return "the latest step" if found.steps == 1 else f"mean of the latest {counted(found.steps, 'step')}"


def no_parts(view: SourceView) -> str:
    """Return why the parts of the training steps are not known."""
    return "of several processes" if view.merged is not None else "the process has not reported them"
