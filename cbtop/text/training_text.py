"""Write the parts of training steps, their gradients and their loss scale."""

from __future__ import annotations

from cbtop.units import NOT_MEASURED, count, counted, duration, number, percent, size_bytes
from cbtop.viewmodels.communication import CommunicationView
from cbtop.viewmodels.gradients import GradientNormView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.training import TrainingView
from cbtop.viewmodels.training_memory import TrainingMemoryView

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


def below(view: SourceView, found: TrainingView) -> list[str]:
    """Return the lines below the parts: gradients, the loss scale and, if it is known, the memory."""
    lines = gradients(view, found)
    return [*lines, memory(found.memory)] if found.memory is not None and found.memory.steps else lines


def memory(found: TrainingMemoryView) -> str:
    """Return the peak as one line: `memory of a step ≥41.2 GB at its peak, in Layer 3 → Activation; reserved …`."""
    if not found.steps:
        return f"memory of a step {NOT_MEASURED} ({found.why_unknown or 'no reason is known'})"
    where = f", in {' → '.join(found.place)}" if found.place else ""
    limit = f" of {size_bytes(found.limit_bytes)}" if found.limit_bytes else ""
    return (
        f"memory of a step ≥{size_bytes(found.allocated_bytes)} at its peak{where}; reserved "
        f"{size_bytes(found.reserved_bytes)}{limit} (most of {counted(found.steps, 'recorded step')})"
    )


def memory_details(found: TrainingMemoryView) -> str:
    """Return one line about the allocator: its unused memory, torch's own peak, and the number of retries."""
    parts = []
    if found.unused_percent is not None:
        parts.append(f"at most {percent(found.unused_percent)} of the reserved memory is unused at the peak")
    if found.torch_peak_bytes:
        parts.append(f"torch's own peak {size_bytes(found.torch_peak_bytes)}")
    if found.retries is not None and found.counted_steps:
        parts.append(f"retries of the allocator: {count(found.retries)} in {counted(found.counted_steps, 'step')}")
    return "; ".join(parts)


def _whose(view: SourceView, norm: GradientNormView) -> str:
    if norm.is_shard:
        return ", of this rank's shards"
    return ", of this rank" if view.world_size is not None and view.world_size > 1 else ""


def _norm(value: float) -> str:
    return f"{value:.2e}" if 0 < value < _SMALL else number(value)


def of_steps(found: TrainingView) -> str:
    """Return a text with the steps over which the parts were measured: `mean of the latest 64 steps`.

    If the kernels of some steps were recorded on a GPU, the number of these steps is added: `mean of the latest 64
    steps, kernels of 3`.
    """
    latest = "the latest step" if found.steps == 1 else f"mean of the latest {counted(found.steps, 'step')}"
    return f"{latest}, kernels of {count(found.by_kernels)}" if found.by_kernels else latest


def no_parts(view: SourceView) -> str:
    """Return why the parts of the training steps are not known."""
    return "of several processes" if view.merged is not None else "the process has not reported them"
