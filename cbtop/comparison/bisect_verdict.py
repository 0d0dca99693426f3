"""Verdicts of `cbtop bisect`: whether a commit is slow in the same way as the bad commit BAD. All are derived from
runs.
"""

# Rules
# - A commit is bad if it breaks a rule that BAD breaks, by the same brick. Other slowdowns do not count, because BAD
#   no longer has them.
# - A commit is good if the interval of BAD's largest slowdown ends below half of it.
# - Such an interval is missing if BAD breaks a threshold, or if GOOD lacks the brick. Then a commit is good if it
#   keeps all rules that BAD breaks.
# - Any other commit is unclear. More runs may decide.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from cbtop.comparison.default_gate import default_gate
from cbtop.comparison.items import Brick
from cbtop.comparison.judged import Judged, Outcome, ratio_text
from cbtop.comparison.noise import Change
from cbtop.comparison.part_diff import PartDiff
from cbtop.comparison.run_diff import RunDiff, diff_of
from cbtop.comparison.runs import Run
from cbtop.comparison.threshold_grammar import Threshold
from cbtop.comparison.thresholds import judge

LIKE_BAD = 0.5  # A good commit's slowdown is certainly smaller than this share of BAD's.
# First words of the verdict's cause if several bricks or layers share a slowdown.
_NO_SINGLE = "no single brick"
_IN_LAYER = " in "  # text between the name of the brick and the name of the layer in a verdict's cause


class CommitVerdict(StrEnum):
    """The verdict of a bisection on one commit."""

    GOOD = "good"
    BAD = "bad"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Assessment:
    """A commit's runs compared with base runs, and the judged rules. With `why_not`, nothing could be judged."""

    found: RunDiff
    judged: tuple[Judged, ...] = ()
    why_not: str = ""
    is_of_thresholds: bool = False

    @property
    def broken(self) -> list[Judged]:
        return [one for one in self.judged if one.outcome is Outcome.BROKEN]

    def keys(self, judged: Sequence[Judged]) -> set[tuple[str, str]]:
        """Return (rule, place) for each judged result.

        The place is what the threshold limits. Without thresholds, it is the brick that causes the slowdown.
        """
        if self.is_of_thresholds:
            return {(one.rule, one.about) for one in judged}
        return {(one.rule, one.brick or one.guilty.partition(_IN_LAYER)[0]) for one in judged}


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Something that became slower: a brick in all layers, a brick in one layer, or (if `brick` is None) the whole
    step.
    """

    phase: str
    work: tuple[int | None, int | None]
    brick: Brick | None
    layer: str | None
    # True: the change of a typical step. False: of the wall-clock time per token or step.
    is_typical: bool
    is_beside_others: bool  # whether it was measured relative to all other bricks and layers
    ratio: float

    @property
    def name(self) -> str:
        """The name of the slower brick or step on the screen, for example `DownProjection in Layer 5`."""
        whole = f"typical {self.phase} step" if self.is_typical else f"{self.phase} step"
        return _IN_LAYER.join(filter(None, (self.brick[0] if self.brick else whole, self.layer)))

    def change_in(self, found: RunDiff) -> Change | None:
        """Return the change of the same brick or step in the comparison `found`, or None if it is missing there."""
        part = next((one for one in found.parts if (one.phase, one.now.work) == (self.phase, self.work)), None)
        if part is None:
            return None
        if self.brick is None:
            return part.typical if self.is_typical else part.wall
        changes = [one.change for one in part.places if (one.brick, one.layer) == (self.brick, self.layer)]
        change = changes[0] if changes else None
        return change.own if change and self.is_beside_others else change


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rules that the bad commit BAD breaks, and its largest slowdown (None: GOOD has no such figure)."""

    keys: frozenset[tuple[str, str]]
    slowdown: Slowdown | None

    def of(self, assessment: Assessment) -> list[Judged]:
        """Return those broken results of a commit for which the commit BAD has one with the same rule and place."""
        shared = {rule for rule, cause in self.keys if cause.startswith(_NO_SINGLE)}
        return [one for one in assessment.broken if one.rule in shared or assessment.keys([one]) & self.keys]


