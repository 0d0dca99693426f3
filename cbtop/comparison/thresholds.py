"""Judge the thresholds on a run's times and rates. All figures are derived from records."""

# Rules
# - A threshold is broken if the whole interval of the measurement is beyond the limit, and holds if all of it is
#   within. Otherwise it is `unsure`.
# - A threshold on several bricks, layers and batches has wider intervals, so that chance breaks it as rarely as one
#   on a single figure.
# - Intervals are widened by the clock's resolution.
# - A threshold that cannot be judged does not pass. The reason is reported.

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

from cbtop.comparison.batches import batches_text, has_batch, key_of
from cbtop.comparison.items import BETWEEN_BRICKS, Brick, PlaceTimes
from cbtop.comparison.judged import Judged, Outcome, about_place, calls_text
from cbtop.comparison.left_out import left_out_of_threshold
from cbtop.comparison.noise import Change, half_of
from cbtop.comparison.part_diff import PartDiff, PlaceDiff
from cbtop.comparison.quantiles import MIN_BEYOND
from cbtop.comparison.rate_measures import NO_TOKENS, batch_measure, phase_measure, shown_rates
from cbtop.comparison.run_diff import RunDiff
from cbtop.comparison.threshold_grammar import (
    FIGURES,
    MEMORIES,
    RATES,
    STEP,
    UNATTRIBUTED,
    Threshold,
    is_of_records,
)
from cbtop.comparison.training_measures import (
    ONLY_P50,
    Measure,
    bare_name,
    memory_peak,
    part_p50,
    phases_with_memory,
    training_part,
)
from cbtop.errors import UsageError
from cbtop.protocol.vocabulary import BACKWARD, RECOMPUTE, BrickCategory
from cbtop.units import duration, number

# A call's time is the difference of this many clock readings, and each may be off by the clock's resolution.
READINGS_OFF = 2
_NOT_BEFORE = "the baseline has too few steps of this batch"
_REACHES_ZERO = "the interval reaches zero, so nothing could break it; use more or longer runs"
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


def judge(threshold: Threshold, found: RunDiff) -> list[Judged]:
    """Return a result for each brick, layer or step of a threshold. Raises UsageError without any."""
    threshold = _of_step(threshold, found)
    name = threshold.names[-1]
    if is_of_records(threshold.names, threshold.unit):
        lost = found.now.lost_percent
        return [_judged(threshold, "records", (lost, lost), threshold.value, f"{number(lost)} % were lost")]
    phase = ".".join(threshold.names[:-1])
    if name in MEMORIES:
        return _of_memory(threshold, phase, found)
    # If a threshold needs no baseline, it also covers steps that only the new run has.
    known = found.parts if threshold.is_relative else found.parts + found.alone
    if name in RATES and threshold.batch is None:
        judged = [_of_phase(threshold, phase, found)]
    elif threshold.is_relative and (part := _only_new(threshold, phase, found)):
        why = found.why_apart.get(key_of(part.now), _NOT_BEFORE)
        judged = [Judged(threshold.text, part.name, Outcome.UNKNOWN, why, where=threshold.where)]
    else:
        judged = _in_parts(threshold, _named_parts(threshold, phase, known), found)
    return judged + left_out_of_threshold(threshold, phase, found)


def _of_step(threshold: Threshold, found: RunDiff) -> Threshold:
    """Rewrite a threshold such as `decode.p50<=1.05x` as one on the step of the phase `decode`, unless a brick has
    this name.
    """
    name, parts = threshold.names[-1], found.parts + found.alone
    if threshold.layer or ".".join(threshold.names) not in {part.phase for part in parts}:
        return threshold
    bricks = {bare_name(one.brick[0]) for part in parts for one in part.bricks if one.brick}
    if bare_name(name) in bricks or name.casefold() in _CATEGORIES:
        return threshold
    if any(training_part(part, name) is not None for part in parts):
        return threshold
    return replace(threshold, names=(*threshold.names, STEP))


def _only_new(threshold: Threshold, phase: str, found: RunDiff) -> PartDiff | None:
    """Return the group of steps with the threshold's batch if only the new run has enough of them, else None."""
    parts = [part for part in found.parts + found.alone if part.phase == phase]
    of_batch = [part for part in parts if threshold.batch is not None and has_batch(part.now, threshold.batch)]
    return of_batch[0] if of_batch and not any(part in found.parts for part in of_batch) else None


