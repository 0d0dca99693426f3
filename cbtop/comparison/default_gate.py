"""The default gate, for use without thresholds: whether a run became slower than its baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from cbtop.comparison.items import BETWEEN_BRICKS
from cbtop.comparison.judged import (
    BLIND_PERCENT,
    Judged,
    Outcome,
    about_place,
    calls_text,
    ratio_text,
)
from cbtop.comparison.left_out import left_out_of_gate
from cbtop.comparison.noise import MIN_LEARNED, Change
from cbtop.comparison.part_diff import PartDiff, PlaceDiff, findable_percent
from cbtop.comparison.rate_diff import RateDiff
from cbtop.comparison.run_diff import RunDiff
from cbtop.comparison.short_steps import short_steps
from cbtop.comparison.steadiness import steadiness
from cbtop.units import count, counted, duration, number, percent

MAX_BLIND_PERCENT = 50.0  # The result is unknown if only slowdowns above this percentage would be found.
# With more noise than this percentage, a step may take twice as long and keep its threshold.
MAX_NOISE_PERCENT = 100.0
# On a suitable machine, pauses by other programs lengthen a unit of work by less than this percentage.
FAR_PERCENT = 25.0
_TOO_WIDE = (
    "the interval is too wide to tell whether this is a change; use more or longer runs (--learn 6), "
    "or a threshold of your own, such as step.p50<=1.05x"
)
_BY_WEIGHT = (Outcome.HOLDS, Outcome.UNSURE, Outcome.UNKNOWN, Outcome.BROKEN)
SCATTER_UNKNOWN = (
    f"fewer than {MIN_LEARNED} runs of the baseline do not show how runs vary; record more, as with --learn 6"
)


def default_gate(found: RunDiff) -> list[Judged]:
    """Return whether a brick, a typical step or the rate became slower than in the baseline, beyond noise.

    A typical step includes the time before it. The results tell if noise hides such a slowdown.
    """
    judged: list[Judged] = []
    for part in found.parts:
        of_part = _of_part(found, part)
        judged += known_to_scatter(of_part, part.before.runs) if part.before.runs < found.base.runs else of_part
    judged += [_rate_is_no_lower(found, one) for one in found.rates if not _may_be_the_machine(found, one)]
    judged += [
        Judged(f"{phase}: is compared", phase, Outcome.UNKNOWN, _not_compared(found, phase))
        for phase in found.not_judged
    ]
    return judged + left_out_of_gate(found)


def _of_part(found: RunDiff, part: PartDiff) -> list[Judged]:
    judged = []
    if part.more_failed_percent > part.wall.least_percent:
        judged.append(_more_failed(part))
    if _is_slower_as_a_machine(found, part):
        return [*judged, _machine_is_no_slower(part), *_is_steady(part)]
    judged += _bricks_are_no_slower(part)
    if part.typical is not None:
        judged.append(_step_is_no_longer(part, part.typical))
    return [*judged, *_is_steady(part)]


def _is_steady(part: PartDiff) -> list[Judged]:
    """Judge whether steps became longer during the run (drift), and whether long calls became longer.

    `broken` needs at least MIN_LEARNED base runs with the figure.
    """
    return [found for one, runs in steadiness(part) for found in known_to_scatter([one], runs)]


def known_to_scatter(judged: Sequence[Judged], base_runs: int) -> list[Judged]:
    """Return the results of the default gate. With fewer than MIN_LEARNED base runs, broken results become `unknown`.

    The scatter between so few runs is unknown. (On a busy machine, a third of identical runs were slower, see
    docs/gate.md.)
    """
    if base_runs >= MIN_LEARNED:
        return list(judged)
    return [_not_known_to_scatter(one) if one.outcome is Outcome.BROKEN else one for one in judged]


def _not_known_to_scatter(one: Judged) -> Judged:
    return replace(one, outcome=Outcome.UNKNOWN, said=f"{one.said}; {SCATTER_UNKNOWN}")


def confirmed(first: Sequence[Judged], second: Sequence[Judged]) -> list[Judged]:
    """Combine the default gate's results of two consecutive new runs.

    A rule is broken if both break it, even in different layers. If one does, the result is unsure. If each breaks a
    different rule, it is unknown. Only the worst result of each rule and group of steps is kept, so that no rows
    contradict each other.
    """
    broken = [{(one.rule, one.brick) for one in run if one.outcome is Outcome.BROKEN} for run in (first, second)]
    both = broken[0] & broken[1]
    once = [one for one in first if one.outcome is Outcome.BROKEN and (one.rule, one.brick) not in broken[1]]
    outcome, said = Outcome.UNSURE, "only in one of two runs"
    if all(broken) and not both:
        outcome, said = Outcome.UNKNOWN, f"{said}, and each is slower in a different place"
    results = [
        replace(one, outcome=outcome, said=f"{one.said}; {said}")
        if one.outcome is Outcome.BROKEN and (one.rule, one.brick) not in both
        else one
        for one in (*second, *once)
    ]
    worst: dict[tuple[str, str], Outcome] = {}
    for one in results:
        worst[_rule_of(one)] = max(worst.get(_rule_of(one), one.outcome), one.outcome, key=_BY_WEIGHT.index)
    return [one for one in results if one.outcome is worst[_rule_of(one)]]


def _rule_of(one: Judged) -> tuple[str, str]:
    """Return (rule, group of steps) of a result of the default gate."""
    return one.rule, one.about.partition(": ")[0]


def unconfirmed(first: Sequence[Judged], why: str) -> list[Judged]:
    """Return the default gate's results after the second run failed for the reason `why`. Broken ones become
    unknown.
    """
    return [
        *(
            replace(one, outcome=Outcome.UNKNOWN, said=f"{one.said}; not confirmed by a second run")
            if one.outcome is Outcome.BROKEN
            else one
            for one in first
        ),
        Judged("confirmed by a second run", "", Outcome.UNKNOWN, f"the second run failed: {why}"),
    ]


def _is_slower_as_a_machine(found: RunDiff, part: PartDiff) -> bool:
    is_slower = part.slower or part.is_slower or part.is_typically_slower
    return found.base.runs == 1 and part.is_shared and bool(is_slower)


def _may_be_the_machine(found: RunDiff, rate: RateDiff) -> bool:
    """Return whether all groups of steps became slower because the machine is slower. Then the rate tells nothing
    new.
    """
    return bool(rate.parts) and all(_is_slower_as_a_machine(found, part) for part in rate.parts)


def _machine_is_no_slower(part: PartDiff) -> Judged:
    """Return a result with the common factor if all bricks became slower alike.

    The machine may be the cause. One baseline run does not tell how much its pace varies.
    """
    assert part.shared is not None
    outcome = Outcome.UNSURE if 100 * (part.shared - 1) <= BLIND_PERCENT else Outcome.UNKNOWN
    said = (
        f"every brick takes {part.shared:.2f} times as long: a different clock or load of the machine has the same "
        f"effect; record {MIN_LEARNED} or more runs of the baseline to learn how much that varies"
    )
    return Judged(f"{part.phase}: nothing slower beyond noise", part.name, outcome, said)


def _bricks_are_no_slower(part: PartDiff) -> list[Judged]:
    rule = f"{part.phase}: no brick slower beyond noise"
    # A brick that only the new run has cannot become slower. But it may explain most of a token's additional time.
    new = [one for one in part.new if part.is_slower and one.delta_us > part.wall.delta / 2]
    if slower := [*new, *part.guilty]:
        return [
            Judged(rule, about_place(part, one), Outcome.BROKEN, _told(part, one), one.name, brick=one.brick[0])
            for one in slower
            if one.brick
        ]
    if costly := _costly_new(part):
        names = ", ".join(one.name for one in costly)
        share = percent(100 * sum(one.delta_us for one in costly) / part.wall.now)
        said = f"new: {names}, {share} of the time; the typical {part.unit} is not longer beyond noise"
        return [Judged(rule, part.name, Outcome.UNKNOWN, said, names)]
    timed = [one for one in part.bricks if one.p50]
    findable = part.findable(part.bricks)
    if findable is None or (timed and all(one.is_below_resolution for one in timed)):
        return [Judged(rule, part.name, Outcome.UNKNOWN, "the clock is too coarse to time any brick")]
    said, outcome = f"none of {len(part.known)} bricks and layers is", Outcome.HOLDS
    if part.slower:
        said = f"every brick takes {number(part.shared)} times as long, and none more than that"
    if findable > BLIND_PERCENT:
        outcome = Outcome.UNSURE if findable <= MAX_BLIND_PERCENT else Outcome.UNKNOWN
        said += f"; but in most only a change of {percent(findable)} would have been found"
        said += "; stop other programs, and use longer runs"
    if unknown := _unknown_bricks(part):
        outcome = Outcome.UNKNOWN
        said += f"; too few base runs have enough calls of {', '.join(unknown)}"
    return [Judged(rule, part.name, outcome, said)]


def _costly_new(part: PartDiff) -> list[PlaceDiff]:
    """Return the new run's bricks that the baseline lacks, if they take much time and explain the additional time per
    token.

    A new brick in few steps does not make the typical step longer. A renamed or split brick adds no time.
    """
    gone_us = -sum(one.delta_us for one in part.bricks if one.verdict == "gone")
    new_us = sum(one.delta_us for one in part.new)
    is_costly = 100 * (new_us - gone_us) > BLIND_PERCENT * part.wall.now and part.wall.delta > new_us / 2
    return part.new if is_costly else []


def _unknown_bricks(part: PartDiff) -> list[str]:
    """Return the bricks of both runs that changed by an unknown amount. [] if they take little of the new run's
    time.
    """
    unknown = [one for one in part.bricks if one.before and one.now and one.now.call and one.change is None]
    percent_of_step = 100 * sum(one.now.time.mean for one in unknown if one.now) / part.wall.now
    return [one.name for one in unknown] if percent_of_step > BLIND_PERCENT else []


def _step_is_no_longer(part: PartDiff, typical: Change) -> Judged:
    """Judge the time of a typical step: with the time outside of bricks and before the step, but without pauses."""
    rule = f"{part.phase}: no longer step beyond noise"
    said = (
        f"{ratio_text(typical)}, {duration(typical.before)} → {duration(typical.now)} for a typical {part.unit}, "
        "with the time between steps"
    )
    if part.is_typically_slower:
        between_us = typical.delta - _more_in_step_us(part)
        return Judged(rule, part.name, Outcome.BROKEN, said, _cause(part, typical.delta, between_us))
    noise, findable = typical.noise_percent or inf, findable_percent(typical) or inf
    if noise > MAX_NOISE_PERCENT or (typical.percent or 0.0) > BLIND_PERCENT:
        return Judged(rule, part.name, Outcome.UNKNOWN, f"{said}; {_TOO_WIDE}")
    return Judged(rule, part.name, Outcome.UNSURE if findable > BLIND_PERCENT else Outcome.HOLDS, said)


def _more_in_step_us(part: PartDiff) -> float:
    """Return by how many µs per unit (token or step) a typical step is longer than before. The time of each run is
    divided by its own number of units.
    """
    call = part.step.call
    return call.now / part.now.units_a_step - call.before / part.before.units_a_step if call else 0.0


def _more_failed(part: PartDiff) -> Judged:
    """Return a result if a larger share of steps failed than in the baseline. Failed steps end early, so such a run
    would look fast.
    """
    now, before = part.now, part.before
    failed = f"{count(now.failed)} of {counted(now.steps, 'step')} failed"
    said = f"{failed}, {count(before.failed)} of {count(before.steps)} before; unfinished work takes no time"
    return Judged(f"{part.phase}: no more steps that fail", part.name, Outcome.UNKNOWN, said)


def _rate_is_no_lower(found: RunDiff, rate: RateDiff) -> Judged:
    """Judge the rate of a phase over the whole run's wall-clock time, with waits and steps of other phases."""
    rule = f"{rate.phase}: no fewer {rate.unit} beyond noise"
    at = f" at {count(rate.cached)} positions cached" if rate.cached is not None else ""
    change = rate.time_us
    said = f"{number(rate.before)} → {number(rate.now)} {rate.unit}, ± {number(change.half_percent)} %{at}"
    if rate.is_lower:
        return Judged(rule, rate.phase, Outcome.BROKEN, said, _cause_of_rate(rate))
    longer_percent = change.percent or 0.0
    is_far = longer_percent > FAR_PERCENT
    if rate.is_lower_in_the_mean:
        why = f"fewer than half became longer ({_cause_of_rate(rate)})"
        if rate.is_by_others:
            why = f"{_other_causes(found, rate)} took the time"
        said += f"; but the typical step is as long as before: {why}"
        return Judged(rule, rate.phase, Outcome.UNKNOWN if is_far else Outcome.UNSURE, said)
    # Pauses by other programs widen the interval of a rate on any machine. So a wide interval makes the result
    # `unknown` only if the typical step is unknown, too. It is always `unknown` if more time was lost than pauses can
    # explain.
    is_typical_known = any(part.typical is not None for part in rate.parts)
    if is_far or (not is_typical_known and (change.noise_percent or inf) > MAX_NOISE_PERCENT):
        return Judged(rule, rate.phase, Outcome.UNKNOWN, f"{said}; {_TOO_WIDE}")
    findable = findable_percent(change)
    is_blind = findable is None or findable > MAX_BLIND_PERCENT
    is_unsure = is_blind or longer_percent > change.least_percent
    if is_unsure:
        said += f"; {_TOO_WIDE}"
    return Judged(rule, rate.phase, Outcome.UNSURE if is_unsure else Outcome.HOLDS, said)