def assess(bases: Sequence[Run], news: Sequence[Run], thresholds: Sequence[Threshold], *, anyway: bool) -> Assessment:
    """Judge a commit's runs by the user's thresholds, or else by the default gate. Raises UsageError if a threshold
    names an unknown brick or layer.
    """
    found = diff_of(bases, news, anyway=anyway)
    if why_not := found.why_not or found.base.untrusted or found.now.untrusted:
        return Assessment(found, why_not=why_not)
    if thresholds:
        judged = [one for threshold in thresholds for one in judge(threshold, found)]
        return Assessment(found, tuple(judged), is_of_thresholds=True)
    return Assessment(found, tuple(default_gate(found)))


def wanted_of(bad: Assessment) -> Wanted | None:
    """Return the rules that BAD breaks, or None without any."""
    if not bad.broken:
        return None
    found = [] if bad.is_of_thresholds else [one for part in bad.found.parts if (one := _largest(part))]
    return Wanted(frozenset(bad.keys(bad.broken)), max(found, key=lambda one: one.ratio, default=None))


def verdict_of(assessment: Assessment, wanted: Wanted, *, is_last: bool) -> CommitVerdict:
    """Return the verdict on a commit. In the last round (`is_last`), an unsure threshold passes."""
    if assessment.why_not:
        return CommitVerdict.UNCLEAR
    if wanted.of(assessment):
        return CommitVerdict.BAD
    if wanted.slowdown is not None:
        change = wanted.slowdown.change_in(assessment.found)
        if change is None or change.before <= 0:
            return CommitVerdict.UNCLEAR
        most = 1 + LIKE_BAD * (wanted.slowdown.ratio - 1)
        return CommitVerdict.GOOD if (change.now + change.half) / change.before < most else CommitVerdict.UNCLEAR
    rules = {rule for rule, _ in wanted.keys}
    outcomes = {one.outcome for one in assessment.judged if one.rule in rules}
    holds = {Outcome.HOLDS, Outcome.UNSURE} if is_last else {Outcome.HOLDS}
    return CommitVerdict.GOOD if outcomes and outcomes <= holds else CommitVerdict.UNCLEAR


def _largest(part: PartDiff) -> Slowdown | None:
    """Return the brick with the largest slowdown.

    If bricks explain less than half of it, the whole step. None if nothing is slower than in the baseline.
    """
    whole = part.typical if part.is_typically_slower else part.wall if part.is_slower else None
    place = max((one for one in part.guilty if one.change), key=lambda one: one.delta_us, default=None)
    where = part.phase, part.now.work
    if place and place.change and (whole is None or place.delta_us > whole.delta / 2):
        is_beside = place.change.is_told_by_others
        change = place.change.own if is_beside and place.change.own else place.change
        return Slowdown(*where, place.brick, place.layer, False, is_beside, change.now / change.before)
    if whole is None:
        return None
    return Slowdown(*where, None, None, part.is_typically_slower, False, whole.now / whole.before)


def said_of(assessment: Assessment, wanted: Wanted) -> str:
    """Return a line with the measurement that decided a commit's verdict."""
    if assessment.why_not:
        return assessment.why_not
    if broken := wanted.of(assessment):
        return f"{broken[0].guilty or broken[0].about}: {broken[0].said}"
    change = wanted.slowdown and wanted.slowdown.change_in(assessment.found)
    if wanted.slowdown and change and change.before > 0:
        return f"{wanted.slowdown.name}: {ratio_text(change)}"
    if wanted.slowdown:
        return f"{wanted.slowdown.name}: it has none"
    rules = {rule for rule, _ in wanted.keys}
    return "; ".join(f"{one.about}: {one.said}" for one in assessment.judged if one.rule in rules)
