"""Find the values of training steps that a threshold may limit: the median time of a part, and the peak memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan

from cbtop.comparison.memory_peaks import PeakChange, PhaseMemory
from cbtop.comparison.noise import half_of
from cbtop.comparison.part_diff import PartDiff
from cbtop.protocol.vocabulary import TrainingPart, shows_training
from cbtop.units import duration, number, size_bytes

NO_SAMPLES = "not every step reports its sequences"
NO_SUCH_PART = "its steps have no such part"
NO_PARTS = "too few reports of the parts of its steps"
ONLY_P50 = "of a part of a training step, only the p50 over all layers is known"
NOT_BEFORE = "it took no time in the baseline"
NO_MEMORY = "the memory of its steps is not known: it is measured in recorded steps on a GPU"
NO_MEMORY_BEFORE = "the memory of its steps is not known in the baseline"


@dataclass(frozen=True, slots=True)
class Measure:
    """A measured value with its interval, or the reason why it is unknown.

    A relative value is a multiple of the baseline. Other values are in µs, in bytes or per second.
    """

    name: str  # part of the training step, or "" for the whole step
    why_not: str = ""
    value: float = nan
    least: float = nan
    most: float = nan
    said: str = ""  # the measured value and its interval as text


def bare_name(name: str) -> str:
    """Return the lower-case letters and digits of a name, to compare names of parts."""
    return "".join(sign for sign in name.casefold() if sign.isalnum())


def training_part(part: PartDiff, name: str) -> str | None:
    """Return the part of a training step called `name`. None if a brick has this name, or if the step does not
    train.
    """
    known = dict.fromkeys([*part.now.training, *part.before.training])
    if not known and not shows_training(part.phase):
        return None
    return next((one for one in [*known, *TrainingPart] if bare_name(one) == bare_name(name)), None)


def part_p50(part: PartDiff, name: str, *, is_relative: bool) -> Measure:
    """Return the time of a part (such as the backward pass) of a training step, in the median step."""
    now, change = part.now.training.get(name), part.training.get(name)
    if now is None or (is_relative and change is None):
        return Measure(name, NO_SUCH_PART if part.now.training and now is None else NO_PARTS)
    if not is_relative or change is None:
        half = half_of(now)
        said = f"{duration(now.mean)} ± {duration(half)}"
        return Measure(name, "", now.mean, now.mean - half, now.mean + half, said)
    if change.before <= 0:
        return Measure(name, NOT_BEFORE)
    ratio, half = change.now / change.before, change.half / change.before
    said = f"{number(ratio)}× ± {number(half)} (p50 {duration(change.before)} → {duration(change.now)})"
    return Measure(name, "", ratio, ratio - half, ratio + half, said)


def phases_with_memory(memory: Iterable[PhaseMemory], phases: Iterable[str]) -> list[str]:
    """Return the phases with memory, then the phases of `phases` that have training steps."""
    return list(dict.fromkeys([one.phase for one in memory] + [phase for phase in phases if shows_training(phase)]))


def memory_peak(
    before: Sequence[PhaseMemory], now: Sequence[PhaseMemory], phase: str, name: str, *, is_relative: bool
) -> Measure:
    """Return the peak of the memory `name` in the steps of `phase`, in bytes or as a multiple of the baseline's.

    The interval of a size reaches from the peak that was seen to torch's own peak. The interval of a ratio is the
    range of the ratios of any two steps.
    """
    then, peak = (next((one.peaks.get(name) for one in run if one.phase == phase), None) for run in (before, now))
    if peak is None:
        return Measure(name, NO_MEMORY)
    if not is_relative:
        bound_bytes = max(peak.most_bytes, peak.bound_bytes or 0)
        said = f"{peak.text}, torch's own peak {size_bytes(peak.bound_bytes)}" if peak.bound_bytes else peak.text
        return Measure(name, "", peak.most_bytes, peak.most_bytes, bound_bytes, said)
    if then is None:
        return Measure(name, NO_MEMORY_BEFORE)
    ratios = peak.lowest_bytes / then.most_bytes, peak.most_bytes / then.lowest_bytes
    change = PeakChange(phase, name, then, peak)
    said = f"{number(change.ratio)}× ({number(ratios[0])} to {number(ratios[1])}), {then.text} → {peak.text}"
    return Measure(name, "", change.ratio, *ratios, said)
