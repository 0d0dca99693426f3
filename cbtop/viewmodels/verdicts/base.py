"""What every verdict has in common: how it is described, what it finds, and what mending it would gain."""

# Rules
# - A verdict is a pure function of one SourceView: of the stretch that it shows, the window or all that was seen.
# - It says only what its numbers show. Where data is missing it finds nothing.
# - Its thresholds are constants with their reason, and stand in the description of when it fires.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cbtop.units import count, duration
from cbtop.viewmodels.model import OVERLAP, Evidence, PaceView, Severity, SourceView, StepsView, Subject, Verdict

# Of the time in steps that lies in the window: what no more than this lies before it is made of, matters little.
EDGE = 0.01
# Mean recorded step to mean step, and the other way round: what recording costs makes them differ by less.
LIKE_ALL = 1.10
MIN_STEPS = 50  # so many steps have a distribution: one in fifty is no tail yet


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule has found in a view."""

    sentence: str
    evidence: tuple[Evidence, ...]
    about: Subject
    gain_tokens_per_sec: float | None = None
    gain_if: str = ""  # "it were as fast as the median layer"
    advice: str = ""  # what to do in this case; "": what the rule says
    is_inside: bool = False  # it is of what lies in steps, which is known of the recorded ones


@dataclass(frozen=True, slots=True)
class Rule:
    """One verdict: what it means, when it fires, what to do, and the function that finds it."""

    id: str
    severity: Severity
    means: str
    fires: str
    advice: str
    find: Callable[[SourceView], Finding | None]

    def judge(self, view: SourceView) -> Verdict | None:
        """The verdict on `view`; None where there is nothing to say."""
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
    """How many tokens/s of wall-clock time more there were if `percent` of the time in steps were not (Amdahl's law).

    None where that does not follow: steps that do not follow each other, books that do not close, a rate not known,
    a step that began before the stretch and lay there for longer than most take.
    """
    steps, stretch = view.steps, view.stretch
    if steps is None or not in_turn(view) or not steps.union_us or steps.tokens_per_sec is None:
        return None
    if view.books is None or not view.books.close or not stretch or not stretch.wall_us or not 0 < percent < 100:
        return None
    ran_us = sum(phase.us for phase in stretch.by_phase if phase.name == steps.phase)
    if steps.union_us - ran_us > max(steps.p50_us or 0.0, EDGE * ran_us):
        return None
    saved = percent / 100 * ran_us / stretch.wall_us
    return steps.tokens_per_sec * (1 / (1 - saved) - 1)


def gain_inside(view: SourceView, percent: float) -> float | None:
    """`gain` of a part of the time in recorded steps; None where these took clearly another time than all did."""
    return None if _unlike_all(view.steps) else gain(view, percent)


def _unlike_all(steps: StepsView | None) -> str:
    """That recorded steps took clearly another time than all did, as the end of a sentence; "" where they did not."""
    if steps is None or not steps.mean_us or not steps.recorded_mean_us:
        return ""
    if 1 / LIKE_ALL <= steps.recorded_mean_us / steps.mean_us <= LIKE_ALL:
        return ""
    return (
        f"; this is of the {count(steps.recorded)} recorded steps, which took {duration(steps.recorded_mean_us)} on "
        f"average, and not of all {count(steps.count)}, which took {duration(steps.mean_us)}"
    )


def in_turn(view: SourceView) -> bool:
    """Whether one step ran after the other, as far as is known: not at the same time, of whatever phase, nor in
    several processes."""
    steps, stretch = view.steps, view.stretch
    if steps is None or steps.overlap or view.merged is not None or stretch is None:
        return False
    in_steps_us = stretch.in_steps_us
    return in_steps_us is None or sum(phase.us for phase in stretch.by_phase) <= OVERLAP * in_steps_us


def steps_alike(view: SourceView) -> StepsView | None:
    """The steps shown, where there are enough of them and each is of as many tokens: then their times compare.

    How many each is of, no record here tells; that of every second these are as many a step does.
    """
    steps = view.steps
    if steps is None or steps.is_sample or steps.count < MIN_STEPS or steps.tokens % steps.count:
        return None
    each = steps.tokens // steps.count
    pace = pace_shown(view)
    return steps if pace and all(one.tokens == each * one.steps for one in pace) else None


def pace_shown(view: SourceView) -> list[PaceView]:
    """How long steps took, second by second, in the stretch shown; nothing of a merge."""
    return [one for one in view.pace if view.window is None or one.ago_s < view.window.covers_s]
