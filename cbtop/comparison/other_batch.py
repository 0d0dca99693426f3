"""Whether the steps of two parts have different numbers of tokens or sequences, although both round to the same."""

from __future__ import annotations

from cbtop.comparison.noise import change
from cbtop.comparison.runs import StepGroup
from cbtop.units import number

ALIKE_AMOUNTS = 0.02  # relative difference of the mean tokens or sequences a step that still counts as the same
_AMOUNTS = 2  # tokens and sequences are compared together


def other_batch(before: StepGroup, now: StepGroup, parts: int) -> str:
    """Return for example `39 tokens a step, 32 before` if the means differ by more than chance explains, or "".

    `parts` is the number of parts compared together. Servers have batches of random size, so their means differ.
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
