"""Combine several runs of one program into one: the means of its figures, and their scatter between runs."""

# Rules
# - A group of steps, a brick or a figure is averaged over the runs that have it, if these are at least MIN_LEARNED.
#   The gap in the others is reported.
# - If fewer runs have it, one of them is used alone, and the scatter between runs is unknown.
# - The order of the runs does not matter, except for two. Then the first is used, and the second only for steps and
#   bricks that the first lacks.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median

from cbtop.comparison.contents import contents_together
from cbtop.comparison.items import Brick
from cbtop.comparison.memory_peaks import memory_together
from cbtop.comparison.noise import MIN_LEARNED, Figure, learned
from cbtop.comparison.part_diff import covers, moved_to, work_text
from cbtop.comparison.phase_rates import rates_together
from cbtop.comparison.place_changes import shared_ratio
from cbtop.comparison.places_together import places_together
from cbtop.comparison.runs import MissingPart, Run, StepGroup, TooShort
from cbtop.units import count, counted

MAX_NAMED = 8  # A text about a gap names at most this many bricks.
# key of a group of steps: (phase, (tokens per step, sequences per step))
_Work = tuple[str, tuple[int | None, int | None]]


def together(runs: Sequence[Run]) -> Run:
    """Return the mean of the runs with their scatter. With fewer than MIN_LEARNED runs, return the first run.

    If there are two runs, the first gets the steps and bricks that only the second has.
    """
    if len(runs) < MIN_LEARNED:
        return runs[0] if len(runs) == 1 else _first_of_two(*runs)
    order = sorted(runs, key=lambda run: (run.key, run.name))
    works = dict.fromkeys((part.phase, part.work) for run in order for part in run.parts)
    parts, gaps = [], []
    for work in works:
        part, lacking = _part_together(work, order)
        parts.append(part)
        gaps += lacking
    return replace(
        order[0],
        name=f"{len(order)} runs",
        clock_resolution_us=max(run.clock_resolution_us or 0.0 for run in order) or None,
        covers_s=sum(run.covers_s for run in order),
        parts=tuple(parts),
        too_short=_too_short(order),
        kernels=_kernels(order),
        lost=sum(run.lost for run in order),
        seen=sum(run.seen for run in order),
        untrusted=next((run.untrusted for run in order if run.untrusted), ""),
        is_cut=any(run.is_cut for run in order),
        is_gone=any(run.is_gone for run in order),
        gpu_clock_mhz=_mean_of([run.gpu_clock_mhz for run in order]),
        host_busy_percent=_mean_of([run.host_busy_percent for run in order]),
        paces=tuple(pace for run in order for pace in run.paces) if all(run.paces for run in order) else (),
        failed_checks=tuple(dict.fromkeys(check for run in order for check in run.failed_checks)),
        runs=len(order),
        gaps=tuple(gaps),
        rates=rates_together([run.rates for run in order], MIN_LEARNED),
        memory=memory_together([run.memory for run in order]),
        contents=contents_together([run.contents for run in order]),
    )


def _first_of_two(first: Run, second: Run) -> Run:
    """Return `first`, with groups of steps and bricks that only `second` has."""
    firsts = {(part.phase, part.work): part for part in first.parts}
    seconds = {(part.phase, part.work): part for part in second.parts}
    parts, gaps = [], []
    for work, part in {**seconds, **firsts}.items():
        other = seconds.get(work)
        if work not in firsts:
            gaps.append(
                MissingPart(part.phase, work_text(part), 1, 2, (_why_lacking(work, first, None),), second.name)
            )
        elif other and other.unit == part.unit and _is_at(other, part.cached):
            found = replace(part, places={**moved_to(other, part.cached).places, **part.places})
            gaps += _place_gaps(found, {first.name: part, second.name: other}, 2)
            part = found
        parts.append(part)
    if not gaps:
        return first
    return replace(first, parts=tuple(parts), kernels=_kernels([first, second]), gaps=tuple(gaps))


def _too_short(runs: Sequence[Run]) -> tuple[TooShort, ...]:
    """Return the entry with the most steps of each phase and work, with the times of all entries added up."""
    found: dict[tuple[str, object], TooShort] = {}
    for one in chain.from_iterable(run.too_short for run in runs):
        known = found.get((one.phase, one.work), one)
        longest = one if one.steps > known.steps else known
        time_us = one.time_us + (known.time_us if known is not one else 0.0)
        found[one.phase, one.work] = replace(longest, time_us=time_us)
    return tuple(found.values())


def _kernels(runs: Sequence[Run]) -> dict[Brick, tuple[str, ...]]:
    """Return each brick's kernels, from the first run that has the brick."""
    found: dict[Brick, tuple[str, ...]] = {}
    for run in runs:
        for brick, names in run.kernels.items():
            found.setdefault(brick, names)
    return found


def _part_together(work: _Work, runs: Sequence[Run]) -> tuple[StepGroup, list[MissingPart]]:
    """Return a group of steps averaged over all runs, and the runs in which a part of it is missing."""
    each = {at: part for at, run in enumerate(runs) for part in run.parts if (part.phase, part.work) == work}
    alike = _alike(each)
    reasons = tuple(_why_lacking(work, run, each.get(at)) for at, run in enumerate(runs) if at not in alike)
    if len(alike) < MIN_LEARNED:
        only = max(alike, key=lambda at: alike[at].steps)
        part = each[only]
        return part, [MissingPart(part.phase, work_text(part), len(alike), len(runs), reasons, runs[only].name)]
    found = _averaged(list(alike.values()))
    gaps = list(_place_gaps(found, {runs[at].name: part for at, part in alike.items()}, len(runs)))
    if reasons:
        gaps.insert(0, MissingPart(found.phase, work_text(found), len(alike), len(runs), reasons))
    return found, gaps


