"""The comparison of two runs by part and place, or why they are not comparable; derived."""

# Rules
# - Parts with different work or batch are not compared. If cache lengths differ, times are compared at one length, by
#   the line through the blocks of each, and only at a length that both have covered.
# - A different machine, different sampling or lost records change times for reasons outside the program. That is
#   reported instead of a change, unless the user asks for the comparison anyway.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from statistics import NormalDist, median

from cbtop.comparison.baseline import Surroundings
from cbtop.comparison.comparison import ALIKE, MAX_LOST_PERCENT, PlaceChange, differences, other_model, slower
from cbtop.comparison.items import BETWEEN_BRICKS, WHOLE_STEP, Brick, Place, PlaceTimes, judged_change, shared_ratio
from cbtop.comparison.noise import READINGS, Change, Figure, change
from cbtop.comparison.runs import MIN_LEARNED, Run, StepGroup, TooShort, together
from cbtop.profiler.analysis.layers import MIN_PEERS
from cbtop.units import count, counted, percent

FOUND = 0.95  # probability that a change of the reported findable size is found
ALIKE_CLOCK = 0.03  # relative, of a GPU clock: smaller than a reported change
ALIKE_PACE = 0.10  # relative, of a machine, beyond its range while the baseline was recorded
ALIKE_LOAD_POINTS = 15  # percentage points of the time of all processors
ALIKE_RATIOS = 0.05  # relative, of bricks that a slow machine delays alike
ALIKE_STEPS = 0.10  # relative, for two runs that do not report cached positions
_OF_PART = 3  # figures of a whole part that are compared together: a step, a unit, a typical one


@dataclass(frozen=True, slots=True)
class PlaceDiff:
    """A place then and now.

    `change` is what is judged: its typical time per unit, or else its mean. `mean` is its cost per unit. `before` or
    `now` is None if it is new or gone.
    """

    brick: Brick | None
    layer: str | None
    before: PlaceTimes | None
    now: PlaceTimes | None
    change: Change | None = None
    mean: Change | None = None
    p50: Change | None = None
    p99: Change | None = None
    renamed_from: str = ""
    kernels: tuple[tuple[str, ...], tuple[str, ...]] | None = None  # kernels then and now, if they differ
    is_below_resolution: bool = False

    @property
    def name(self) -> str:
        """For example `DownProjection in Layer 5`."""
        return " in ".join(part for part in (self.brick[0] if self.brick else "", self.layer or "") if part) or "step"

    @property
    def delta_us(self) -> float:
        """Its additional cost per unit; for a new or removed place, all of its cost."""
        return (self.now.time.mean if self.now else 0.0) - (self.before.time.mean if self.before else 0.0)

    @property
    def moved_by(self) -> str:
        """Text to follow `delta_us` if it has the opposite sign of the typical change, else ""."""
        is_against = self.change is not None and self.change.delta * self.delta_us < 0
        return " by the mean, which a few long calls move" if is_against else ""

    @property
    def verdict(self) -> str:
        """`slower`, `faster`, `new`, `gone`, or "" if it did not change beyond noise and clock resolution."""
        if self.before is None or self.now is None:
            return "gone" if self.now is None else "new"
        if self.change is None or self.is_below_resolution or not self.change.is_beyond_noise:
            return ""
        return "slower" if self.change.delta > 0 else "faster"


@dataclass(frozen=True, slots=True)
class Balance:
    """The parts of a unit's wall-clock time, µs then and now; `wall` is the sum of the others."""

    wall: tuple[float, float]
    bricks: tuple[float, float]
    between_bricks: tuple[float, float]
    not_recorded: tuple[float, float]  # how much longer all steps are than those recorded inside
    between_steps: tuple[float, float]

    @property
    def off_us(self) -> float:
        """The difference between the change and its parts: 0 except for rounding."""
        parts = (self.bricks, self.between_bricks, self.not_recorded, self.between_steps)
        return (self.wall[1] - self.wall[0]) - sum(now - before for before, now in parts)


