"""Verdicts of `cbtop bisect`: whether a commit is slower in the same way as the bad commit BAD. The verdicts are
derived from recorded runs.
"""

# Rules
# - A commit is bad if it breaks a rule that BAD also breaks, by the same brick. Other slowdowns are ignored, because
#   BAD no longer has them.
# - A commit is good if the interval of BAD's largest slowdown ends below half of that slowdown.
# - If BAD breaks a threshold, or if GOOD lacks the brick, such an interval does not exist. Then a commit is good if
#   it keeps all rules that BAD breaks.
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

LIKE_BAD = 0.5  # A commit is good if its slowdown is surely smaller than this share of BAD's slowdown.
# If several bricks or layers share a slowdown, the cause in the verdict begins with these words.
_NO_SINGLE = "no single brick"
_IN_LAYER = " in "  # text between the name of the brick and the name of the layer in a verdict's cause


class CommitVerdict(StrEnum):
    """The verdict of a bisection on one commit."""

    GOOD = "good"
    BAD = "bad"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Assessment:
    """The comparison of a commit's runs with base runs, and its judged rules.

    If `why_not` is set, nothing could be judged.
    """

    found: RunDiff
    judged: tuple[Judged, ...] = ()
    why_not: str = ""
    is_of_thresholds: bool = False

    @property
    def broken(self) -> list[Judged]:
        return [one for one in self.judged if one.outcome is Outcome.BROKEN]

    def keys(self, judged: Sequence[Judged]) -> set[tuple[str, str]]:
        """Return (rule, place) for each judged result.

        The place is a text. It is taken from the threshold. Without thresholds, it is the brick that causes the
        slowdown.
        """
        if self.is_of_thresholds:
            return {(one.rule, one.about) for one in judged}
        return {(one.rule, one.brick or one.guilty.partition(_IN_LAYER)[0]) for one in judged}


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Something that became slower: a brick in all layers, a brick in one layer, or a whole step if `brick` is
    None.
    """

    phase: str
    work: tuple[int | None, int | None]
    brick: Brick | None
    layer: str | None
    # Whether this is the change of a typical step. If False, it is the change of the wall-clock time per token or
    # step.
    is_typical: bool
    is_beside_others: bool  # whether the slowdown was measured relative to all other bricks and layers
    ratio: float

    @property
    def name(self) -> str:
        """The name of the slower brick or step on the screen, for example `DownProjection in Layer 5`."""
        whole = f"typical {self.phase} step" if self.is_typical else f"{self.phase} step"
        return _IN_LAYER.join(filter(None, (self.brick[0] if self.brick else whole, self.layer)))

    def change_in(self, found: RunDiff) -> Change | None:
        """Return the change of the same brick or step in another comparison.

        Return None if that comparison lacks the brick or step.
        """
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
    """The rules that the bad commit BAD breaks, and BAD's largest slowdown.

    The slowdown is None if GOOD has no figure to compare with.
    """

    keys: frozenset[tuple[str, str]]
    slowdown: Slowdown | None

    def of(self, assessment: Assessment) -> list[Judged]:
        """Return the broken results of a commit that BAD also has. Two results are the same if rule and place are
        equal.
        """
        shared = {rule for rule, cause in self.keys if cause.startswith(_NO_SINGLE)}
        return [one for one in assessment.broken if one.rule in shared or assessment.keys([one]) & self.keys]


def assess(bases: Sequence[Run], news: Sequence[Run], thresholds: Sequence[Threshold], *, anyway: bool) -> Assessment:
    """Judge a commit's runs by the user's thresholds, or by the default gate without thresholds. Raises UsageError if
    a threshold names a brick or layer that does not exist.
    """
    found = diff_of(bases, news, anyway=anyway)
    if why_not := found.why_not or found.base.untrusted or found.now.untrusted:
        return Assessment(found, why_not=why_not)
    if thresholds:
        judged = [one for threshold in thresholds for one in judge(threshold, found)]
        return Assessment(found, tuple(judged), is_of_thresholds=True)
    return Assessment(found, tuple(default_gate(found)))


def wanted_of(bad: Assessment) -> Wanted | None:
    """Return the rules that BAD breaks, or None if it breaks no rule."""
    if not bad.broken:
        return None
    found = [] if bad.is_of_thresholds else [one for part in bad.found.parts if (one := _largest(part))]
    return Wanted(frozenset(bad.keys(bad.broken)), max(found, key=lambda one: one.ratio, default=None))


def verdict_of(assessment: Assessment, wanted: Wanted, *, is_last: bool) -> CommitVerdict:
    """Return the verdict on a commit.

    `is_last` means that this was the last round. After the last round, an unsure threshold passes.
    """
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

    If the bricks together explain less than half of the slowdown, return the whole step. Return None if no brick and
    no step is slower than in the baseline.
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
    """Return one line with the measurement that decided the verdict on a commit."""
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
