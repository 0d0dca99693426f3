"""Judge the change of long calls: the p99 of a step and of each brick. Long calls are judged separately from the
median call.
"""

# Rules
# - A p99 counts as longer if it grew beyond its interval and by more than LEAST_PERCENT. The growth must also be
#   larger than other results of the gate explain. Such results are a longer median, drift, or a slowdown in one
#   layer.
# - Pauses by other programs make a p99 noisy. So the scatter of a p99 between runs is part of its interval, if the
#   scatter was learned.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from cbtop.comparison.noise import Change, change_between_runs
from cbtop.comparison.part_diff import PartDiff, PlaceDiff

LEAST_PERCENT = 10.0  # Because of pauses by other programs, a p99 changes by about this percentage.


@dataclass(frozen=True, slots=True)
class Tail:
    """The p99 of the calls of one brick or step, before and now."""

    place: PlaceDiff
    change: Change
    base_runs: int  # number of averaged base runs that have this p99
    median_ratio: float  # median time of a call in the new run, divided by the median time in the old run
    # The largest slowdown (new time / old time) that other results of the gate already report, either as drift or as
    # a slowdown in one layer.
    named_ratio: float

    @property
    def is_beyond(self) -> bool:
        """Whether the p99 changed upwards or downwards by more than its interval, and by more than LEAST_PERCENT."""
        return abs(self.change.delta) > self.change.half and abs(self.change.percent or 0.0) > LEAST_PERCENT

    @property
    def is_longer(self) -> bool:
        """Whether the p99 became longer by more than noise and other results of the gate explain."""
        explained = (1 + LEAST_PERCENT / 100) * max(1.0, self.median_ratio, self.named_ratio)
        return self.is_beyond and self.change.now > explained * self.change.before


def tails_of(part: PartDiff) -> list[Tail]:
    """Return the p99 of the step, and the p99 of each brick over all layers. A p99 is left out if a side has too few
    calls.
    """
    return [*_known(part, [part.step]), *_known(part, part.bricks)]


def _known(part: PartDiff, places: Sequence[PlaceDiff]) -> list[Tail]:
    """Return the p99 of each of `places`, if it is known. Intervals are corrected for the number of `places`."""
    drift = _ratio(part.drift.change) if part.drift and part.drift.is_slower else 1.0
    found = []
    for place in places:
        before, now = (side.p99 if side else None for side in (place.before, place.now))
        p50 = place.p50
        if before is None or now is None or p50 is None or place.is_below_resolution or p50.before <= 0:
            continue
        change = change_between_runs(before, now, 2 * len(places))
        cells = [one.change for one in part.cells if one.brick == place.brick and one.verdict == "slower"]
        named = max([drift, *(_ratio(one) for one in cells if one)])
        found.append(Tail(place, change, before.runs, _ratio(p50), named))
    return found


def _ratio(change: Change) -> float:
    return change.now / change.before if change.before > 0 else inf