@dataclass(frozen=True, slots=True)
class PartDiff:
    """A part that both runs have. Times are at `cached` positions, if both report them and they differ."""

    before: StepGroup
    now: StepGroup
    cached: float | None
    places: tuple[PlaceDiff, ...]  # bricks, bricks in layers and layers; by additional cost per unit
    step: PlaceDiff
    wall: Change  # µs per unit
    balance: Balance
    shared: float | None = None  # common factor of bricks in layers: caused by the machine, or by the whole program
    typical: Change | None = None  # like `wall`, for a typical step and the time before it; None: unknown

    @property
    def phase(self) -> str:
        return self.now.phase

    @property
    def work(self) -> str:
        """For example `decode (240 steps of about 8 tokens)`, from the new run."""
        return _work(self.now)

    @property
    def unit(self) -> str:
        return self.now.unit

    @property
    def units_per_sec(self) -> tuple[float, float]:
        """Wall-clock rates, then and now."""
        return 1e6 / self.wall.before, 1e6 / self.wall.now

    @property
    def bricks(self) -> list[PlaceDiff]:
        """Each brick over all layers."""
        return [one for one in self.places if one.brick and one.layer is None]

    @property
    def layers(self) -> list[PlaceDiff]:
        return [one for one in self.places if one.brick is None]

    @property
    def cells(self) -> list[PlaceDiff]:
        """Bricks in one layer."""
        return [one for one in self.places if one.brick and one.layer]

    @property
    def slower(self) -> list[PlaceDiff]:
        """The bricks slower beyond noise, the worst first, in one layer if it has most of the change."""
        by_place = {(one.brick, one.layer): one for one in self.places}
        known = [
            PlaceChange(one.brick, one.layer, one.change)
            for one in self.places
            if one.change and not one.is_below_resolution
        ]
        return [by_place[one.brick, one.layer] for one in slower(known)]

    @property
    def guilty(self) -> list[PlaceDiff]:
        """Those of `slower` that are also slower relative to all others, if that is known."""
        return [one for one in self.slower if one.change and (one.change.own is None or one.change.is_beyond_others)]

    @property
    def is_slower(self) -> bool:
        """Whether a unit takes longer in wall-clock time, beyond noise."""
        return self.wall.is_beyond_noise and self.wall.delta > 0

    @property
    def is_typically_slower(self) -> bool:
        """Whether a typical step or the time before it takes longer beyond noise, in a brick or outside bricks."""
        return self.typical is not None and self.typical.is_beyond_noise and self.typical.delta > 0

    @property
    def more_failed_percent(self) -> float:
        """Increase of the share of failed steps, in percentage points."""
        return 100 * (self.now.failed / self.now.steps - self.before.failed / self.before.steps)

    @property
    def is_longer_in_the_mean(self) -> bool:
        """Whether a few steps became longer: a unit takes longer beyond chance, but the typical step does not."""
        return not self.is_slower and (self.wall.percent or 0.0) > (self.wall.noise_percent or inf)

    @property
    def known(self) -> list[PlaceDiff]:
        """The places with a known change."""
        return [one for one in self.places if one.change is not None and not one.is_below_resolution]

    @property
    def new(self) -> list[PlaceDiff]:
        """The new bricks, the longest first."""
        return [one for one in self.bricks if one.verdict == "new"]

    @property
    def machine_ratio(self) -> float | None:
        """Common factor of all bricks' times, if they changed alike and beyond noise; else None.

        A different clock or load of the machine is then as likely a cause as a different program.
        """
        ratios = [one.change.now / one.change.before for one in self.bricks if one.change and one.verdict]
        timed = [one for one in self.bricks if one.p50 and not one.is_below_resolution]
        if len(timed) < MIN_PEERS or not all(one.verdict in ("slower", "faster") for one in timed):
            return None
        return median(ratios) if max(ratios) <= min(ratios) * (1 + ALIKE_RATIOS) else None

    @property
    def is_shared(self) -> bool:
        """Whether everything became slower alike: no brick changed relative to all others, and this explains a unit.

        A different clock or load of the machine may be the cause, as well as the program.
        """
        if self.shared is None or self.shared <= 1:
            return False
        changes = [one.change for one in self.known if one.brick and one.brick != BETWEEN_BRICKS and one.change]
        if any(change.own is None or change.own.is_beyond_noise for change in changes):
            return False
        off = abs(self.wall.now / self.shared - self.wall.before)
        return off <= self.wall.before * (self.wall.noise_percent or 0.0) / 100

    def findable(self, places: Sequence[PlaceDiff]) -> float | None:
        """Return the smallest change (%) that is found with probability FOUND, for the median one of `places`."""
        found = [findable_percent(one.change) for one in places if one.change and not one.is_below_resolution]
        known = [one for one in found if one is not None]
        return median(known) if known else None


