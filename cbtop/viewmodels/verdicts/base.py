"""Base of the verdicts: rules, their findings, and the tokens/s that a fix would gain."""

# Rules
# - A verdict is a pure function of one SourceView and its time range: the window, or everything seen.
# - A verdict claims only what its figures show. If data is missing, there is no verdict.
# - The thresholds of a verdict are constants with a reason. The description of the verdict contains them.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cbtop.units import count, duration
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.steps import OVERLAP, PaceView, StepsView
from cbtop.viewmodels.verdict import Evidence, Severity, Subject, Verdict

# Ignore step time before the window up to this share of the step time in the window.
EDGE = 0.01
# Ratio of the mean recorded step to the mean step, or its inverse. The cost of recording stays below this.
LIKE_ALL = 1.10
MIN_STEPS = 50  # With fewer steps, there is no tail: one step in fifty is not a distribution.


@dataclass(frozen=True, slots=True)
class Finding:
    """The problem that a rule found in a view."""

    sentence: str
    evidence: tuple[Evidence, ...]
    about: Subject
    gain_tokens_per_sec: float | None = None
    gain_if: str = ""  # Condition of the gain, to follow "if". Example: "it were as fast as the median layer".
    advice: str = ""  # Advice for this case, or "" for the advice of the rule.
    # Whether the finding is about what happens inside steps. This is known only for recorded steps.
    is_inside: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule for one verdict: what it means, when it fires, what to do, and the function that finds it."""

    id: str
    severity: Severity
    means: str
    fires: str
    advice: str
    find: Callable[[SourceView], Finding | None]

    def judge(self, view: SourceView) -> Verdict | None:
        """Return the verdict on `view`, or None if the rule finds nothing."""
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
    """Return the wall-clock tokens/s gained by saving `percent` of the time in steps (Amdahl's law).

    Returns None if the gain cannot be derived: steps overlap, parts of the breakdown do not add up, or the rate is
    unknown. Also returns None if steps spent more time before the time range than a median step takes.
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
    saved = percent / 100 * ran_us / time_range.wall_us
    return steps.tokens_per_sec * (1 / (1 - saved) - 1)


def gain_inside(view: SourceView, percent: float) -> float | None:
    """Return `gain` for `percent` of the recorded step time. None if recorded steps do not represent all steps."""
    return None if _unlike_all(view.steps) else gain(view, percent)


def _unlike_all(steps: StepsView | None) -> str:
    """Return how the mean recorded step differs from all steps, as the end of a sentence, or "" if it does not."""
    if steps is None or not steps.mean_us or not steps.recorded_mean_us:
        return ""
    if 1 / LIKE_ALL <= steps.recorded_mean_us / steps.mean_us <= LIKE_ALL:
        return ""
    return (
        f"; this covers the {count(steps.recorded)} recorded steps, which took {duration(steps.recorded_mean_us)} on "
        f"average, not all {count(steps.count)}, which took {duration(steps.mean_us)}"
    )


def in_turn(view: SourceView) -> bool:
    """Return whether steps of all phases ran one after another in one process. True if this is unknown."""
    steps, time_range = view.steps, view.time_range
    if steps is None or steps.overlap or view.merged is not None or time_range is None:
        return False
    in_steps_us = time_range.in_steps_us
    return in_steps_us is None or sum(phase.us for phase in time_range.by_phase) <= OVERLAP * in_steps_us


def steps_alike(view: SourceView) -> StepsView | None:
    """Return the steps if their times can be compared: there are enough, and all have the same number of tokens.

    The tokens of single steps are not recorded. They are equal if the tokens per step are the same in every second.
    """
    steps = view.steps
    if steps is None or steps.is_sample or steps.count < MIN_STEPS or steps.tokens % steps.count:
        return None
    each = steps.tokens // steps.count
    pace = pace_shown(view)
    return steps if pace and all(one.tokens == each * one.steps for one in pace) else None


def pace_shown(view: SourceView) -> list[PaceView]:
    """Return the step times of the shown time, second by second. A merge has none."""
    return [one for one in view.pace if view.window is None or one.ago_s < view.window.covers_s]
