"""Compare a group of steps, its bricks and its layers between two runs. All changes are derived from records."""

# Rule
# - If the cache lengths differ, times are compared at a length that both runs have reached. The time there is read
#   from a straight line through each run's blocks.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isclose, sqrt
from statistics import NormalDist, median

from cbtop.comparison.call_counts import CallsChange, calls_change, looks, new_calls
from cbtop.comparison.comparison import ALIKE, PlaceChange, slower
from cbtop.comparison.drift import Drift, drift_of
from cbtop.comparison.items import BETWEEN_BRICKS, WHOLE_STEP, Brick, Place, PlaceTimes
from cbtop.comparison.noise import READINGS, Change, Figure, change
from cbtop.comparison.other_batch import other_batch
from cbtop.comparison.place_changes import place_change, shared_ratio
from cbtop.comparison.renamed import renamed
from cbtop.comparison.runs import Run, StepGroup
from cbtop.profiler.analysis.layers import MIN_PEERS
from cbtop.units import count, counted

FOUND = 0.95  # Probability of detecting a change of the size that is called detectable.
ALIKE_UNITS = 1e-6  # Smaller relative differences between the tokens per step are rounding errors.
# If a slow machine makes all bricks slower, the ratios of their times differ by less than this (relative).
ALIKE_RATIOS = 0.05
# Figures that are tested together, other than bricks and layers: a step, a unit, a typical unit, and the drift.
_OF_PART = 4


@dataclass(frozen=True, slots=True)
class PlaceDiff:
    """The times of one brick, layer, or brick in a layer in the old and the new run.

    `change` decides the verdict. It is the change of a typical call in µs per unit, with the old number of calls. If
    the calls per step (`calls`) changed beyond noise, it is the change of all calls. `call` is the change of a call
    in µs, and `mean` of the time per unit. `before` is None if it is new, `now` is None if it was removed.
    """

    brick: Brick | None
    layer: str | None
    before: PlaceTimes | None
    now: PlaceTimes | None
    change: Change | None = None
    mean: Change | None = None
    call: Change | None = None
    calls: CallsChange | None = None
    p50: Change | None = None
    p99: Change | None = None
    renamed_from: str = ""
    # names of the brick's kernels before and now; None if they are equal
    kernels: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    is_below_resolution: bool = False

    @property
    def name(self) -> str:
        """The name of the brick or layer on the screen, for example `DownProjection in Layer 5`."""
        return " in ".join(part for part in (self.brick[0] if self.brick else "", self.layer or "") if part) or "step"

    @property
    def delta_us(self) -> float:
        """The additional time per unit of work. If it is new or removed, its whole time."""
        return (self.now.time.mean if self.now else 0.0) - (self.before.time.mean if self.before else 0.0)

    @property
    def moved_by(self) -> str:
        """A text if mean and typical time changed in opposite directions, else ""."""
        is_against = self.change is not None and self.change.delta * self.delta_us < 0
        if is_against and self.calls and not self.calls.is_exact:
            return " by the mean, which the number of calls moves"
        return " by the mean, which a few long calls move" if is_against else ""

    @property
    def decisive(self) -> Change | None:
        """The change that decides the verdict: `change` itself, or relative to all others."""
        return self.change and self.change.decisive

    @property
    def verdict(self) -> str:
        """The verdict: `slower`, `faster`, `new`, `gone`, or "" within noise and the clock's resolution.

        A brick or layer with few calls may have none in a run by chance. It is then neither new nor gone.
        """
        if self.before is None or self.now is None:
            is_known = self.calls is None or self.calls.is_beyond_noise
            return "" if not is_known else "gone" if self.now is None else "new"
        if self.change is None or self.is_below_resolution or not self.change.is_beyond_noise:
            return ""
        return "slower" if self.change.delta > 0 else "faster"


@dataclass(frozen=True, slots=True)
class Balance:
    """The parts of the wall-clock time per unit of work, in µs before and now. `wall` is the sum of the others."""

    wall: tuple[float, float]
    bricks: tuple[float, float]
    between_bricks: tuple[float, float]
    # What recorded steps do not explain: the mean time of all steps minus the mean time of steps with recorded
    # bricks.
    not_recorded: tuple[float, float]
    between_steps: tuple[float, float]

    @property
    def off_us(self) -> float:
        """The change of `wall` minus the changes of its parts: 0, except for rounding."""
        parts = (self.bricks, self.between_bricks, self.not_recorded, self.between_steps)
        return (self.wall[1] - self.wall[0]) - sum(now - before for before, now in parts)