@dataclass(frozen=True, slots=True)
class RunDiff:
    """The comparison of two runs. If `why_not` is set, they are not comparable, and `parts` is empty."""

    base: Run
    now: Run
    why_not: str = ""
    is_too_little: bool = False  # that is the reason: more steps would suffice
    notes: tuple[str, ...] = ()
    parts: tuple[PartDiff, ...] = ()
    not_judged: tuple[str, ...] = ()  # phases of the baseline without a compared part
    alone: tuple[PartDiff, ...] = ()  # parts that only the new run has, each compared with itself
    alone_short: tuple[TooShort, ...] = ()  # phases with too few steps, with their additional time in the new run

    @property
    def alone_percent(self) -> float:
        """Share of the new run's time that these parts take."""
        whole_us = self.now.time_us
        own_us = sum(one.now.time_us for one in self.alone) + sum(one.time_us for one in self.alone_short)
        return 100 * own_us / whole_us if whole_us else 0.0

    @property
    def slower(self) -> list[tuple[PartDiff, PlaceDiff]]:
        """All slower bricks, the worst of each part first."""
        return [(part, one) for part in self.parts for one in part.slower]


def diff(
    base: Run, now: Run, phase: str | None = None, *, anyway: bool = False, may_lack_records: bool = False
) -> RunDiff:
    """Return the changes from `base` to `now`, in every phase or only in `phase`.

    `anyway`: compare even if machines or sampling differ, records were lost, or both are the same run.
    `may_lack_records`: compare even if records were lost.
    """
    why_not = other_model(base.surroundings, now.surroundings)
    if not anyway and is_same_run(base, now):
        why_not = f"both are the same run, {base.name}: of a run compared with itself nothing has ever changed"
    if not (why_not or anyway):
        why_not = ("" if may_lack_records else _losses(base, now)) or _other_machine(base, now)
    if why_not:
        return RunDiff(base, now, why_not)
    notes = [*differences(base.surroundings, now.surroundings)]
    notes += [note for other in (_other_clock, _other_pace, _other_load) if (note := other(base, now))]
    notes += [
        f"{run.name} was never closed: what came after its last frame is not in it"
        for run in (base, now)
        if run.is_cut
    ]
    notes += [
        f"the process of {run.name} said no goodbye: it was killed, or left by os._exit or exec"
        for run in (base, now)
        if run.is_gone
    ]
    parts: list[PartDiff] = []
    befores = {(part.phase, part.work): part for part in base.parts if phase in (None, part.phase)}
    afters = {(part.phase, part.work): part for part in now.parts if phase in (None, part.phase)}
    both = [key for key in befores if key in afters]
    # Correct for all figures together: one false alarm in a hundred comparisons, not in each part.
    compared = sum(len(befores[key].places.keys() & afters[key].places.keys()) for key in both)
    for key in both:
        found = _part(befores[key], afters[key], base, now, compared, len(both))
        if isinstance(found, str):
            notes.append(found)
        else:
            parts.append(found)
            notes += _part_notes(befores[key], afters[key], (base.runs, now.runs))
    for whose, mine, others in (("the baseline", befores, afters), ("the new run", afters, befores)):
        notes += [f"only {whose} has {_work(mine[key])}: left out" for key in mine if key not in others]
    notes += [
        note for whose, run in (("the baseline", base), ("the new run", now)) for note in _short(whose, run, phase)
    ]
    if parts:
        order = sorted(parts, key=lambda part: -(part.before.amount + part.now.amount))
        compared_phases = {part.phase for part in parts}
        left = dict.fromkeys(part.phase for part in befores.values() if part.phase not in compared_phases)
        notes += [note for part in order for note in _place_notes(part)]
        new = [part for key, part in afters.items() if key not in befores]
        alone = [_part(part, part, now, now, len(part.places), 1) for part in new]
        return RunDiff(
            base,
            now,
            notes=tuple(dict.fromkeys(notes)),
            parts=tuple(order),
            not_judged=tuple(left),
            alone=tuple(one for one in alone if isinstance(one, PartDiff)),
            alone_short=tuple(_alone_short(base, now, phase)),
        )
    if not both and befores and afters:
        works = (", ".join(_work(part) for part in some.values()) for some in (befores, afters))
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
    """Return the changes from the mean of `bases` to the mean of `news`, like `diff`.

    If there are too few runs to average, the first ones are compared.
    """
    base, now = together(bases), together(news)
    for runs in (bases, news):
        if why_not := _not_alike(runs, anyway=anyway):
            return RunDiff(base, now, f"runs that are taken together do not compare: {why_not}")
    found = diff(base, now, phase, anyway=anyway, may_lack_records=may_lack_records)
    # Not for runs to be averaged: different paces are part of their scatter.
    why_not = "" if found.why_not or anyway else _other_pace(base, now)
    return RunDiff(base, now, why_not) if why_not else found