def _alike(each: Mapping[int, StepGroup]) -> dict[int, StepGroup]:
    """Return the groups of steps that can be averaged, converted to one cache length.

    They have the same unit, and all have reached this length, which is as near to the median length as possible.
    """
    kinds: dict[tuple[str, bool], dict[int, StepGroup]] = {}
    for at, part in each.items():
        kinds.setdefault((part.unit, part.cached is None), {})[at] = part
    alike = max(kinds.values(), key=len)
    lengths = [part.cached for part in alike.values() if part.cached is not None]
    if not lengths:
        return alike
    usual = median(lengths)
    nearest = sorted(lengths, key=lambda length: (abs(length - usual), length))

    def covering(length: float) -> dict[int, StepGroup]:
        return {at: moved_to(part, length) for at, part in alike.items() if _is_at(part, length)}

    enough = (found for length in nearest if len(found := covering(length)) >= MIN_LEARNED)
    return next(enough, None) or max(map(covering, nearest), key=len)


def _is_at(part: StepGroup, cached: float | None) -> bool:
    """Whether a group's times can be converted to `cached` positions (None: not reported)."""
    if part.cached is None or cached is None:
        return part.cached is None and cached is None
    return covers(part, cached)


def _why_lacking(work: _Work, run: Run, part: StepGroup | None) -> str:
    """Return why a run lacks a group of steps that other runs have. `part` is its own group with the same work, or
    None.
    """
    if part is not None and part.cached_least is not None and part.cached_most is not None:
        lengths = f"{count(part.cached_least)} to {count(part.cached_most)} positions cached"
        return f"{run.name} has other KV lengths, {lengths}"
    if part is not None:
        return f"{run.name} does not report tokens or cached positions as the others do"
    short = next((one for one in run.too_short if (one.phase, one.work) == work), None)
    if short is not None:
        return f"{run.name} has {short.steps} of {counted(short.needed, 'step')} needed"
    return f"{run.name} lacks it"


def _place_gaps(found: StepGroup, parts: Mapping[str, StepGroup], of: int) -> Iterator[MissingPart]:
    """Yield the bricks that some of the groups `parts` lack. The keys of `parts` are the runs' names."""
    lacking: dict[tuple[str, ...], list[str]] = {}
    for brick, layer in found.places:
        names = tuple(name for name, part in parts.items() if (brick, layer) not in part.places)
        if not names or brick is None:
            continue
        if layer is None or any((brick, None) in parts[name].places for name in names):
            lacking.setdefault(names, []).append(f"{brick[0]} in {layer}" if layer else brick[0])
    for names, bricks in lacking.items():
        more = f" and {len(bricks) - MAX_NAMED} more" if len(bricks) > MAX_NAMED else ""
        what = f"{found.phase}: {', '.join(bricks[:MAX_NAMED])}{more}"
        having = [name for name in parts if name not in names]
        only = having[0] if of < MIN_LEARNED else ""
        whys = tuple(f"{name} has no call of {'it' if len(bricks) == 1 else 'them'}" for name in names)
        yield MissingPart(found.phase, what, len(having), of, whys, only)


def _averaged(parts: Sequence[StepGroup]) -> StepGroup:
    fullest = max(parts, key=lambda part: len(part.places))
    ratios = [shared_ratio(fullest.places, part.places) for part in parts]
    known = [ratio for ratio in ratios if ratio is not None]
    usual = sum(known) / len(known) if known else None
    paces = None if usual is None else [None if ratio is None else ratio / usual for ratio in ratios]
    (wall,), (inside,) = (
        learned([row]) for row in ([part.wall_us for part in parts], [part.inside_us for part in parts])
    )
    typical = [part.typical_us for part in parts if part.typical_us]
    return replace(
        fullest,
        steps=sum(part.steps for part in parts),
        failed=sum(part.failed for part in parts),
        warm_up=round(sum(part.warm_up for part in parts) / len(parts)),
        tokens=_mean_of([part.tokens for part in parts]),
        sequences=_mean_of([part.sequences for part in parts]),
        cached=_mean_of([part.cached for part in parts]),
        cached_least=min((part.cached_least for part in parts if part.cached_least is not None), default=None),
        cached_most=max((part.cached_most for part in parts if part.cached_most is not None), default=None),
        wall_us=wall,
        inside_us=inside,
        places=places_together([part.places for part in parts], paces, MIN_LEARNED),
        budgets={brick: us for part in parts for brick, us in part.budgets.items()},
        typical_us=learned([typical])[0] if len(typical) >= MIN_LEARNED else None,
        thirds=tuple(thirds for part in parts for thirds in part.thirds),
        training=_training_together(parts),
        tokens_a_step=_amount_together([part.tokens_a_step for part in parts]),
        sequences_a_step=_amount_together([part.sequences_a_step for part in parts]),
    )


def _amount_together(each: Sequence[Figure | None]) -> Figure | None:
    return learned([each])[0] if None not in each and len(each) > 1 else None


def _training_together(parts: Sequence[StepGroup]) -> dict[str, Figure]:
    names = dict.fromkeys(name for part in parts for name in part.training)
    rows = {name: [part.training.get(name) for part in parts] for name in names}
    shared = [name for name, row in rows.items() if len([one for one in row if one is not None]) >= MIN_LEARNED]
    return dict(zip(shared, learned([rows[name] for name in shared]) if shared else [], strict=True))


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None
