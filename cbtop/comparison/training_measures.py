"""Find what a threshold may limit in training steps: the median time of a part."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

from cbtop.comparison.noise import half_of
from cbtop.comparison.part_diff import PartDiff
from cbtop.protocol.vocabulary import TrainingPart, is_training
from cbtop.units import duration, number

NO_SAMPLES = "not every step reports its sequences"
NO_SUCH_PART = "its steps have no such part"
NO_PARTS = "too few reports of the parts of its steps"
ONLY_P50 = "of a part of a training step, only the p50 over all layers is known"
NOT_BEFORE = "it took no time in the baseline"


@dataclass(frozen=True, slots=True)
class Measure:
    """A measured value with its interval, or the reason why it is unknown.

    A relative value is a multiple of the baseline. Others are in µs or per second.
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
    if not known and not is_training(part.phase):
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
