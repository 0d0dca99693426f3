"""Compare two runs by group of steps, brick and layer, or tell why they cannot be compared. All changes are derived
from records.
"""

# Rules
# - Groups of steps with different work or batch are not compared.
# - If the machine or the sampling differs, or records were lost, times change although the program is the same. This
#   is reported instead of the changes. The user may ask for the changes anyway.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from cbtop.comparison.batches import PartKey, key_of, part_names
from cbtop.comparison.comparison import differences, other_model
from cbtop.comparison.machine_differences import losses, other_clock, other_load, other_machine, other_pace
from cbtop.comparison.noise import MIN_LEARNED
from cbtop.comparison.part_diff import PartDiff, compared_figures, part_diff, work_text
from cbtop.comparison.rate_diff import RateDiff, main_rates
from cbtop.comparison.run_sets import together
from cbtop.comparison.runs import Run, StepGroup, TooShort
from cbtop.comparison.short_steps import ShortSteps, short_steps, warm_up_steps
from cbtop.protocol.vocabulary import is_warm_up
from cbtop.units import count, counted, percent

RATES_OF_PART = 3  # Figures of a phase that are tested together: a step, a token, and a typical token.
# A note names batches with too few steps if they take more than this share of a run's time.
LEAST_SHARE = 0.01
# If cached positions are not reported, a note warns when the numbers of steps differ by more than this (relative).
ALIKE_STEPS = 0.10


@dataclass(frozen=True, slots=True)
class RunDiff:
    """Two runs, compared. With `why_not` they cannot be, and `parts` is empty.

    Without a baseline, `base` and `now` are the same object, and notes do not mention a baseline.
    """

    base: Run
    now: Run
    why_not: str = ""
    is_too_little: bool = False  # whether more steps would make the runs comparable
    notes: tuple[str, ...] = ()
    parts: tuple[PartDiff, ...] = ()
    not_judged: tuple[str, ...] = ()  # phases of the baseline without a compared group of steps
    # Groups of steps that only the new run has, or that cannot be compared. Both sides of the PartDiff are then the
    # new run's group.
    alone: tuple[PartDiff, ...] = ()
    # why a group of steps is not compared, although both runs have it
    why_apart: Mapping[PartKey, str] = field(default_factory=dict)
    # Steps in batches with too few steps to compare. If no group of a phase is compared, only the phase's additional
    # time counts.
    alone_short: tuple[ShortSteps, ...] = ()
    rates: tuple[RateDiff, ...] = ()  # rate of each compared phase in tokens/s, or in steps/s if tokens are unknown

    @property
    def has_baseline(self) -> bool:
        """Whether there are two runs to compare. If not, a single run is judged."""
        return self.base is not self.now

    @property
    def alone_percent(self) -> float:
        """Part of the new run's time in steps that are not compared (`alone` and `alone_short`), in percent."""
        whole_us = self.now.time_us
        own_us = sum(one.now.time_us for one in self.alone) + sum(one.time_us for one in self.alone_short)
        return 100 * own_us / whole_us if whole_us else 0.0


def diff(
    base: Run, now: Run, phase: str | None = None, *, anyway: bool = False, may_lack_records: bool = False
) -> RunDiff:
    """Return the changes from the run `base` to the run `now`, in every phase or only in `phase`.

    Without a baseline, pass the same object twice. With `anyway`, runs are compared even if machines or sampling
    differ, if records were lost, or if both are the same run. `may_lack_records` allows only lost records.
    """
    why_not = _why_not(base, now, anyway=anyway, may_lack_records=may_lack_records)
    if why_not:
        return RunDiff(base, now, why_not)
    notes = [*_run_notes(base, now)]
    parts: list[PartDiff] = []
    why_apart: dict[PartKey, str] = {}
    befores = _by_work(base, phase)
    afters = _by_work(now, phase)
    both = [key for key in befores if key in afters]
    names = part_names([*befores.values(), *afters.values()])
    # Without this correction for the number of figures, more than one comparison in a hundred would be a false alarm.
    compared = sum(compared_figures(befores[key], afters[key]) for key in both)
    for key in both:
        found = part_diff(befores[key], afters[key], base, now, compared, len(both))
        if isinstance(found, str):
            notes.append(found)
            why_apart[key] = found
        else:
            parts.append(replace(found, batch_name=names[key]))
            notes += _part_notes(befores[key], afters[key], names[key])
    only_base, only_now = (
        [part for key, part in mine.items() if key not in others]
        for mine, others in ((befores, afters), (afters, befores))
    )
    notes += [f"{lacking_text(part, now, 'the baseline', 'the new run')}: left out" for part in only_base]
    notes += [f"{lacking_text(part, base, 'the new run', 'the baseline')}: left out" for part in only_now]
    for whose, run in _sides(base, now):
        notes += [*_gaps(f" of {whose}" if base is not now else "", run, phase), *_short(whose, run, phase)]
    if parts:
        return _of_parts(base, now, phase, parts, notes, names, why_apart)
    if not both and befores and afters:
        works = (", ".join(work_text(part) for part in some.values()) for some in (befores, afters))
        return RunDiff(base, now, "another batch or phase: {} in the baseline, {} in the new run".format(*works))
    if befores and afters:
        return RunDiff(base, now, "; ".join(notes))
    return RunDiff(base, now, _too_little(base, now, phase), is_too_little=True)