@dataclass(frozen=True, slots=True)
class PartDiff:
    """A group of similar steps in both runs, compared.

    If both report their cached positions, all times are converted to `cached` positions.
    """

    before: StepGroup
    now: StepGroup
    cached: float | None
    # bricks, bricks in layers, and layers, sorted by additional time per unit (token or step), the largest first
    places: tuple[PlaceDiff, ...]
    step: PlaceDiff
    wall: Change  # change of the wall-clock time in µs per unit of work
    balance: Balance
    # Factor by which all bricks in layers became slower. The machine or the whole program is the cause.
    shared: float | None = None
    # Change of the typical step and the time before it, in µs per unit; None if unknown
    typical: Change | None = None
    drift: Drift | None = None  # change of the drift inside the runs; None if unknown
    batch_name: str = ""  # name of the group, such as `decode, batch 6`, or "" if it is the phase's only one

    @property
    def phase(self) -> str:
        return self.now.phase

    @property
    def name(self) -> str:
        """The phase, with the batch if it has several groups of steps: `decode, batch 6`."""
        return self.batch_name or self.phase

    @property
    def work(self) -> str:
        """The new run's steps as text, such as `decode (240 steps of about 8 tokens)`."""
        return work_text(self.now)

    @property
    def unit(self) -> str:
        return self.now.unit

    @property
    def tokens_per_sec(self) -> tuple[float, float] | None:
        """Tokens per second of these steps' wall-clock time, before and now. None if not reported."""
        return (1e6 / self.wall.before, 1e6 / self.wall.now) if self.unit == "token" else None

    @property
    def training(self) -> dict[str, Change]:
        """The change of each part of a training step, in the median step (µs)."""
        both = [name for name in self.now.training if name in self.before.training]
        return {name: change(self.before.training[name], self.now.training[name], len(both)) for name in both}

    @property
    def bricks(self) -> list[PlaceDiff]:
        """For each brick, its times over all layers."""
        return [one for one in self.places if one.brick and one.layer is None]

    @property
    def layers(self) -> list[PlaceDiff]:
        return [one for one in self.places if one.brick is None]

    @property
    def cells(self) -> list[PlaceDiff]:
        """For each brick in each layer, its times."""
        return [one for one in self.places if one.brick and one.layer]

    @property
    def slower(self) -> list[PlaceDiff]:
        """The bricks that became slower beyond noise, the largest change first.

        If one layer has most of the change, the entry is the brick in it.
        """
        by_place = {(one.brick, one.layer): one for one in self.places}
        known = [
            PlaceChange(one.brick, one.layer, one.change)
            for one in self.places
            if one.change and not one.is_below_resolution
        ]
        return [by_place[one.brick, one.layer] for one in slower(known)]

    @property
    def guilty(self) -> list[PlaceDiff]:
        """The entries of `slower` that also became slower relative to all other bricks and layers, or for which this
        is unknown.
        """
        return [one for one in self.slower if one.change and (one.change.own is None or one.change.is_beyond_others)]

    @property
    def is_slower(self) -> bool:
        """Whether the wall-clock time per unit (token or step) increased by more than noise."""
        return self.wall.is_beyond_noise and self.wall.delta > 0

    @property
    def is_typically_slower(self) -> bool:
        """Whether a typical step, with the time before it, became longer beyond noise."""
        return self.typical is not None and self.typical.is_beyond_noise and self.typical.delta > 0

    @property
    def more_failed_percent(self) -> float:
        """The increase of the share of failed steps, in percentage points."""
        return 100 * (self.now.failed / self.now.steps - self.before.failed / self.before.steps)

    @property
    def is_longer_in_the_mean(self) -> bool:
        """Whether only a few steps became longer: the mean time per unit grew beyond noise, and the typical time did
        not.
        """
        return not self.is_slower and (self.wall.percent or 0.0) > (self.wall.noise_percent or inf)

    @property
    def known(self) -> list[PlaceDiff]:
        """The bricks and layers with a known change."""
        return [one for one in self.places if one.change is not None and not one.is_below_resolution]

    @property
    def new(self) -> list[PlaceDiff]:
        """The new run's bricks that the old one lacks, longest first."""
        return [one for one in self.bricks if one.verdict == "new"]

    @property
    def machine_ratio(self) -> float | None:
        """The common factor of all bricks' times. None unless all changed beyond noise and about alike.

        The cause may be the machine's clock or load, or the program.
        """
        ratios = [one.change.now / one.change.before for one in self.bricks if one.change and one.verdict]
        timed = [one for one in self.bricks if one.p50 and not one.is_below_resolution]
        if len(timed) < MIN_PEERS or not all(one.verdict in ("slower", "faster") for one in timed):
            return None
        return median(ratios) if max(ratios) <= min(ratios) * (1 + ALIKE_RATIOS) else None

    @property
    def is_shared(self) -> bool:
        """Whether all bricks became slower by the same factor, which then explains the change of the time per unit.

        The cause may be the machine's clock or load, or the program.
        """
        if self.shared is None or self.shared <= 1:
            return False
        changes = [one.change for one in self.known if one.brick and one.brick != BETWEEN_BRICKS and one.change]
        if any(change.own is None or change.own.is_beyond_noise for change in changes):
            return False
        off = abs(self.wall.now / self.shared - self.wall.before)
        return off <= self.wall.before * (self.wall.noise_percent or 0.0) / 100

    def findable(self, places: Sequence[PlaceDiff]) -> float | None:
        """Return the smallest change in percent that is detected with probability FOUND: the median over `places`
        (bricks and layers).
        """
        found = [findable_percent(one.change) for one in places if one.change and not one.is_below_resolution]
        known = [one for one in found if one is not None]
        return median(known) if known else None