def _not_alike(runs: Sequence[Run], *, anyway: bool) -> str:
    """Return why runs to be averaged are not comparable or contain a run twice, or ""."""
    if len(runs) < MIN_LEARNED:
        return ""
    for at, other in enumerate(runs[1:], 1):
        if twice := next((one for one in runs[:at] if is_same_run(one, other)), None):
            return f"{twice.name} is there twice"
        if found := diff(runs[0], other, anyway=anyway).why_not:
            return f"{other.name}: {found}"
    return ""


def is_same_run(one: Run, other: Run) -> bool:
    """Whether two runs are the same steps of the same process, read twice."""
    return one is not other and one.key == other.key and one.parts == other.parts and bool(one.parts)


def findable_percent(one: Change) -> float | None:
    """Return the smallest change (% of the old value) that is found with probability FOUND."""
    if one.noise_percent is None or one.before <= 0:
        return None
    if one.own and (beside := findable_percent(one.own)) is not None:
        return min(beside, findable_percent(replace(one, own=None)) or beside)
    return one.noise_percent + 100 * NormalDist().inv_cdf(FOUND) * one.error / one.before


def _part(before: StepGroup, now: StepGroup, base: Run, new: Run, compared: int, parts: int) -> PartDiff | str:
    """Return the changes in one part, or a sentence if it is not comparable."""
    if before.unit != now.unit:
        return f"{now.phase}: tokens are counted in one of the two alone"
    if (before.cached is None) != (now.cached is None):
        return f"{now.phase}: how many positions are cached is said in one of the two alone"
    cached = None
    if before.cached is not None and now.cached is not None:
        cached = (before.cached + now.cached) / 2
        for part in (before, now):
            if not part.cached_least or not part.cached_most:
                continue
            if not (1 - ALIKE) * part.cached_least <= cached <= (1 + ALIKE) * part.cached_most:
                return (
                    f"{now.phase}: other KV lengths: {count(now.cached_least)} to {count(now.cached_most)} positions "
                    f"cached, {count(before.cached_least)} to {count(before.cached_most)} in the baseline"
                )
    at = (_at(cached, before.cached), _at(cached, now.cached))
    befores, afters = (_moved(part, off) for part, off in zip((before, now), at, strict=True))
    renamed = _renamed(befores, afters, base.kernels, new.kernels)
    resolution_us = max(run.clock_resolution_us or 0.0 for run in (base, new))
    shared = shared_ratio(befores, afters)
    places: list[PlaceDiff] = []
    for place, was_called in _pairs(befores, afters, renamed):
        found = _place(place, befores.get(was_called), afters.get(place), compared, resolution_us, shared)
        if place[0] and was_called != place and was_called[0]:
            found = replace(found, renamed_from=was_called[0][0])
        if place[0] and not place[1] and found.before and found.now and was_called[0]:
            kernels = base.kernels.get(was_called[0], ()), new.kernels.get(place[0], ())
            if kernels[0] != kernels[1]:
                found = replace(found, kernels=kernels)
        places.append(found)
    step = _place(WHOLE_STEP, befores[WHOLE_STEP], afters[WHOLE_STEP], parts * _OF_PART, 0.0, None)
    walls = [_moved_wall(part.wall_us, off) for part, off in zip((before, now), at, strict=True)]
    insides = [_shifted(part.inside_us, off).mean for part, off in zip((before, now), at, strict=True)]
    return PartDiff(
        before=before,
        now=now,
        cached=cached,
        places=tuple(sorted(places, key=lambda one: -one.delta_us)),
        step=step,
        wall=change(walls[0], walls[1], parts * _OF_PART),
        balance=_balance(befores, afters, walls, insides),
        shared=shared,
        typical=_typical(before, now, at, parts * _OF_PART),
    )


