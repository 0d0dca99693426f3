"""Thresholds on a run, absolute or relative to its baseline, such as `attn.p50<=1.05x`, and their derived results."""

# Grammar
#     threshold = [PHASE "."] WHAT ["@" LAYER] ["." FIGURE] OPERATOR NUMBER [UNIT]
#     WHAT      = a brick, a category (attn, ffn, norm), step, tokens_per_sec, samples_per_sec, unattributed or loss;
#                 of training steps also a part, such as backward
#     LAYER     = only after a brick or category
#     FIGURE    = p50 (of a call; the default), p99, or per_token (µs per token or step)
#     UNIT      = x (times the baseline), %, ns, us, µs, ms or s
# Rules
# - A threshold is broken if the whole interval of the measurement is beyond the threshold. It holds if no part of the
#   interval is beyond it. Otherwise the result is `unsure` and breaks nothing.
# - The interval is widened by the clock's resolution.
# - A threshold that cannot be judged does not pass. The reason is reported.

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from math import inf

from cbtop.comparison.items import BETWEEN_BRICKS, Brick
from cbtop.comparison.noise import Change, half_of
from cbtop.comparison.part_diff import PartDiff, PlaceDiff, findable_percent
from cbtop.comparison.run_diff import RunDiff
from cbtop.comparison.runs import MIN_LEARNED
from cbtop.comparison.training_measures import (
    ONLY_P50,
    Measure,
    bare_name,
    part_p50,
    samples_per_sec,
    training_part,
)
from cbtop.errors import UsageError
from cbtop.protocol.vocabulary import BACKWARD, RECOMPUTE, BrickCategory
from cbtop.units import count, counted, duration, number, percent

FIGURES = ("p50", "p99", "per_token")
RATE, UNATTRIBUTED, LOSS, STEP = "tokens_per_sec", "unattributed", "loss", "step"
SAMPLES = "samples_per_sec"
BLIND_PERCENT = 10.0  # percent; if no smaller change of the median brick can be found, the gate is unsure
MAX_BLIND_PERCENT = 50.0  # percent; if only larger changes can be found, the result is unknown
MAX_NOISE_PERCENT = 100.0  # percent; with more noise, even a step that takes twice as long breaks no threshold
FAR_PERCENT = 25.0  # percent; on a usable machine, pauses by other programs lengthen a unit by less than this
READINGS_OFF = 2  # two clock readings per call, each off by up to the clock's resolution
_TOO_WIDE = (
    "the interval is too wide to tell whether this is a change; use more or longer runs (--learn 6), "
    "or a threshold of your own, such as step.p50<=1.05x"
)
_REACHES_ZERO = "the interval reaches zero, so nothing could break it; use more or longer runs"
SCATTER_UNKNOWN = (
    f"one run of the baseline does not show how runs vary; record {MIN_LEARNED} or more, as with --learn 6"
)
_NO_TOKENS = "not every step reports its tokens"
_UNITS = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "μs": 1.0, "ms": 1e3, "s": 1e6}
_CATEGORIES = {"attn": BrickCategory.ATTENTION, "mlp": BrickCategory.FFN} | {
    category.display_name.casefold(): category for category in BrickCategory
}
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM = re.compile(
    r"\s*(?P<what>[^<>=]+?)\s*(?P<sign><=|>=|==|<|>)\s*(?P<value>[0-9.eE+-]+)\s*(?P<unit>x|%|[nuµμm]?s)?\s*"
)
EXAMPLE = "attn.p50<=1.05x, RmsNorm.p99<=12us, decode.tokens_per_sec>=40, unattributed<=1%, loss==0"
MAX_CHARS = 200


class Outcome(StrEnum):
    """The result of a threshold."""

    HOLDS = "holds"
    UNSURE = "unsure"  # the threshold is within the interval of the measurement
    BROKEN = "broken"
    UNKNOWN = "unknown"  # the threshold cannot be judged


