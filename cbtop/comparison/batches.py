"""Name the batch of a group of steps, for texts and thresholds.

The batch is a step's number of sequences, or of tokens if sequences are not reported.
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
    """Whether this group of steps has steps of `batch` sequences (tokens, if sequences are not reported)."""
    least, _ = _amounts(part)
    return least is not None and least <= batch <= most_alike(least)


def batch_text(part: StepGroup) -> str:
    """Return a group's batch, such as `6`, or `8 to 9` if steps may have 8 or 9 sequences. "" if not reported."""
    least, mean = _amounts(part)
    return "" if least is None else _range(least, mean)


def batches_text(parts: Iterable[StepGroup]) -> str:
    """Return the batches of all groups, smallest first, such as `1, 2, 8 to 9`."""
    ordered = sorted((least, batch_text(part)) for part in parts if (least := _amounts(part)[0]) is not None)
    return ", ".join(dict.fromkeys(text for _, text in ordered)) or "none"


def part_names(parts: Iterable[StepGroup]) -> dict[PartKey, str]:
    """Return a name for each group of steps.

    If groups have the same phase, their names add the batch (`decode, batch 6`). If the batch is the same, too, they
    add the tokens (`prefill, batch 1, 512 to 639 tokens`).
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
    """Return the smallest and the mean batch of a group of steps. None if not reported."""
    tokens, sequences = part.work
    return (tokens, part.tokens) if sequences is None else (sequences, part.sequences)


def _range(least: int, mean: float | None) -> str:
    """Return the amounts that are rounded down to `least`, such as `8 to 9`. If `mean` shows that all are equal, only
    this amount.
    """
    most = most_alike(least)
    if mean in (least, most):
        return count(least if mean == least else most)
    return f"{count(least)} to {count(most)}"