def diff_of(
    bases: Sequence[Run],
    news: Sequence[Run],
    phase: str | None = None,
    *,
    anyway: bool = False,
    may_lack_records: bool = False,
) -> RunDiff:
    """Return the changes from the mean of `bases` to the mean of `news`, as in `diff`.

    With fewer than MIN_LEARNED runs, the first is used. Without a baseline, pass the same object twice.
    """
    base = together(bases)
    now = base if news is bases else together(news)
    for runs in (bases, news):
        if why_not := _not_alike(runs, anyway=anyway, may_lack_records=may_lack_records):
            return RunDiff(base, now, f"runs that are taken together do not compare: {why_not}")
    both = next((one.name for one in news for other in bases if is_same_run(one, other)), "")
    if both and len(bases) + len(news) > 2 and not anyway:
        return RunDiff(base, now, f"{both} is also in the baseline: a run does not differ from itself")
    found = diff(base, now, phase, anyway=anyway, may_lack_records=may_lack_records)
    # A different pace of one averaged run is part of the scatter between runs. So compare only the averages.
    why_not = "" if found.why_not or anyway else other_pace(base, now)
    return RunDiff(base, now, why_not) if why_not else found


def _not_alike(runs: Sequence[Run], *, anyway: bool, may_lack_records: bool) -> str:
    """Return why runs cannot be averaged, or "". For example, the same run was passed twice."""
    for one, other in combinations(runs, 2):
        if len(runs) >= MIN_LEARNED and is_same_run(one, other):
            return f"{one.name} is there twice"
        why_not = other_model(one.surroundings, other.surroundings, one.name, any_type=anyway)
        if not (why_not or anyway):
            lost = "" if may_lack_records else losses(one, other, one.name)
            why_not = lost or other_machine(one, other, one.name)
        if why_not:
            return f"{other.name}: {why_not}"
    return ""


def is_same_run(one: Run, other: Run) -> bool:
    """Whether both runs are the same steps of one process, which was read twice."""
    return one is not other and one.key == other.key and one.parts == other.parts and bool(one.parts)


def _why_not(base: Run, now: Run, *, anyway: bool, may_lack_records: bool) -> str:
    """Return why two runs cannot be compared, or ""."""
    why_not = other_model(base.surroundings, now.surroundings, any_type=anyway)
    if not anyway and is_same_run(base, now):
        why_not = f"both are the same run, {base.name}; pass two different runs"
    if not (why_not or anyway):
        why_not = ("" if may_lack_records else losses(base, now)) or other_machine(base, now)
    return why_not


def _run_notes(base: Run, now: Run) -> Iterator[str]:
    """Yield notes about differences between the runs that may change times."""
    yield from differences(base.surroundings, now.surroundings)
    yield from filter(None, (other(base, now) for other in (other_clock, other_pace, other_load)))
    for _, run in _sides(base, now):
        if run.is_cut:
            yield f"{run.name} was never closed: what came after its last frame is not in it"
    for _, run in _sides(base, now):
        if run.is_gone:
            yield f"the process of {run.name} said no goodbye: it was killed, or left by os._exit or exec"


def _sides(base: Run, now: Run) -> list[tuple[str, Run]]:
    """Return the runs with their names in messages. Without a baseline there is one."""
    return [("the run", now)] if base is now else [("the baseline", base), ("the new run", now)]


def _by_work(run: Run, phase: str | None) -> dict[tuple[str, tuple[int | None, int | None]], StepGroup]:
    """Return a run's groups of steps by phase and work, in every phase or only in `phase`."""
    return {(part.phase, part.work): part for part in run.parts if phase in (None, part.phase)}


def _of_parts(
    base: Run,
    now: Run,
    phase: str | None,
    parts: Sequence[PartDiff],
    notes: Sequence[str],
    names: Mapping[PartKey, str],
    why_apart: Mapping[PartKey, str],
) -> RunDiff:
    """Compare two runs that share at least one group of steps."""
    befores, afters = _by_work(base, phase), _by_work(now, phase)
    order = sorted(parts, key=lambda part: -(part.before.amount + part.now.amount))
    compared_phases = {part.phase for part in parts}
    # If only a few of several base runs have a phase, the new run may lack it by chance. So ignore it.
    usual = [part for part in befores.values() if part.runs >= min(base.runs, MIN_LEARNED)]
    left = dict.fromkeys(part.phase for part in usual if part.phase not in compared_phases)
    notes = [*notes, *(note for part in order for note in _place_notes(part))]
    new = [part for key, part in afters.items() if key not in befores or key in why_apart]
    alone = [part_diff(part, part, now, now, compared_figures(part, part), 1) for part in new]
    return RunDiff(
        base,
        now,
        notes=tuple(dict.fromkeys(notes)),
        parts=tuple(order),
        not_judged=tuple(left),
        alone=tuple(replace(one, batch_name=names[key_of(one.now)]) for one in alone if isinstance(one, PartDiff)),
        why_apart=why_apart,
        alone_short=tuple(short_steps(now, phase, base, compared_phases)),
        rates=main_rates(base.rates, now.rates, order, len(compared_phases) * RATES_OF_PART),
    )


