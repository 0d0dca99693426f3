"""What all verdicts have in common: rules, findings, and the tokens/s that a fix would gain."""

# Rules
# - A verdict is a pure function of one SourceView, over its window or all data.
# - A verdict claims only what its figures show. Without the data, there is no verdict.
# - The thresholds of a verdict are constants with a reason. Its description contains them.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cbtop.protocol.vocabulary import CALL
from cbtop.units import count, duration
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.steps import OVERLAP, PaceView, StepsView
from cbtop.viewmodels.time_range import TimeRangeView
from cbtop.viewmodels.verdict import Evidence, Severity, Subject, Verdict

# Steps may begin before the window. There is a gain only if little of their time was before it: at most this share of
# their time in the window, or one median step.
EDGE = 0.01
# The mean recorded step and the mean step may differ by this factor. Recording alone costs less.
LIKE_ALL = 1.10
# The slowest steps are judged only among at least this many. A fiftieth of fewer is less than one step.
MIN_STEPS = 50


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a rule has found in a view."""

    sentence: str
    evidence: tuple[Evidence, ...]
    about: Subject
    gain_tokens_per_sec: float | None = None
    # The condition of the gain after "if", such as "it were as fast as the median layer".
    gain_if: str = ""
    advice: str = ""  # advice for this problem; "": the rule's advice
    # Whether the finding is about the inside of steps, which is known only of recorded ones.
    is_inside: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule for a verdict: its meaning, condition and advice, and the function that finds the problem."""

    id: str
    severity: Severity
    means: str
    fires: str
    advice: str
    find: Callable[[SourceView], Finding | None]

    def judge(self, view: SourceView) -> Verdict | None:
        """Return the verdict on `view`, or None if the rule finds no problem."""
        found = self.find(view)
        if found is None:
            return None
        return Verdict(
            self.id,
            self.severity,
            found.sentence + (_unlike_all(view.steps) if found.is_inside else ""),
            found.evidence,
            found.advice or self.advice,
            found.about,
            found.gain_tokens_per_sec,
            found.gain_if,
        )


def gain(view: SourceView, percent: float) -> float | None:
    """Return the gain in wall-clock tokens/s from saving `percent` of the time in steps (Amdahl's law).

    None if it cannot be derived. This is so if steps overlap, if parts of the breakdown do not add up, if the rate is
    unknown, or if steps spent more than a median step before the time range.
    """
    steps, time_range = view.steps, view.time_range
    if steps is None or not in_turn(view) or not steps.union_us or steps.tokens_per_sec is None:
        return None
    if (
        view.books is None
        or not view.books.close
        or not time_range
        or not time_range.wall_us
        or not 0 < percent < 100
    ):
        return None
    ran_us = sum(phase.us for phase in time_range.by_phase if phase.name == steps.phase)
    if steps.union_us - ran_us > max(steps.p50_us or 0.0, EDGE * ran_us):
        return None
    saved = percent / 100 * min(1.0, ran_us / rates_us(steps, time_range))
    return steps.tokens_per_sec * (1 / (1 - saved) - 1) if saved < 1 else None


def rates_us(steps: StepsView, time_range: TimeRangeView) -> float:
    """Return the time that the rates of `steps` are divided by. In training, the time in training steps."""
    return steps.rates_us if steps.is_training and steps.rates_us else time_range.wall_us


def gain_inside(view: SourceView, percent: float) -> float | None:
    """Return the gain in tokens/s from saving `percent` of the recorded step time. None if recorded steps are too
    different from the others.
    """
    return None if _unlike_all(view.steps) else gain(view, percent)


def _unlike_all(steps: StepsView | None) -> str:
    """Return the end of a sentence: how the mean recorded step differs from the mean of all steps. "" if they are
    about equal.
    """
    if steps is None or not steps.mean_us or not steps.recorded_mean_us:
        return ""
    if 1 / LIKE_ALL <= steps.recorded_mean_us / steps.mean_us <= LIKE_ALL:
        return ""
    return (
        f"; this covers the {count(steps.recorded)} recorded steps, which took {duration(steps.recorded_mean_us)} on "
        f"average, not all {count(steps.count)}, which took {duration(steps.mean_us)}"
    )


def in_turn(view: SourceView) -> bool:
    """Return whether the steps of all phases ran one after another in one process. True if unknown."""
    steps, time_range = view.steps, view.time_range
    if steps is None or steps.overlap or view.merged is not None or time_range is None:
        return False
    in_steps_us = time_range.in_steps_us
    return in_steps_us is None or sum(phase.us for phase in time_range.by_phase) <= OVERLAP * in_steps_us


def steps_alike(view: SourceView) -> StepsView | None:
    """Return the steps if their times can be compared, otherwise None.

    There must be enough steps, all with the same number of tokens. Tokens of single steps are not stored, so equal
    mean tokens per step in every second count as equal. Calls of a library cannot be compared, because they are calls
    of different functions.
    """
    steps = view.steps
    if steps is None or steps.is_sample or steps.count < MIN_STEPS or steps.tokens % steps.count:
        return None
    if steps.phase == CALL:
        return None
    each = steps.tokens // steps.count
    pace = pace_shown(view)
    return steps if pace and all(one.tokens == each * one.steps for one in pace) else None


def pace_shown(view: SourceView) -> list[PaceView]:
    """Return the step times in the shown time, second by second. Return [] for a merge."""
    return [one for one in view.pace if view.window is None or one.ago_s < view.window.covers_s]