def findable_percent(one: Change) -> float | None:
    """Return the smallest change that is detected with probability FOUND, in percent of the old value."""
    if one.noise_percent is None or one.before <= 0:
        return None
    if one.own and (beside := findable_percent(one.own)) is not None:
        return min(beside, findable_percent(replace(one, own=None)) or beside)
    return one.noise_percent + 100 * NormalDist().inv_cdf(FOUND) * one.error / one.before


def compared_figures(before: StepGroup, now: StepGroup) -> int:
    """Return how many figures of two groups of steps are tested together, to keep false alarms rare."""
    names = before.places.keys() | now.places.keys()
    sides = ([part.places[name].calls if name in part.places else None for name in names] for part in (before, now))
    return looks(*sides)


def part_diff(before: StepGroup, now: StepGroup, base: Run, new: Run, compared: int, parts: int) -> PartDiff | str:
    """Compare one group of steps of two runs. Return the changes, or why it cannot be compared."""
    if before.unit != now.unit:
        return f"{now.phase}: tokens are counted in one of the two alone"
    if (before.cached is None) != (now.cached is None):
        return f"{now.phase}: how many positions are cached is said in one of the two alone"
    if why_not := other_batch(before, now, parts):
        return f"{now.phase}: another batch: {why_not}"
    cached = None
    if before.cached is not None and now.cached is not None:
        cached = (before.cached + now.cached) / 2
        for part in (before, now):
            if not covers(part, cached):
                return (
                    f"{now.phase}: other KV lengths: {count(now.cached_least)} to {count(now.cached_most)} positions "
                    f"cached, {count(before.cached_least)} to {count(before.cached_most)} in the baseline"
                )
    at = (_at(cached, before.cached), _at(cached, now.cached))
    befores, afters = (_moved(part, off) for part, off in zip((before, now), at, strict=True))
    old_names = renamed(befores, afters, base.kernels, new.kernels, compared)
    resolution_us = max(run.clock_resolution_us or 0.0 for run in (base, new))
    shared = shared_ratio(befores, afters)
    units, steps = (before.units_a_step, now.units_a_step), (before.steps, now.steps)
    places: list[PlaceDiff] = []
    for place, was_called in _pairs(befores, afters, old_names):
        found = _place(place, was_called, befores, afters, compared, resolution_us, shared, units, steps)
        if place[0] and was_called != place and was_called[0]:
            found = replace(found, renamed_from=was_called[0][0])
        if place[0] and not place[1] and found.before and found.now and was_called[0]:
            kernels = base.kernels.get(was_called[0], ()), new.kernels.get(place[0], ())
            if kernels[0] != kernels[1]:
                found = replace(found, kernels=kernels)
        places.append(found)
    step = _place(WHOLE_STEP, WHOLE_STEP, befores, afters, parts * _OF_PART, 0.0, None, units, steps)
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
        drift=drift_of(before.thirds, now.thirds, before.places[WHOLE_STEP].p50, parts * _OF_PART),
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
    was_called: Place,
    befores: Mapping[Place, PlaceTimes],
    afters: Mapping[Place, PlaceTimes],
    compared: int,
    resolution_us: float,
    shared: float | None,
    units: tuple[float, float],
    steps: tuple[int, int],
) -> PlaceDiff:
    """Return the change of a brick or layer.

    `units` per step and `steps` have a value for the old run and one for the new run.
    """
    brick, layer = place
    before, now = befores.get(was_called), afters.get(place)
    if before is None or now is None:
        then, is_now = (one.calls if one else None for one in (before, now))
        calls = calls_change(then, is_now, compared) if then or is_now else None
        if before is None and is_now:
            calls = new_calls(is_now, compared, steps)
        return PlaceDiff(brick, layer, before, now, calls=calls)
    mean = change(before.time, now.time, compared)
    move = place_change(befores, afters, place, compared, shared, units[0], was_called)
    p50, p99 = (
        change(then, is_now, compared) if then and is_now else None
        for then, is_now in ((before.p50, now.p50), (before.p99, now.p99))
    )
    is_short = p50 is not None and max(p50.before, p50.now) < READINGS * resolution_us
    judged = move.judged and _per_unit(move.judged, units)
    return PlaceDiff(
        brick, layer, before, now, judged, mean, move.call, move.calls, p50, p99, is_below_resolution=is_short
    )