def _typical(before: StepGroup, now: StepGroup, at: Sequence[float], compared: int) -> Change | None:
    if before.typical_us is None or now.typical_us is None:
        return None
    found = change(_shifted(before.typical_us, at[0]), _shifted(now.typical_us, at[1]), compared)
    return found if found.before > 0 and found.now > 0 else None


def _balance(
    befores: Mapping[Place, PlaceTimes],
    afters: Mapping[Place, PlaceTimes],
    walls: Sequence[Figure],
    insides: Sequence[float],
) -> Balance:
    sides = []
    for places, wall, inside in zip((befores, afters), walls, insides, strict=True):
        between = places[BETWEEN_BRICKS, None].time.mean
        step = places[WHOLE_STEP].time.mean
        sides.append((wall.mean, inside - between, between, step - inside, wall.mean - step))
    before, now = sides
    wall_us, bricks_us, between_us, not_recorded_us, outside_us = zip(before, now, strict=True)
    return Balance(wall_us, bricks_us, between_us, not_recorded_us, outside_us)


def _place(
    place: Place,
    before: PlaceTimes | None,
    now: PlaceTimes | None,
    compared: int,
    resolution_us: float,
    shared: float | None,
) -> PlaceDiff:
    brick, layer = place
    if before is None or now is None:
        return PlaceDiff(brick, layer, before, now)
    mean = change(before.time, now.time, compared)
    judged = judged_change(before, now, compared, shared)
    p50, p99 = (
        change(then, is_now, compared) if then and is_now else None
        for then, is_now in ((before.p50, now.p50), (before.p99, now.p99))
    )
    is_short = p50 is not None and max(p50.before, p50.now) < READINGS * resolution_us
    return PlaceDiff(brick, layer, before, now, judged, mean, p50, p99, is_below_resolution=is_short)


def _pairs(
    befores: Mapping[Place, PlaceTimes], afters: Mapping[Place, PlaceTimes], renamed: Mapping[Brick, Brick]
) -> Iterator[tuple[Place, Place]]:
    """Yield each place except the whole step, with its new and its old name."""
    seen: set[Place] = {WHOLE_STEP}
    for brick, layer in afters:
        if (brick, layer) == WHOLE_STEP:
            continue
        was = (renamed.get(brick, brick) if brick else None), layer
        seen.add(was)
        yield (brick, layer), was
    for place in befores:
        if place not in seen:
            yield place, place


