"""Name the batch of a group of steps, in texts and in thresholds.

The batch is the number of sequences of a step, or the number of tokens if sequences are not reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cbtop.comparison.runs import StepGroup
from cbtop.comparison.step_blocks import most_alike
from cbtop.units import count

# key of a group of steps: (phase, (tokens, sequences) of each step)
PartKey = tuple[str, tuple[int | None, int | None]]


def key_of(part: StepGroup) -> PartKey:
    return part.phase, part.work


def has_batch(part: StepGroup, batch: int) -> bool:
    """Whether this group of steps contains steps of `batch` sequences, or steps of `batch` tokens if sequences are
    not reported.
    """
    least, _ = _amounts(part)
    return least is not None and least <= batch <= most_alike(least)


def batch_text(part: StepGroup) -> str:
    """Return the batch of a group of steps, for example `6`, or `8 to 9` if the group may contain steps with 8 and
    with 9 sequences. Return "" if no batch is reported.
    """
    least, mean = _amounts(part)
    return "" if least is None else _range(least, mean)


def batches_text(parts: Iterable[StepGroup]) -> str:
    """Return the batches of all groups of steps, the smallest first, such as `1, 2, 8 to 9`."""
    ordered = sorted((least, batch_text(part)) for part in parts if (least := _amounts(part)[0]) is not None)
    return ", ".join(dict.fromkeys(text for _, text in ordered)) or "none"


def part_names(parts: Iterable[StepGroup]) -> dict[PartKey, str]:
    """Return a name for each group of steps.

    If several groups have the same phase, the name contains the batch, for example `decode, batch 6`. If several
    groups have the same batch, the name also contains the tokens, for example `prefill, batch 1, 512 to 639 tokens`.
    """
    by_key = {key_of(part): part for part in parts}
    of_phase = Counter(phase for phase, _ in by_key)
    alike = Counter((part.phase, batch_text(part)) for part in by_key.values())
    names = {}
    for key, part in by_key.items():
        words = part.phase
        if of_phase[part.phase] > 1:
            batch, (tokens, _) = batch_text(part), part.work
            words += f", batch {batch}" if batch else ""
            if alike[part.phase, batch] > 1:
                words += ", tokens not reported" if tokens is None else f", {_range(tokens, part.tokens)} tokens"
        names[key] = words
    return names


def _amounts(part: StepGroup) -> tuple[int | None, float | None]:
    """Return two batches of a group of steps: the smallest and the mean. A value is None if it was not reported."""
    tokens, sequences = part.work
    return (tokens, part.tokens) if sequences is None else (sequences, part.sequences)


def _range(least: int, mean: float | None) -> str:
    """Return as text the amounts that are rounded down to `least`, such as `8 to 9`.

    If `mean` shows that all amounts are equal, return that single amount.
    """
    most = most_alike(least)
    if mean in (least, most):
        return count(least if mean == least else most)
    return f"{count(least)} to {count(most)}"