def _per_unit(one: Change, units: tuple[float, float]) -> Change:
    """Return the change `one`, limited by the change of the time per unit. Calls with more tokens take longer, so a
    longer call alone must not exceed noise.
    """
    if one.medians_us or isclose(*units, rel_tol=ALIKE_UNITS):
        return one
    return replace(one, medians_us=(one.before, one.now * units[0] / units[1]))


def _pairs(
    befores: Mapping[Place, PlaceTimes], afters: Mapping[Place, PlaceTimes], renamed: Mapping[Brick, Brick]
) -> Iterator[tuple[Place, Place]]:
    """Yield (new place, old place) of each brick and layer of a group, without the whole step."""
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


def covers(part: StepGroup, cached: float) -> bool:
    """Return whether a group has steps with about `cached` positions. True if it does not report its range."""
    if part.cached_least is None or part.cached_most is None:
        return True
    return (1 - ALIKE) * part.cached_least <= cached <= (1 + ALIKE) * part.cached_most


def moved_to(part: StepGroup, cached: float | None) -> StepGroup:
    """Return a copy of a group with times converted to `cached` positions (None: unchanged)."""
    off = _at(cached, part.cached)
    if not off:
        return part
    return replace(
        part,
        cached=cached,
        wall_us=_moved_wall(part.wall_us, off),
        inside_us=_shifted(part.inside_us, off),
        typical_us=part.typical_us and _shifted(part.typical_us, off),
        places=_moved(part, off),
    )


def _moved(part: StepGroup, off: float) -> dict[Place, PlaceTimes]:
    """Return a group's times of bricks and layers, converted to `off` more cached positions than its mean."""
    if not off:
        return dict(part.places)
    found = {}
    for place, one in part.places.items():
        brick, layer = place
        # The time between bricks has no calls. Use the median call of the layer or step around it.
        calls = part.places.get((None, layer), one) if brick == BETWEEN_BRICKS else one
        time = _shifted(one.time, off)
        if calls.p50:
            time = replace(time, median_us=_shifted(calls.p50, off).mean)
        call, p50, p99 = (figure and _shifted(figure, off) for figure in (one.call, one.p50, one.p99))
        if call and call.median_us is not None:
            call = replace(call, median_us=time.median_us)
        found[place] = replace(one, time=time, call=call, p50=p50, p99=p99)
    return found


def _moved_wall(figure: Figure, off: float) -> Figure:
    """Convert a figure to `off` more cached positions.

    Its median is per unit (token or step), like its mean, so both use the same slope.
    """
    by_us = off * figure.slope
    return replace(_shifted(figure, off), median_us=None if figure.median_us is None else figure.median_us + by_us)


def _shifted(figure: Figure, off: float) -> Figure:
    by = off * figure.slope_error
    own_error = None if figure.own_error is None else sqrt(figure.own_error**2 + by**2)
    error = sqrt(figure.error**2 + by**2)
    return replace(figure, mean=figure.mean + off * figure.slope, error=error, own_error=own_error)


def _at(cached: float | None, mean: float | None) -> float:
    return 0.0 if cached is None or mean is None else cached - mean


def work_text(part: StepGroup) -> str:
    """Format a group of steps as text: `decode (240 steps of about 8 tokens)`."""
    tokens, sequences = part.work
    what = [counted(part.steps, "step"), *([f"of about {counted(tokens, 'token')}"] if tokens else [])]
    what += [f"on {counted(sequences, 'sequence')}"] if sequences is not None else []
    return f"{part.phase} ({' '.join(what)})"