def _renamed(
    befores: Mapping[Place, PlaceTimes],
    afters: Mapping[Place, PlaceTimes],
    kernels_then: Mapping[Brick, tuple[str, ...]],
    kernels_now: Mapping[Brick, tuple[str, ...]],
) -> dict[Brick, Brick]:
    """Return the old name of each new brick, if a removed one ran the same kernels as often in the same layers."""

    def traits(
        places: Mapping[Place, PlaceTimes],
        others: Mapping[Place, PlaceTimes],
        kernels: Mapping[Brick, tuple[str, ...]],
    ) -> dict[object, list[Brick]]:
        there = {brick for brick, _ in others}
        found: dict[object, list[Brick]] = {}
        for (brick, layer), times in places.items():
            if brick and layer is None and brick not in there:
                layers = frozenset(in_layer for one, in_layer in places if one == brick and in_layer)
                key = (brick[1], kernels.get(brick, ()), layers, round(times.calls, 2))
                found.setdefault(key, []).append(brick)
        return found

    gone, new = traits(befores, afters, kernels_then), traits(afters, befores, kernels_now)
    return {new[key][0]: gone[key][0] for key in new if len(new[key]) == 1 and len(gone.get(key, ())) == 1}


def _moved(part: StepGroup, off: float) -> dict[Place, PlaceTimes]:
    """Return the places of a part, converted to `off` more cached positions than the mean."""
    if not off:
        return dict(part.places)
    found = {}
    for place, one in part.places.items():
        brick, layer = place
        # The median of the time between bricks is that of the layer or step around them.
        calls = part.places.get((None, layer), one) if brick == BETWEEN_BRICKS else one
        time = _shifted(one.time, off)
        if calls.p50:
            time = replace(time, median_us=_shifted(calls.p50, off).mean)
        typical, p50, p99 = (figure and _shifted(figure, off) for figure in (one.typical, one.p50, one.p99))
        found[place] = replace(one, time=time, typical=typical, p50=p50, p99=p99)
    return found


def _moved_wall(figure: Figure, off: float) -> Figure:
    """Like `_shifted`, but the figure's median is per unit, too."""
    by_us = off * figure.slope
    return replace(_shifted(figure, off), median_us=None if figure.median_us is None else figure.median_us + by_us)


def _shifted(figure: Figure, off: float) -> Figure:
    by = off * figure.slope_error
    own_error = None if figure.own_error is None else sqrt(figure.own_error**2 + by**2)
    error = sqrt(figure.error**2 + by**2)
    return replace(figure, mean=figure.mean + off * figure.slope, error=error, own_error=own_error)


def _at(cached: float | None, mean: float | None) -> float:
    return 0.0 if cached is None or mean is None else cached - mean


def _losses(base: Run, now: Run) -> str:
    for whose, run in (("", now), ("of the baseline ", base)):
        if run.lost_percent > MAX_LOST_PERCENT:
            return f"{percent(run.lost_percent)} of the records {whose}were lost"
    return ""


def _other_machine(base: Run, now: Run) -> str:
    for what, was, other in _machine(base.surroundings, now.surroundings):
        if was != other:
            return f"another {what}: {other or 'none'}, the baseline has {was or 'none'}"
    return _other_clock(base, now)


def _other_clock(base: Run, now: Run) -> str:
    """Return a text if a GPU ran at a different clock, else "" (also if unknown)."""
    if base.gpu_clock_mhz is None or now.gpu_clock_mhz is None:
        return ""
    if abs(now.gpu_clock_mhz - base.gpu_clock_mhz) <= ALIKE_CLOCK * base.gpu_clock_mhz:
        return ""
    return f"another GPU clock: {count(now.gpu_clock_mhz)} MHz, of the baseline {count(base.gpu_clock_mhz)}"


def _other_pace(base: Run, now: Run) -> str:
    """Return a text if the machine's own pace around the new run was outside its range in the baseline, else "".

    The pace is the time of constant work. "" also if unknown.
    """
    for where in ("cache", "memory"):
        was, is_now = (sorted(getattr(pace, f"{where}_us") for pace in run.paces) for run in (base, now))
        if was and is_now and (is_now[0] > (1 + ALIKE_PACE) * was[-1] or was[0] > (1 + ALIKE_PACE) * is_now[-1]):
            return (
                f"another pace of the machine itself: the same work in its {where} took {count(is_now[0])} to "
                f"{count(is_now[-1])} µs before and behind this run, {count(was[0])} to {count(was[-1])} of the "
                "baseline"
            )
    return ""


