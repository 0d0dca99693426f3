"""Verdict "memory-near-limit": a training step uses almost all memory of its GPU, or holds it in fragments."""

from __future__ import annotations

from cbtop.units import percent, size_bytes
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

NEAR_PERCENT = 95.0  # in percent of the memory limit; a batch with 5 % more tokens needs about 5 % more memory
# Percent of the reserved memory. torch rounds sizes and keeps blocks for later steps, which takes 5 to 20 %.
UNUSED_PERCENT = 30.0


def _find(view: SourceView) -> Finding | None:
    steps, memory = view.steps, view.training.memory if view.training else None
    if steps is None or memory is None or not memory.limit_bytes or not memory.allocated_bytes:
        return None
    allocated, reserved = memory.allocated_bytes, memory.reserved_bytes or 0
    unused = memory.least_unused_percent or 0.0
    of_limit, held = 100 * allocated / memory.limit_bytes, 100 * reserved / memory.limit_bytes
    where = f", most in {' → '.join(memory.place)}" if memory.place else ""
    if of_limit >= NEAR_PERCENT:
        sentence = (
            f"A {steps.phase} step allocates at least {size_bytes(allocated)}, {percent(of_limit)} of the "
            f"{size_bytes(memory.limit_bytes)} that it can get{where}"
        )
    elif held >= NEAR_PERCENT and unused >= UNUSED_PERCENT:
        sentence = (
            f"Memory is fragmented: at least {percent(unused)} of {size_bytes(reserved)} reserved is not allocated "
            f"at the peak of a {steps.phase} step{where}; the limit is {size_bytes(memory.limit_bytes)}"
        )
    else:
        return None
    return Finding(
        sentence,
        (
            Evidence("allocated at the peak", allocated, "B"),
            Evidence("reserved", reserved, "B"),
            Evidence("limit", memory.limit_bytes, "B"),
            Evidence("reserved and unused at the peak", unused, "%"),
        ),
        Subject(About.STEPS, steps.phase),
    )


MEMORY_NEAR_LIMIT = Rule(
    id="memory-near-limit",
    severity=Severity.NOTE,
    means="A longer batch may fail with an out-of-memory error.",
    fires=f"At the peak, {NEAR_PERCENT:g} % of what the process can get on its GPU is allocated. Or as much is "
    f"reserved, and {UNUSED_PERCENT:g} % of the reserved memory is not allocated at the peak.",
    advice="Use smaller batches, checkpointing, or an optimizer with smaller states. If memory is fragmented, set "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    find=_find,
)