@dataclass(frozen=True, slots=True)
class Threshold:
    """A parsed threshold. `value` is in µs, in %, a multiple of the baseline (`is_relative`), or a bare number."""

    text: str
    names: tuple[str, ...]  # PHASE and WHAT, split at dots
    layer: str | None
    figure: str
    sign: str
    value: float
    unit: str
    where: tuple[str, int] = ("", 1)  # file and line of the threshold

    @property
    def is_relative(self) -> bool:
        return self.unit == "x"


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of a threshold, or of the default gate, for one place of one part."""

    rule: str
    about: str  # for example `decode: RmsNorm in Layer 5`
    outcome: Outcome
    said: str  # the measured and the required values as text
    guilty: str = ""  # the brick and layer that break the threshold
    where: tuple[str, int] = ("", 1)
    brick: str = ""  # in a default gate: the brick that breaks the rule, in any layer


def parse(text: str, where: tuple[str, int] = ("", 1)) -> Threshold:
    """Parse `text`. Raises UsageError with the wrong part, the expected form, and examples."""
    shown = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"
    found = _FORM.fullmatch(text) if len(text) <= MAX_CHARS else None
    if found is None:
        sign = next((one for one in ("<=", ">=", "==", "<", ">") if one in text), None)
        wrong = "it has no <=, >= or =="
        if sign:
            wrong = f"{text.partition(sign)[2].strip()!r} is not a number with a unit (x, %, ns, us, ms, s or none)"
        raise UsageError(f"threshold {shown!r}: {wrong}; write it like {EXAMPLE}")
    try:
        value = float(found["value"])
    except ValueError:
        raise UsageError(f"threshold {shown!r}: {found['value']!r} is not a number; write it as 1.05 or 12") from None
    if not 0 <= value < inf:
        raise UsageError(f"threshold {shown!r}: expected a number of 0 or more")
    named, _, layer = found["what"].partition("@")
    names = named.split(".")
    if "." in layer:
        layer, _, figure = layer.rpartition(".")
        names.append(figure)
    figure = names.pop() if names[-1] in FIGURES else ""
    sign, unit = found["sign"], found["unit"] or ""
    names = [name.strip() for name in names]
    if not names or not all(names):
        raise UsageError(f"threshold {shown!r}: the name of a brick or figure is missing; write it like {EXAMPLE}")
    layer = layer.strip()
    _check(shown, names, layer, figure, sign, value, unit)
    us = value * _UNITS[unit] if unit in _UNITS else value
    # The text must be on one line, because annotations and logs are read line by line.
    return Threshold(" ".join(text.split()), tuple(names), layer or None, figure or FIGURES[0], sign, us, unit, where)


def judge(threshold: Threshold, found: RunDiff) -> list[Judged]:
    """Return the result of a threshold for each place that it applies to. Raises UsageError without such a place."""
    name = threshold.names[-1]
    if _is_of_records(threshold.names, threshold.unit):
        lost = found.now.lost_percent
        return [_judged(threshold, "records", lost, 0.0, threshold.value, f"{number(lost)} % were lost")]
    # An absolute threshold also judges parts in the new run only.
    known = parts = found.parts if threshold.is_relative else found.parts + found.alone
    phase = ".".join(threshold.names[:-1])
    if phase:
        parts = tuple(part for part in known if part.phase == phase)
        if not parts and bare_name(phase) in {bare_name(one.name) for part in known for one in part.bricks}:
            raise UsageError(
                f"threshold {threshold.text!r}: {name!r} is not a figure of {phase}; there are {', '.join(FIGURES)}"
            )
        if not parts:
            raise _no_such(threshold, "phase", phase, list(dict.fromkeys(part.phase for part in known)))
    if name == RATE:
        counted = {part.phase for part in parts if part.unit == "token"}
        parts = tuple(part for part in parts if part.phase in counted) or parts
    judged = _in_parts(threshold, parts, found)
    if threshold.is_relative:
        alone = [one for one in _not_in_baseline(found, threshold.text) if phase in ("", one.about)]
        judged += [replace(one, where=threshold.where) for one in alone]
    return judged


def _in_parts(threshold: Threshold, parts: Sequence[PartDiff], found: RunDiff) -> list[Judged]:
    """Return the result in each part that has the named place. Raises UsageError if no part has it."""
    judged, lacks = [], []
    for part in parts:
        try:
            judged += list(_in_part(threshold, part, found))
        except UsageError as error:
            lacks.append(error)
    if not judged:
        raise lacks[0]
    return judged


def _not_in_baseline(found: RunDiff, rule: str = "") -> list[Judged]:
    """Return results for parts that only the new run has, if they take much of the new run's time."""
    if found.alone_percent <= BLIND_PERCENT:
        return []
    said = f"and what it alone has takes {percent(found.alone_percent)} of its time"
    what = [(part.phase, f"only the new run has {part.work}") for part in found.alone]
    what += [
        (one.phase, f"too few {one.phase} steps to be compared, {one.steps} of {one.needed} needed")
        for one in found.alone_short
    ]
    return [
        Judged(rule or f"{phase}: is compared", phase, Outcome.UNKNOWN, f"{text}, {said}") for phase, text in what
    ]