def _other_causes(found: RunDiff, rate: RateDiff) -> str:
    """Return causes of a lower rate other than the phase's typical steps, such as the time of other phases."""
    phases = [one.phase for one in found.now.parts] + [one.phase for one in found.now.too_short]
    warm_up = sum(one.warm_up for one in found.now.parts if one.phase == rate.phase)
    causes = ["other phases"] if set(phases) - {rate.phase} else []
    causes += ["another mix of batches"] if phases.count(rate.phase) > 1 else []
    causes += [f"the {counted(warm_up, 'step')} left out as warm-up"] if warm_up else []
    return " or ".join(causes) or "waits outside the compared steps"


def _cause_of_rate(rate: RateDiff) -> str:
    """Return the main cause of a lower rate: a change in the group of steps with most of the additional time."""
    worst = max(rate.parts, key=lambda part: part.wall.delta * part.now.amount)
    balance = worst.balance
    cause = _cause(worst, worst.wall.delta, balance.between_steps[1] - balance.between_steps[0])
    return cause if len(rate.parts) == 1 else f"{worst.name}: {cause}"


def _not_compared(found: RunDiff, phase: str) -> str:
    for short in short_steps(found.now, phase):
        return f"too few steps in the new run: {short.text}"
    reasons = [note for note in found.notes if note.startswith(f"{phase}: ")]
    has_it = any(part.phase == phase for part in found.now.parts)
    return reasons[0] if reasons else "no batch is in both runs" if has_it else "the new run has no such steps"