def _other_load(base: Run, now: Run) -> str:
    """Return a text if the processors were busier or less busy than before, else "" (also if unknown)."""
    if base.host_busy_percent is None or now.host_busy_percent is None:
        return ""
    if abs(now.host_busy_percent - base.host_busy_percent) <= ALIKE_LOAD_POINTS:
        return ""
    return f"processors busy {percent(now.host_busy_percent)} of the time, were {percent(base.host_busy_percent)}"


def _machine(then: Surroundings, now: Surroundings) -> Iterator[tuple[str, str, str]]:
    """Yield the properties of machine and sampling that change the time of the same program."""
    yield "host", then.host, now.host
    yield "GPU", ", ".join(then.devices), ", ".join(now.devices)
    yield "part of steps recorded, one in", count(then.sample_every), count(now.sample_every)


def _place_notes(part: PartDiff) -> Iterator[str]:
    for what, verdict in (("no longer there", "gone"), ("new", "new")):
        if names := [one.name for one in part.bricks if one.verdict == verdict]:
            yield f"{part.phase}: {what}: {', '.join(names)}"
    if ratio := part.machine_ratio:
        yield (
            f"{part.phase}: every brick takes {ratio:.2f} times as long: "
            "another clock, or another load of the machine, does that, too"
        )


def _part_notes(before: StepGroup, now: StepGroup, runs: tuple[int, int]) -> Iterator[str]:
    if before.warm_up or now.warm_up:
        yield f"{now.phase}: left out as warm-up: {counted(now.warm_up, 'step')}, {count(before.warm_up)} before"
    if now.failed or before.failed:
        failed = f"{counted(now.failed, 'step')} of {count(now.steps)}"
        yield f"{now.phase}: failed: {failed}, {count(before.failed)} of {count(before.steps)} before"
    then, is_now = before.steps // runs[0], now.steps // runs[1]  # per run, because each begins with an empty cache
    if before.cached is None and abs(then - is_now) > ALIKE_STEPS * max(then, is_now):
        steps = f"{counted(is_now, 'step')}, {count(then)} in the baseline"
        yield f"{now.phase}: {steps}, and how much was cached is not said: attention may take another time for that"


def _work(part: StepGroup) -> str:
    tokens, sequences = part.work
    what = [counted(part.steps, "step"), *([f"of about {counted(tokens, 'token')}"] if tokens else [])]
    what += [f"on {counted(sequences, 'sequence')}"] if sequences is not None else []
    return f"{part.phase} ({' '.join(what)})"


def _short(whose: str, run: Run, phase: str | None) -> Iterator[str]:
    """Yield the phases with too few steps to be compared."""
    compared = {part.phase for part in run.parts}
    for one in _nearly_enough(run, phase):
        if one.phase not in compared:
            yield f"{one.phase}: {counted(one.steps, 'step')} in {whose}, of {count(one.needed)} needed: left out"


def _nearly_enough(run: Run, phase: str | None) -> list[TooShort]:
    """Return for each phase the steps of the work that comes closest to the required number."""
    most: dict[str, TooShort] = {}
    for one in run.too_short:
        if phase in (None, one.phase) and (one.phase not in most or one.steps > most[one.phase].steps):
            most[one.phase] = one
    return list(most.values())


def _alone_short(base: Run, now: Run, phase: str | None) -> Iterator[TooShort]:
    """Yield phases with too few steps that take a larger share of the new run's time, with the increase."""
    for name in dict.fromkeys(one.phase for one in now.too_short if phase in (None, one.phase)):
        ours = [one for one in now.too_short if one.phase == name]
        before_us = sum(one.time_us for one in base.too_short if one.phase == name)
        share = before_us / base.time_us if before_us else 0.0
        grown_us = sum(one.time_us for one in ours) - share * now.time_us
        if grown_us > 0:
            yield replace(ours[0], steps=sum(one.steps for one in ours), time_us=grown_us)


def _too_little(base: Run, now: Run, phase: str | None) -> str:
    said = []
    for whose, run in (("the baseline", base), ("the new run", now)):
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