def of_definitions(found: RunDiff) -> list[Judged]:
    """Return whether bricks keep the budgets of their definitions, in µs per token."""
    judged = []
    for part in found.parts + found.alone:
        for one in part.bricks:
            if one.brick and one.now and (budget_us := part.now.budgets.get(one.brick)) is not None:
                text = f"{one.brick[0]}.per_token<={budget_us:g}us, its budget"
                if part.unit != "token":
                    judged.append(Judged(text, _about(part, one), Outcome.UNKNOWN, _NO_TOKENS))
                    continue
                threshold = Threshold(text, (one.brick[0],), None, "per_token", "<=", budget_us, "us")
                judged.append(_of_place(threshold, part, one, found))
    return judged


def of_contracts(found: RunDiff, bounds: Mapping[Brick, tuple[float, tuple[str, int]]]) -> list[Judged]:
    """Return whether the calls of each brick keep their limit, a factor over the baseline.

    `bounds` has the limit of each brick, with the file and line that set it.
    """
    judged = []
    for part in found.parts:
        for one in part.bricks:
            if one.brick and one.brick in bounds:
                limit, where = bounds[one.brick]
                text = f"{one.brick[0]}<={limit:g}x, by contract"
                threshold = Threshold(text, (one.brick[0],), None, FIGURES[0], "<=", limit, "x", where)
                judged.append(_of_place(threshold, part, one, found))
    return judged


def default_gate(found: RunDiff) -> list[Judged]:
    """Return whether a brick, a typical step or the rate of units became slower than the baseline beyond noise.

    The typical step includes the time before it. If the data could not show a change, the result says so.
    """
    judged = []
    for part in found.parts:
        if part.more_failed_percent > part.wall.least_percent:
            judged.append(_more_failed(part))
        is_slower = part.slower or part.is_slower or part.is_typically_slower
        if found.base.runs == 1 and part.is_shared and is_slower:
            judged.append(_machine_is_no_slower(part))
            continue
        judged += _bricks_are_no_slower(part)
        if part.typical is not None:
            judged.append(_step_is_no_longer(part, part.typical))
        judged.append(_units_are_no_fewer(part))
    judged += [
        Judged(f"{phase}: is compared", phase, Outcome.UNKNOWN, _not_compared(found, phase))
        for phase in found.not_judged
    ]
    return judged + _not_in_baseline(found)


def known_to_scatter(judged: Sequence[Judged], base_runs: int) -> list[Judged]:
    """Return the default gate's results. With fewer than MIN_LEARNED runs in the baseline, nothing is broken.

    The scatter between runs is unknown then, so slower places are reported as `unknown`. (On a busy machine a third
    of identical runs were slower, see docs/gate.md.)
    """
    if base_runs >= MIN_LEARNED:
        return list(judged)
    return [
        replace(one, outcome=Outcome.UNKNOWN, said=f"{one.said}; {SCATTER_UNKNOWN}")
        if one.outcome is Outcome.BROKEN
        else one
        for one in judged
    ]


