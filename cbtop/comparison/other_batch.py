"""Compare the mean numbers of tokens and sequences of two groups of steps. Rounded, both are equal."""

from __future__ import annotations

from cbtop.comparison.noise import change
from cbtop.comparison.runs import StepGroup
from cbtop.units import number

ALIKE_AMOUNTS = 0.02  # relative difference of the mean tokens or sequences per step that counts as equal
_AMOUNTS = 2  # number of amounts that are tested together: tokens and sequences


def other_batch(before: StepGroup, now: StepGroup, parts: int) -> str:
    """Return for example `39 tokens a step, 32 before` if the means differ by more than chance explains, otherwise
    "".

    `parts` is the number of groups that are tested together. Chance matters because servers have batches of random
    size.
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
