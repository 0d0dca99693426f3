"""Check whether two groups of steps differ in their mean tokens and sequences. Their rounded numbers are equal."""

from __future__ import annotations

from cbtop.comparison.noise import change
from cbtop.comparison.runs import StepGroup
from cbtop.units import number

# Mean tokens or sequences per step are equal up to this relative difference.
ALIKE_AMOUNTS = 0.02
_AMOUNTS = 2  # Two means are compared at a time: the mean number of tokens, and the mean number of sequences.


def other_batch(before: StepGroup, now: StepGroup, parts: int) -> str:
    """Return a text such as `39 tokens a step, 32 before` if the means of two groups differ beyond chance, else "".

    Servers have batches of random size, so chance plays a part. `parts` groups are tested together.
    """
    for what, was, is_now in (
        ("tokens", before.tokens_a_step, now.tokens_a_step),
        ("sequences", before.sequences_a_step, now.sequences_a_step),
    ):
        if was is None or is_now is None:
            continue
        found = change(was, is_now, _AMOUNTS * parts)
        if abs(found.delta) > max(found.half, ALIKE_AMOUNTS * found.before):
            return f"{number(found.now)} {what} a step, {number(found.before)} before"
    return ""
