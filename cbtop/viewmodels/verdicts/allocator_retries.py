"""Verdict "allocator-retries": torch empties its cache in training steps, because the GPU has no memory left."""

from __future__ import annotations

from cbtop.protocol.training_messages import MAX_TIMED_STEPS
from cbtop.units import count, percent, size_bytes
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

MIN_RETRIES = 3  # A single retry may be due to the longest batch, or to an evaluation.


def _find(view: SourceView) -> Finding | None:
    steps, memory = view.steps, view.training.memory if view.training else None
    if steps is None or memory is None or not memory.counted_steps or (memory.retries or 0) < MIN_RETRIES:
        return None
    unused = memory.unused_percent
    unused_text = (
        "" if unused is None else f"; at most {percent(unused)} of {size_bytes(memory.reserved_bytes)} is unused"
    )
    return Finding(
        f"The GPU had no memory left {count(memory.retries)} times in {count(memory.counted_steps)} {steps.phase} "
        f"steps, so torch emptied its cache{unused_text}",
        (
            Evidence("retries", memory.retries or 0, ""),
            Evidence("steps", memory.counted_steps, "steps"),
            Evidence("allocated at the peak", memory.allocated_bytes or 0, "B"),
            Evidence("reserved", memory.reserved_bytes or 0, "B"),
            *(() if unused is None else (Evidence("reserved and unused at the peak", unused, "%"),)),
        ),
        Subject(About.STEPS, steps.phase),
    )


ALLOCATOR_RETRIES = Rule(
    id="allocator-retries",
    severity=Severity.WARNING,
    means="Torch found no memory on the GPU, so it waited for all kernels, gave its cache back and tried again. The "
    "next batch may fail.",
    fires=f"Torch counted {MIN_RETRIES} retries or more in the steps since the first of the latest {MAX_TIMED_STEPS} "
    "recorded ones.",
    advice="Use smaller batches or checkpointing. If much is reserved and unused, set "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and do not call empty_cache in the loop.",
    find=_find,
)