def _named_parts(threshold: Threshold, phase: str, known: Sequence[PartDiff]) -> Sequence[PartDiff]:
    """Return the groups of steps with a threshold's phase and batch. Raises UsageError without any."""
    parts = [part for part in known if phase in ("", part.phase)]
    if not parts and bare_name(phase) in {bare_name(one.name) for part in known for one in part.bricks}:
        name = threshold.names[-1]
        raise UsageError(
            f"threshold {threshold.text!r}: {name!r} is not a figure of {phase}; there are {', '.join(FIGURES)}"
        )
    if not parts:
        raise _no_such(threshold, "phase", phase, list(dict.fromkeys(part.phase for part in known)))
    if threshold.batch is None:
        return parts
    found = [part for part in parts if has_batch(part.now, threshold.batch)]
    if not found:
        there = batches_text(part.now for part in parts)
        raise UsageError(
            f"threshold {threshold.text!r}: there is no batch {threshold.batch} in {phase}; there are {there}"
        )
    return found


def _of_phase(threshold: Threshold, phase: str, found: RunDiff) -> Judged:
    """Judge a rate of a whole phase. Raises UsageError if the new run lacks the phase."""
    rates = shown_rates(found.now, phase)
    if rates is None and found.now.rates:
        raise _no_such(threshold, "phase", phase, [one.phase for one in found.now.rates])
    measure = phase_measure(found, threshold.names[-1], phase, is_relative=threshold.is_relative)
    return _of_measure(threshold, phase if rates is None else rates.phase, measure)


def _of_memory(threshold: Threshold, phase: str, found: RunDiff) -> list[Judged]:
    """Judge the peak memory of the training steps of each phase. Raises UsageError if the new run does not train."""
    base, now = found.base, found.now
    steps = [part.phase for part in now.parts] + [part.phase for part in now.too_short]
    phases = phases_with_memory(now.memory, steps)
    chosen = [one for one in phases if phase in ("", one)]
    if not chosen:
        raise _no_such(threshold, "phase with training steps", phase, phases)
    name, is_relative = threshold.names[-1], threshold.is_relative
    measures = [memory_peak(base.memory, now.memory, one, name, is_relative=is_relative) for one in chosen]
    return [_of_measure(threshold, one, measure) for one, measure in zip(chosen, measures, strict=True)]


def _in_parts(threshold: Threshold, parts: Sequence[PartDiff], found: RunDiff) -> list[Judged]:
    """Return a result for each group of steps with the named brick or layer. Raises UsageError without any."""
    places, lacks = [], []
    for part in parts:
        try:
            places += [(part, place) for place in _places_in(threshold, part)]
        except UsageError as error:
            lacks.append(error)
    if not places:
        raise lacks[0]
    return [_in_part(threshold, part, place, found, len(places)) for part, place in places]


def of_definitions(found: RunDiff) -> list[Judged]:
    """Judge whether each brick keeps its definition's budget (µs per token)."""
    judged = []
    for part in found.parts + found.alone:
        for one in part.bricks:
            if one.brick and one.now and (budget_us := part.now.budgets.get(one.brick)) is not None:
                text = f"{one.brick[0]}.per_token<={budget_us:g}us, its budget"
                if part.unit != "token":
                    judged.append(Judged(text, about_place(part, one), Outcome.UNKNOWN, NO_TOKENS))
                    continue
                threshold = Threshold(text, (one.brick[0],), None, "per_token", "<=", budget_us, "us")
                parts = len(found.parts + found.alone)
                judged.append(_of_place(threshold, part, one, found, parts))
    return judged


def of_contracts(found: RunDiff, bounds: Mapping[Brick, tuple[float, tuple[str, int]]]) -> list[Judged]:
    """Judge the calls of each brick by the limit in its kernel's contract, a multiple of the baseline's time.

    `bounds` has each brick's limit, with its file and line.
    """
    judged = []
    for part in found.parts:
        for one in part.bricks:
            if one.brick and one.brick in bounds:
                limit, where = bounds[one.brick]
                text = f"{one.brick[0]}<={limit:g}x, by contract"
                threshold = Threshold(text, (one.brick[0],), None, FIGURES[0], "<=", limit, "x", where)
                judged.append(_of_place(threshold, part, one, found, len(found.parts)))
    return judged


def _places_in(threshold: Threshold, part: PartDiff) -> Sequence[PlaceDiff | None]:
    """Return the bricks and layers of a threshold in a group of steps. None: a figure of the whole group."""
    name = threshold.names[-1]
    if name in RATES or name == UNATTRIBUTED or training_part(part, name) is not None:
        return [None]
    return [part.step] if name == STEP else _places(threshold, part)


