"""Write the parts of training steps, their gradients and their loss scale."""

from __future__ import annotations

from cbtop.units import NOT_MEASURED, count, counted, duration, number, percent
from cbtop.viewmodels.communication import CommunicationView
from cbtop.viewmodels.gradients import GradientNormView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.training import TrainingView

_SMALL = 0.01  # Gradient norms below this are written with an exponent.


def parts(view: SourceView, found: TrainingView) -> str:
    """Return the parts of a training step in one line: `training step 104.2 ms: data wait 3.1 %, forward 30.0 %, …
    (…)`. Parts that took no time are left out.
    """
    if not found.parts:
        return f"training step: parts {NOT_MEASURED} ({no_parts(view)})"
    shares = ", ".join(f"{part.name} {percent(part.percent)}" for part in found.parts if part.percent)
    return f"training step {duration(found.mean_us)}: {shares} ({of_steps(found)})"


def communication(found: TrainingView) -> str:
    """Return the communication of a training step as one line, or "" without communication."""
    times = found.communication
    if times is None:
        return ""
    kinds = ", ".join(f"{row.name} {duration(row.mean_us)}" for row in times.exposed) or NOT_MEASURED
    why = f" ({times.why_unknown})" if times.overlapped_us is None else ""
    line = f"communication, exposed: {kinds}; overlapped: {overlapped(times)}{why}"
    if times.ranks is None:
        return f"{line}; exposed may be a wait for another rank"
    waits = f"{duration(times.ranks.waiting_us)} for rank {times.ranks.slowest}" if times.ranks.waiting_us else "none"
    return f"{line}; waits for slower ranks: {waits}"


def overlapped(times: CommunicationView) -> str:
    """Return the time of communication that overlaps with computation: `1.20 ms at most`."""
    if times.overlapped_us is None:
        return NOT_MEASURED
    return f"{duration(times.overlapped_us)} at most" if times.overlapped_us else "none"


def gradients(view: SourceView, found: TrainingView) -> list[str]:
    """Return lines about the gradients and the loss scale.

    For example `gradient norm 0.5312 in step 118, before clipping (p50 0.60, max 1.20 of the latest 64 norms)`.
    """
    known = found.gradients
    if known is None:
        return []
    lines = []
    if known.fault is not None and not known.fault.is_over:
        lines.append(f"gradients not finite since step {count(known.fault.step)}")
    if known.norm is not None:
        norm = known.norm
        clipped = f", {norm.clipping} clipping" if norm.clipping else ""
        lines.append(
            f"gradient norm {_norm(norm.norm)} in step {count(norm.step)}{clipped}{_whose(view, norm)} "
            f"(p50 {_norm(norm.p50)}, max {_norm(norm.max)} of {latest(norm.measured)})"
        )
    if known.loss_scale is not None:
        scale = known.loss_scale
        size = count(scale.scale) if scale.scale >= 1 else number(scale.scale)
        lines.append(f"loss scale {size}; {count(scale.falls)} of {counted(scale.updates, 'step')} were skipped")
    return lines


def latest(norms: int) -> str:
    """Return a text with the number of gradient norms in a statistic: `the latest 64 norms`."""
    return "the latest norm" if norms == 1 else f"the latest {counted(norms, 'norm')}"


def _whose(view: SourceView, norm: GradientNormView) -> str:
    if norm.is_shard:
        return ", of this rank's shards"
    return ", of this rank" if view.world_size is not None and view.world_size > 1 else ""


def _norm(value: float) -> str:
    return f"{value:.2e}" if 0 < value < _SMALL else number(value)


def of_steps(found: TrainingView) -> str:
    """Return a text with the steps that the times of the parts come from: `mean of the latest 64 steps`."""
    return "the latest step" if found.steps == 1 else f"mean of the latest {counted(found.steps, 'step')}"


def no_parts(view: SourceView) -> str:
    """Return why the parts of the training steps are not known."""
    return "of several processes" if view.merged is not None else "the process has not reported them"
