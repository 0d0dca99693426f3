"""Check whether two groups of steps differ in their mean numbers of tokens and sequences.

The rounded numbers are equal in both groups. The means may still differ.
"""

from __future__ import annotations

from cbtop.comparison.noise import change
from cbtop.comparison.runs import StepGroup
from cbtop.units import number

# Mean tokens or sequences per step count as equal if they differ by at most this relative difference.
ALIKE_AMOUNTS = 0.02
_AMOUNTS = 2  # Two means are compared at a time: the mean number of tokens, and the mean number of sequences.


def other_batch(before: StepGroup, now: StepGroup, parts: int) -> str:
    """If the means of two groups differ by more than chance explains, return a text such as `39 tokens a step, 32
    before`. Otherwise return "".

    `parts` is the number of groups that are tested together. Chance plays a part, because servers have batches of
    random size.
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