def _cause(part: PartDiff, more_us: float, between_steps_us: float) -> str:
    """Return the main cause of a slowdown by `more_us` µs per unit (token or step). `between_steps_us` of it are
    between steps.
    """
    balance = part.balance
    grown = {
        **{one.name: one.delta_us for one in [*part.slower, *part.new]},
        "between steps": between_steps_us,
        "between bricks": balance.between_bricks[1] - balance.between_bricks[0],
        "steps not recorded inside": balance.not_recorded[1] - balance.not_recorded[0],
    }
    worst = max(grown, key=lambda name: grown[name])
    if grown[worst] > more_us / 2:
        return worst
    bricks = [one for one in part.bricks if one.brick != BETWEEN_BRICKS]
    return f"no single brick; most {max(bricks, key=lambda one: one.delta_us).name}" if bricks else worst


def _told(part: PartDiff, place: PlaceDiff) -> str:
    """Return a text with the change that decides the verdict on a slower brick or layer, and other figures that
    grew.
    """
    if place.decisive is None:
        return f"new: {place.delta_us:+.1f} µs/{part.unit}"
    said = ratio_text(place.decisive)
    said += " relative to all others" if place.decisive is not place.change else ""
    said += f", {place.calls.text}" if place.calls and place.calls.text else ""
    said += calls_text(place, "p50") if place.p50 and place.p50.delta > 0 else ""
    return f"{said}, {place.delta_us:+.1f} µs/{part.unit}" if place.delta_us > 0 else said
