"""Judge the change of long calls: the p99 of a step and of each brick. The median call is judged elsewhere."""

# Rules
# - A p99 is longer if it grew beyond its interval and LEAST_PERCENT, and by more than other results of the gate
#   explain (a longer median, drift, a slowdown in one layer).
# - Pauses by other programs make a p99 noisy. So its interval includes its scatter between runs, if this was learned.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from cbtop.comparison.noise import Change, change_between_runs
from cbtop.comparison.part_diff import PartDiff, PlaceDiff

LEAST_PERCENT = 10.0  # Pauses by other programs change a p99 by about this percentage.


@dataclass(frozen=True, slots=True)
class Tail:
    """The p99 of the calls of one brick or step, before and now."""

    place: PlaceDiff
    change: Change
    base_runs: int  # number of averaged base runs with this p99
    median_ratio: float  # median call in the new run divided by that in the old run
    # The largest slowdown (new / old) that the gate already reports, as drift or in one layer.
    named_ratio: float

    @property
    def is_beyond(self) -> bool:
        """Whether the p99 changed in either direction beyond its interval and LEAST_PERCENT."""
        return abs(self.change.delta) > self.change.half and abs(self.change.percent or 0.0) > LEAST_PERCENT

    @property
    def is_longer(self) -> bool:
        """Whether the p99 became longer than noise and other results of the gate explain."""
        explained = (1 + LEAST_PERCENT / 100) * max(1.0, self.median_ratio, self.named_ratio)
        return self.is_beyond and self.change.now > explained * self.change.before


def tails_of(part: PartDiff) -> list[Tail]:
    """Return the p99 of the step and of each brick over all layers, unless a side has too few calls."""
    return [*_known(part, [part.step]), *_known(part, part.bricks)]


def _known(part: PartDiff, places: Sequence[PlaceDiff]) -> list[Tail]:
    """Return the known p99 of `places`. Intervals are corrected for their number."""
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