def confirmed(first: Sequence[Judged], second: Sequence[Judged]) -> list[Judged]:
    """Combine the default gate's results of two consecutive new runs.

    A rule is broken if both runs break it, even in different layers. If only one run breaks a rule, the rule is
    unsure. If each run breaks a different rule, the result is unknown.
    """
    broken = [{(one.rule, one.brick) for one in run if one.outcome is Outcome.BROKEN} for run in (first, second)]
    both = broken[0] & broken[1]
    once = [one for one in first if one.outcome is Outcome.BROKEN and (one.rule, one.brick) not in broken[1]]
    outcome, said = Outcome.UNSURE, "only in one of two runs"
    if all(broken) and not both:
        outcome, said = Outcome.UNKNOWN, f"{said}, and each is slower in a different place"
    return [
        replace(one, outcome=outcome, said=f"{one.said}; {said}")
        if one.outcome is Outcome.BROKEN and (one.rule, one.brick) not in both
        else one
        for one in (*second, *once)
    ]


def _machine_is_no_slower(part: PartDiff) -> Judged:
    """Return a result for a change common to all bricks. The machine may be the cause.

    One baseline run does not show how much the machine's pace varies.
    """
    assert part.shared is not None
    outcome = Outcome.UNSURE if 100 * (part.shared - 1) <= BLIND_PERCENT else Outcome.UNKNOWN
    said = (
        f"every brick takes {part.shared:.2f} times as long: a different clock or load of the machine has the same "
        f"effect; record {MIN_LEARNED} or more runs of the baseline to learn how much that varies"
    )
    return Judged(f"{part.phase}: nothing slower beyond noise", part.phase, outcome, said)


def _bricks_are_no_slower(part: PartDiff) -> list[Judged]:
    rule = f"{part.phase}: no brick slower beyond noise"
    # A new brick is not slower. But the new brick is guilty if a token takes longer, mostly because of the new brick.
    new = [one for one in part.new if part.is_slower and one.delta_us > part.wall.delta / 2]
    if slower := [*new, *part.guilty]:
        return [
            Judged(rule, _about(part, one), Outcome.BROKEN, _told(part, one), one.name, brick=one.brick[0])
            for one in slower
            if one.brick
        ]
    timed = [one for one in part.bricks if one.p50]
    findable = part.findable(part.bricks)
    if findable is None or (timed and all(one.is_below_resolution for one in timed)):
        return [Judged(rule, part.phase, Outcome.UNKNOWN, "the clock is too coarse to time any brick")]
    said, outcome = f"none of {len(part.known)} bricks and layers is", Outcome.HOLDS
    if part.slower:
        said = f"every brick takes {number(part.shared)} times as long, and none more than that"
    if findable > BLIND_PERCENT:
        outcome = Outcome.UNSURE if findable <= MAX_BLIND_PERCENT else Outcome.UNKNOWN
        said += f"; but in most only a change of {percent(findable)} would have been found"
        said += "; stop other programs, and use longer runs"
    return [Judged(rule, part.phase, outcome, said)]


def _step_is_no_longer(part: PartDiff, typical: Change) -> Judged:
    """Judge the typical step, including time outside bricks and the time before the step, but without pauses."""
    rule = f"{part.phase}: no longer step beyond noise"
    said = (
        f"{_ratio(typical)}, {duration(typical.before)} → {duration(typical.now)} for a typical {part.unit}, with "
        "the time between steps"
    )
    if part.is_typically_slower:
        between_us = typical.delta - (part.step.change.delta if part.step.change else 0.0)
        return Judged(rule, part.phase, Outcome.BROKEN, said, _cause(part, typical.delta, between_us))
    noise, findable = typical.noise_percent or inf, findable_percent(typical) or inf
    if noise > MAX_NOISE_PERCENT or (typical.percent or 0.0) > BLIND_PERCENT:
        return Judged(rule, part.phase, Outcome.UNKNOWN, f"{said}; {_TOO_WIDE}")
    return Judged(rule, part.phase, Outcome.UNSURE if findable > BLIND_PERCENT else Outcome.HOLDS, said)


def _more_failed(part: PartDiff) -> Judged:
    """Return a result for an increase of failed steps. Failing saves time, so a run with failed steps seems fast."""
    now, before = part.now, part.before
    failed = f"{count(now.failed)} of {counted(now.steps, 'step')} failed"
    said = f"{failed}, {count(before.failed)} of {count(before.steps)} before; unfinished work takes no time"
    return Judged(f"{part.phase}: no more steps that fail", part.phase, Outcome.UNKNOWN, said)