def _in_part(threshold: Threshold, part: PartDiff, place: PlaceDiff | None, found: RunDiff, compared: int) -> Judged:
    """Judge one of the `compared` figures of a threshold."""
    if place is not None:
        return _of_place(threshold, part, place, found, compared)
    name, is_relative = threshold.names[-1], threshold.is_relative
    if name in RATES:
        measure = batch_measure(part, name, is_relative=is_relative, compared=compared)
        return _of_measure(threshold, part.name, measure)
    if (training := training_part(part, name)) is not None:
        is_p50 = threshold.figure == FIGURES[0] and threshold.layer is None
        measure = part_p50(part, training, is_relative=is_relative) if is_p50 else Measure(training, ONLY_P50)
        return _of_measure(threshold, part.name, measure)
    # Time between a layer's bricks counts for the layer. Other time between bricks is unattributed.
    known, whole = part.now.places, part.now.inside_us.mean
    named = sum(one.time.mean for (brick, layer), one in known.items() if brick == BETWEEN_BRICKS and layer)
    between = known[BETWEEN_BRICKS, None].time
    share, half = 100 * (between.mean - named) / whole, 100 * half_of(between, compared) / whole
    said = f"{number(share)} ± {number(half)} % of a step"
    return _judged(threshold, part.name, (share - half, share + half), threshold.value, said)


def _of_measure(threshold: Threshold, where: str, found: Measure) -> Judged:
    """Judge a value of a phase or group by a threshold. If it is unknown, so is the outcome, with the reason."""
    about = f"{where}: {found.name}" if found.name else where
    if found.why_not:
        return Judged(threshold.text, about, Outcome.UNKNOWN, found.why_not, where=threshold.where)
    return _judged(threshold, about, (found.least, found.most), threshold.value, found.said, found.name)


def _of_place(threshold: Threshold, part: PartDiff, place: PlaceDiff, found: RunDiff, compared: int) -> Judged:
    about = about_place(part, place)
    side, limit = place.now, threshold.value
    figure = (
        None if side is None else side.time if threshold.figure == "per_token" else getattr(side, threshold.figure)
    )
    if place.brick and side is None:
        return Judged(threshold.text, about, Outcome.UNKNOWN, "the new run does not have it", where=threshold.where)
    if figure is None:
        why = _too_few_calls(threshold, part, side)
        return Judged(threshold.text, about, Outcome.UNKNOWN, why, where=threshold.where)
    resolution_us = max(run.clock_resolution_us or 0.0 for run in (found.base, found.now))
    off_us = 0.0 if threshold.figure == "per_token" else READINGS_OFF * resolution_us
    if threshold.is_relative:
        one = _change_of(threshold, place)
        if one is None or one.before <= 0:
            why = "it is new: the baseline lacks it" if place.before is None else "the baseline has too few calls"
            return Judged(threshold.text, about, Outcome.UNKNOWN, why, where=threshold.where)
        half = one.half / one.before + (off_us / place.p50.before if place.p50 and place.p50.before else 0.0)
        ratio = one.now / one.before
        said = f"{number(ratio)}× ± {number(half)}"
        said += calls_text(place, threshold.figure)
        return _judged(threshold, about, (ratio - half, ratio + half), limit, said, _guilty(part, place))
    half = half_of(figure, compared) + off_us
    said = f"{duration(figure.mean)} ± {duration(half)}"
    return _judged(threshold, about, (figure.mean - half, figure.mean + half), limit, said, _guilty(part, place))


def _too_few_calls(threshold: Threshold, part: PartDiff, side: PlaceTimes | None) -> str:
    """Return a text with the number of calls and the needed number, if these are too few for a quantile, else ""."""
    calls = round(side.calls.mean * part.now.steps) if side and side.calls else 0
    needed = round(MIN_BEYOND / (0.01 if threshold.figure == "p99" else 0.5))
    if 0 < calls < needed:
        return f"there are too few calls for a {threshold.figure}: {calls} of {needed} needed; use a longer run"
    return "there are too few calls; use a longer run"


def _judged(
    threshold: Threshold, about: str, interval: tuple[float, float], limit: float, said: str, guilty: str = ""
) -> Judged:
    holds = _OPERATORS[threshold.sign]
    least, most = interval
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
    # For a brick in several layers use the typical call, because the median changes if layers with other times run
    # more often. For a brick that contains other bricks, use the p50, because its typical call contains none.
    return place.call if place.call and place.call.medians_us is None else place.p50


def _guilty(part: PartDiff, place: PlaceDiff) -> str:
    """Return the name of a brick or layer for a result, with the layer that grew most if there are several."""
    if place.layer is not None:
        return place.name
    cells = [one for one in part.cells if one.brick == place.brick and one.verdict == "slower"]
    grown = {one.layer: one.change.delta for one in cells if one.change}
    return f"{place.name}, most in {max(grown, key=lambda layer: grown[layer])}" if grown else place.name


def _places(threshold: Threshold, part: PartDiff) -> list[PlaceDiff]:
    """Return the bricks and layers that a threshold names. Raises UsageError without any."""
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
    if what == "phase" and name in ("decode", "prefill") and "forward" in known:
        there += ", because a model called without a cache has forward steps: pass a cache, or write forward"
    return UsageError(f"threshold {threshold.text!r}: there is no {what} {name!r}; {hint}there are {there}")
