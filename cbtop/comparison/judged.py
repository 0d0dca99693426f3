"""The result of judging one threshold, or one rule of the default gate, with its texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cbtop.comparison.noise import Change
from cbtop.comparison.part_diff import PartDiff, PlaceDiff
from cbtop.comparison.run_diff import RunDiff
from cbtop.units import duration

# The gate is unsure if it can only detect larger changes of the median brick than this percentage.
BLIND_PERCENT = 10.0
_WAYS_OUT = (
    "the limit is within the interval, so it is not known: use more or longer runs, a wider limit, or --allow-unsure"
)


class Outcome(StrEnum):
    """The outcome of judging one threshold."""

    HOLDS = "holds"
    # The threshold's limit is inside the confidence interval of the measurement, or that interval is too wide.
    UNSURE = "unsure"
    BROKEN = "broken"
    UNKNOWN = "unknown"  # Data is missing, so the threshold cannot be judged.


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of a threshold, or of a rule of the default gate, for one brick or layer in a group of steps."""

    rule: str
    about: str  # what was judged, such as `decode: RmsNorm in Layer 5`
    outcome: Outcome
    said: str  # the measured value and the limit as text
    guilty: str = ""  # the brick and layer that break the threshold
    where: tuple[str, int] = ("", 1)
    brick: str = ""  # the brick that breaks a rule of the default gate, without its layer
    must_be_sure: bool = False  # whether the gate also fails if the outcome is `unsure`

    @property
    def passes(self) -> bool:
        """Whether this result lets the gate pass."""
        return self.outcome is Outcome.HOLDS or (self.outcome is Outcome.UNSURE and not self.must_be_sure)


def must_be_sure(judged: Sequence[Judged]) -> list[Judged]:
    """Return a copy of the results that makes the gate fail for `unsure`, with advice for a clear result."""
    return [
        replace(one, must_be_sure=True, said=f"{one.said}; {_WAYS_OUT}") if one.outcome is Outcome.UNSURE else one
        for one in judged
    ]


def only_if_trusted(judged: Sequence[Judged], found: RunDiff) -> list[Judged]:
    """Return the results if both runs' data can be trusted. Otherwise broken ones become unknown, and the first has
    the reason.
    """
    untrusted = found.base.untrusted or found.now.untrusted
    if not untrusted:
        return list(judged)
    first = Judged("trusted", found.now.name, Outcome.UNKNOWN, untrusted)
    return [
        first,
        *(replace(one, outcome=Outcome.UNKNOWN) if one.outcome is Outcome.BROKEN else one for one in judged),
    ]


def about_place(part: PartDiff, place: PlaceDiff) -> str:
    return f"{part.name}: {place.name}"


def ratio_text(one: Change) -> str:
    return f"{one.now / one.before:.3f}× ± {one.half / one.before:.3f}"


def calls_text(place: PlaceDiff, figure: str) -> str:
    one = {"p50": place.p50, "p99": place.p99}.get(figure)
    return f" ({figure} {duration(one.before)} → {duration(one.now)})" if one else ""