def _units_are_no_fewer(part: PartDiff) -> Judged:
    rule = f"{part.phase}: no fewer {part.unit}s/s beyond noise"
    before, now = part.units_per_sec
    said = f"{number(before)} → {number(now)} {part.unit}s/s, ± {number(part.wall.half_percent)} %"
    between_us = part.balance.between_steps[1] - part.balance.between_steps[0]
    if part.is_slower:
        return Judged(rule, part.phase, Outcome.BROKEN, said, _cause(part, part.wall.delta, between_us))
    longer_percent = part.wall.percent or 0.0
    is_far = longer_percent > FAR_PERCENT
    if part.is_longer_in_the_mean:
        cause = _cause(part, part.wall.delta, between_us)
        said += f"; but the typical step is as long as before: fewer than half became longer ({cause})"
        return Judged(rule, part.phase, Outcome.UNKNOWN if is_far else Outcome.UNSURE, said)
    # Pauses by other programs make this interval wide on any machine. So the result is only `unknown` if more time is
    # lost than pauses explain, or if the typical step is unknown, too.
    if is_far or (part.typical is None and (part.wall.noise_percent or inf) > MAX_NOISE_PERCENT):
        return Judged(rule, part.phase, Outcome.UNKNOWN, f"{said}; {_TOO_WIDE}")
    findable = findable_percent(part.wall)
    is_blind = findable is None or findable > MAX_BLIND_PERCENT
    is_unsure = is_blind or longer_percent > part.wall.least_percent
    return Judged(rule, part.phase, Outcome.UNSURE if is_unsure else Outcome.HOLDS, said)


def _not_compared(found: RunDiff, phase: str) -> str:
    short = next((one for one in found.now.too_short if one.phase == phase), None)
    if short is not None:
        return f"too few steps in the new run: {short.steps} of {short.needed}"
    reasons = [note for note in found.notes if note.startswith(f"{phase}: ")]
    has_it = any(part.phase == phase for part in found.now.parts)
    return reasons[0] if reasons else "no batch is in both runs" if has_it else "the new run has no such steps"


def _in_part(threshold: Threshold, part: PartDiff, found: RunDiff) -> Iterator[Judged]:
    name, limit = threshold.names[-1], threshold.value
    if name == RATE:
        before, now = part.units_per_sec
        if part.unit != "token" and not threshold.is_relative:
            yield Judged(threshold.text, part.phase, Outcome.UNKNOWN, _NO_TOKENS, where=threshold.where)
            return
        half = (part.wall.half / part.wall.before) * (now / before if threshold.is_relative else now)
        if threshold.is_relative:
            said = f"{number(now / before)}× ± {number(half)} ({number(before)} → {number(now)} {part.unit}s/s)"
            yield _judged(threshold, part.phase, now / before, half, limit, said)
        else:
            half = half_of(part.now.wall_us) / part.now.wall_us.mean * now
            yield _judged(threshold, part.phase, now, half, limit, f"{number(now)} ± {number(half)} {part.unit}s/s")
        return
    if name == SAMPLES:
        yield _of_measure(threshold, part, samples_per_sec(part, is_relative=threshold.is_relative))
        return
    if (training := training_part(part, name)) is not None:
        is_p50 = threshold.figure == FIGURES[0] and threshold.layer is None
        measure = (
            part_p50(part, training, is_relative=threshold.is_relative) if is_p50 else Measure(training, ONLY_P50)
        )
        yield _of_measure(threshold, part, measure)
        return
    if name == UNATTRIBUTED:
        # Time between the bricks of a layer counts as time of the layer. All other time between bricks is
        # unattributed.
        known, whole = part.now.places, part.now.inside_us.mean
        named = sum(one.time.mean for (brick, layer), one in known.items() if brick == BETWEEN_BRICKS and layer)
        between = known[BETWEEN_BRICKS, None].time
        share, half = 100 * (between.mean - named) / whole, 100 * half_of(between) / whole
        yield _judged(threshold, part.phase, share, half, limit, f"{number(share)} ± {number(half)} % of a step")
        return
    places = [part.step] if name == STEP else _places(threshold, part)
    for place in places:
        yield _of_place(threshold, part, place, found)