def _place_notes(part: PartDiff) -> Iterator[str]:
    for what, verdict in (("no longer there", "gone"), ("new", "new")):
        if names := [one.name for one in part.bricks if one.verdict == verdict]:
            yield f"{part.name}: {what}: {', '.join(names)}"
    if ratio := part.machine_ratio:
        yield (
            f"{part.name}: every brick takes {ratio:.2f} times as long: "
            "another clock, or another load of the machine, does that, too"
        )


def lacking_text(part: StepGroup, other: Run, has: str, lacks: str) -> str:
    """Return a text about a group of steps that one run has. The run `other` has none or too few of these.

    `has` and `lacks` are the names of the two runs.
    """
    short = [one for one in other.too_short if one.phase == part.phase and one.work in (None, part.work)]
    if not short:
        return f"only {has} has {work_text(part)}"
    most = max(short, key=lambda one: one.steps)
    steps = counted(most.steps, "such step" if most.work else f"{part.phase} step")
    return f"{has} has {work_text(part)}, {lacks} {steps} of {count(most.needed)} needed"


def _gaps(of: str, run: Run, phase: str | None) -> Iterator[str]:
    """Yield notes about steps and bricks that some of the averaged runs lack.

    `of` is a part of the text, such as ` of the baseline`.
    """
    for one in run.gaps:
        if phase in (None, one.phase):
            few = f"; fewer than {MIN_LEARNED} do not show how runs vary, so "
            few += f"{one.only} counts alone" if one.only else "its calls are not judged"
            why_not = "; ".join(one.why_not) + (few if one.runs < MIN_LEARNED else "")
            yield f"{one.what}: in {one.runs} of {one.of} runs{of}: {why_not}"


def _part_notes(before: StepGroup, now: StepGroup, name: str) -> Iterator[str]:
    has_baseline = before is not now
    if before.warm_up or now.warm_up:
        was = f", {count(before.warm_up)} before" if has_baseline else ""
        yield f"{name}: left out as warm-up: {counted(now.warm_up, 'step')}{was}"
    if now.failed or before.failed:
        failed = f"{counted(now.failed, 'step')} of {count(now.steps)}"
        was = f", {count(before.failed)} of {count(before.steps)} before" if has_baseline else ""
        yield f"{name}: failed: {failed}{was}"
    # Each run begins with an empty cache, so compare numbers of steps per run.
    then, is_now = before.steps // before.runs, now.steps // now.runs
    if has_baseline and before.cached is None and abs(then - is_now) > ALIKE_STEPS * max(then, is_now):
        steps = f"{counted(is_now, 'step')}, {count(then)} in the baseline"
        yield f"{name}: {steps}, and how much was cached is not said: attention may take another time for that"


def _short(whose: str, run: Run, phase: str | None) -> Iterator[str]:
    """Yield notes about the phases of `run` with too few steps to compare."""
    of_phases = {part.phase for part in run.parts}
    for one in short_steps(run, phase):
        share = one.time_us / run.time_us if run.time_us else 0.0
        if one.phase not in of_phases or share >= LEAST_SHARE:
            takes = f": {percent(100 * share)} of its time" if share else ""
            yield f"{one.phase}: left out of {whose}: {one.text}{takes}"
    if steps := warm_up_steps(run):
        yield f"warm-up: {counted(steps, 'step')} of {whose} left out"


def _nearly_enough(run: Run, phase: str | None) -> list[TooShort]:
    """Return for each phase the largest group with too few steps."""
    most: dict[str, TooShort] = {}
    for one in run.too_short:
        if is_warm_up(one.phase) and phase is None:
            continue
        if phase in (None, one.phase) and (one.phase not in most or one.steps > most[one.phase].steps):
            most[one.phase] = one
    return list(most.values())


def _too_little(base: Run, now: Run, phase: str | None) -> str:
    said = []
    for whose, run in _sides(base, now):
        if any(phase in (None, part.phase) for part in run.parts):
            continue
        short = _nearly_enough(run, phase)
        steps = ", ".join(f"{counted(one.steps, one.phase + ' step')} of {count(one.needed)} needed" for one in short)
        wanted = f"no {phase} steps" if phase else "no steps"
        every = run.surroundings.sample_every
        sampled = (
            f", for one in {count(every)} was recorded: `cbtop run --overhead 100%` records each" if every > 1 else ""
        )
        said.append(f"too little in {whose}: {steps or wanted}{sampled if steps else ''}")
    return "; ".join(said)