def _of_measure(threshold: Threshold, part: PartDiff, found: Measure) -> Judged:
    """Judge a value of training steps, or return why it is not known."""
    about = f"{part.phase}: {found.name}" if found.name else part.phase
    if found.why_not:
        return Judged(threshold.text, about, Outcome.UNKNOWN, found.why_not, where=threshold.where)
    return _judged(threshold, about, found.value, found.half, threshold.value, found.said, found.name)


def _of_place(threshold: Threshold, part: PartDiff, place: PlaceDiff, found: RunDiff) -> Judged:
    about = _about(part, place)
    side, limit = place.now, threshold.value
    figure = (
        None if side is None else side.time if threshold.figure == "per_token" else getattr(side, threshold.figure)
    )
    if place.brick and side is None:
        return Judged(threshold.text, about, Outcome.UNKNOWN, "the new run does not have it", where=threshold.where)
    if figure is None:
        why = "there are too few calls"
        return Judged(threshold.text, about, Outcome.UNKNOWN, why, where=threshold.where)
    resolution_us = max(run.clock_resolution_us or 0.0 for run in (found.base, found.now))
    off_us = 0.0 if threshold.figure == "per_token" else READINGS_OFF * resolution_us
    if threshold.is_relative:
        one = _change_of(threshold, place)
        if one is None or one.before <= 0:
            why = "it is new: the baseline lacks it" if place.before is None else "the baseline has too few calls"
            return Judged(threshold.text, about, Outcome.UNKNOWN, why, where=threshold.where)
        half = one.half / one.before + (off_us / place.p50.before if place.p50 and place.p50.before else 0.0)
        said = f"{number(one.now / one.before)}× ± {number(half)}"
        said += _calls(place, threshold.figure)
        return _judged(threshold, about, one.now / one.before, half, limit, said, _guilty(part, place))
    half = half_of(figure) + off_us
    said = f"{duration(figure.mean)} ± {duration(half)}"
    return _judged(threshold, about, figure.mean, half, limit, said, _guilty(part, place))


def _judged(
    threshold: Threshold, about: str, value: float, half: float, limit: float, said: str, guilty: str = ""
) -> Judged:
    holds = _OPERATORS[threshold.sign]
    least, most = value - half, value + half
    if holds(least, limit) and holds(most, limit):
        outcome = Outcome.HOLDS
    elif threshold.sign in ("<", "<=") and least <= 0 and holds(least, limit):
        outcome, said = Outcome.UNKNOWN, f"{said}; {_REACHES_ZERO}"
    elif holds(least, limit) or holds(most, limit):
        outcome = Outcome.UNSURE
    else:
        outcome = Outcome.BROKEN
    return Judged(threshold.text, about, outcome, said, guilty if outcome is Outcome.BROKEN else "", threshold.where)


def _change_of(threshold: Threshold, place: PlaceDiff) -> Change | None:
    if threshold.figure == "p99":
        return place.p99
    if threshold.figure == "per_token":
        return place.mean
    # Over several layers, a place's typical time is steadier than its median. In one layer, they are equal.
    return place.change if place.p50 and place.change is not place.mean else place.p50


def _calls(place: PlaceDiff, figure: str) -> str:
    one = {"p50": place.p50, "p99": place.p99}.get(figure)
    return f" ({figure} {duration(one.before)} → {duration(one.now)})" if one else ""


def _guilty(part: PartDiff, place: PlaceDiff) -> str:
    """Return the name of the place. For a brick over all layers, add the layer with the largest growth."""
    if place.layer is not None:
        return place.name
    cells = [one for one in part.cells if one.brick == place.brick and one.verdict == "slower"]
    grown = {one.layer: one.change.delta for one in cells if one.change}
    return f"{place.name}, most in {max(grown, key=lambda layer: grown[layer])}" if grown else place.name


def _cause(part: PartDiff, more_us: float, between_steps_us: float) -> str:
    """Return the name of the main cause of `more_us` additional µs per unit.

    `between_steps_us` of the additional time is between steps.
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
    if place.change is None:
        return f"new: {place.delta_us:+.1f} µs/{part.unit}"
    own = place.change.own if place.change.is_told_by_others else None
    beside = f", {_ratio(own)} beside all others" if own else ""
    cost = f"{place.delta_us:+.1f} µs/{part.unit}{place.moved_by}"
    return f"{_ratio(place.change)}{beside}{_calls(place, 'p50')}, {cost}"


def _ratio(one: Change) -> str:
    return f"{one.now / one.before:.3f}× ± {one.half / one.before:.3f}"


def _about(part: PartDiff, place: PlaceDiff) -> str:
    return f"{part.phase}: {place.name}"


def _places(threshold: Threshold, part: PartDiff) -> list[PlaceDiff]:
    """Return the places that a threshold names. Raises UsageError if it names no existing place."""
    wanted = bare_name(threshold.names[-1])
    bricks = {one.brick for one in part.bricks if one.brick}
    named = {brick for brick in bricks if bare_name(brick[0]) == wanted}
    category = _CATEGORIES.get(threshold.names[-1].casefold())
    if not named and category is not None:
        named = {brick for brick in bricks if brick[1] is category and brick != BETWEEN_BRICKS}
    if not named:
        named = {brick for brick in bricks if bare_name(brick[0]).startswith(wanted)}
    if not named:
        parts = [f"{part.phase}.{name}" for name in part.now.training]
        raise _no_such(threshold, "brick", threshold.names[-1], [*sorted(name for name, _ in bricks), *parts])
    if threshold.layer is None:
        return [one for one in part.bricks if one.brick in named]
    layers = sorted({one.layer for one in part.cells if one.layer and one.brick in named})
    is_backward = all([brick[0].endswith((BACKWARD, RECOMPUTE)) for brick in named])
    names = [bare_name(threshold.layer), f"layer{bare_name(threshold.layer)}"]
    names += [f"{name}{BACKWARD.strip()}" for name in names] if is_backward else []
    found = [one for one in layers if bare_name(one) in names]
    if not found:
        raise _no_such(threshold, "layer", threshold.layer, layers)
    return [one for one in part.cells if one.brick in named and one.layer == found[0]]


def _no_such(threshold: Threshold, what: str, name: str, known: Sequence[str]) -> UsageError:
    nearest = next(iter(get_close_matches(name, known)), "")
    hint = f"did you mean {nearest}? " if nearest else ""
    there = ", ".join(dict.fromkeys(known)) or "none"
    return UsageError(f"threshold {threshold.text!r}: there is no {what} {name!r}; {hint}there are {there}")


def _is_of_records(names: Sequence[str], unit: str) -> bool:
    """Whether a threshold is about lost records. `train.loss<=2ms` is about the loss of a training step."""
    return names[-1] == LOSS and (len(names) == 1 or unit not in ("x", *_UNITS))


def _check(text: str, names: Sequence[str], layer: str, figure: str, sign: str, value: float, unit: str) -> None:
    """Raise UsageError if unit, sign, layer and figure do not fit together."""
    name, is_loss, wrong = names[-1], _is_of_records(names, unit), ""
    if is_loss and (unit not in ("", "%") or figure or (value and not unit)):
        wrong = "loss is a share of the records: write loss==0 or loss<=0.1%"
    elif name == UNATTRIBUTED and (unit != "%" or figure):
        wrong = "unattributed is a share of a step: write unattributed<=1%"
    elif name in (RATE, SAMPLES) and (unit not in ("", "x") or figure):
        wrong = f"{name} is a number or a multiple of the baseline: write {name}>=40 or {name}>=0.97x"
    elif not is_loss and name not in (UNATTRIBUTED, RATE, SAMPLES) and unit not in ("x", *_UNITS):
        wrong = f"expected a time or a multiple of the baseline: write {name}.p50<=12us or {name}.p50<=1.05x"
    elif layer and (is_loss or name in (UNATTRIBUTED, RATE, SAMPLES, STEP)):
        wrong = f"{name} covers all layers: omit @{layer}"
    elif sign == "==" and not is_loss:
        wrong = "measured values cannot be compared with ==; use <= or >="
    if wrong:
        raise UsageError(f"threshold {text!r}: {wrong}")
