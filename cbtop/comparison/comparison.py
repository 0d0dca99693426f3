"""Compare two snapshots by brick and layer, or tell why they cannot be compared."""

# Rules
# - Times of different work are not compared. If the model, batch or mix of phases differs, this is reported instead.
# - A different machine, backend or cache length is only noted, because the user may want to compare just that.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cbtop.comparison.baseline import BrickWork, PhaseFigures, PhaseTimes, Snapshot, Surroundings
from cbtop.comparison.call_counts import CallsChange, looks
from cbtop.comparison.items import BETWEEN_BRICKS, WHOLE_STEP, Brick, Place
from cbtop.comparison.noise import MIN_BLOCKS, Change, Figure, change
from cbtop.comparison.place_changes import place_change, shared_ratio
from cbtop.profiler.analysis.layers import MIN_PEERS
from cbtop.protocol.vocabulary import BrickCategory, BrickId
from cbtop.units import count, number, percent

# Mean tokens or sequences per step are equal within this relative difference. Any reported change is larger.
ALIKE = 0.02
ALIKE_SHARE = 0.05  # A phase's shares in all steps may differ by this.
ALIKE_CACHE = 0.10  # Cached positions may differ by this relative difference.
# With a larger percentage of lost records, a comparison is not valid. The verdict data-incomplete has the same limit.
MAX_LOST_PERCENT = 0.1
# Attention bricks that do not read the key-value cache, so its length does not affect them.
_READ_NO_CACHE = (BrickId.QKV_PROJECTION, BrickId.OUTPUT_PROJECTION, BrickId.ROPE_EMBEDDING)
_NO_CACHE = {brick.display_name for brick in _READ_NO_CACHE}


@dataclass(frozen=True, slots=True)
class PlaceChange:
    """The change of the time of a brick, a layer, or a brick in a layer, in µs per token (or step).

    If the number of calls did not change beyond noise, `change` is for the baseline's number. Otherwise it is for all
    calls, and `calls` is the change of their number.
    """

    brick: Brick | None  # None: a whole layer changed
    layer: str | None  # None: over all layers and outside of layers
    change: Change
    calls: CallsChange | None = None

    @property
    def name(self) -> str:
        """The name of the changed brick or layer on the screen, for example `DownProjection in Layer 5`."""
        return " in ".join(part for part in (self.brick[0] if self.brick else "", self.layer or "") if part)


@dataclass(frozen=True, slots=True)
class WorkChange:
    """The roofline point of a brick in the baseline, and the change of the brick's GFLOP/s."""

    intensity: float  # FLOP per byte
    gflops: float
    # Change of GFLOP/s in a typical call. None if the brick has several kinds of calls, or only the baseline runs it.
    change: Change | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two snapshots compared in one phase. With `why_not` they cannot be compared, and no change is known."""

    base: Snapshot
    now: Snapshot
    phase: str
    why_not: str = ""
    notes: tuple[str, ...] = ()  # differences that may be intended, such as another machine
    unit: str = "token"  # "token" or "step": the unit of times (µs per unit)
    step_us: Change | None = None
    tokens_per_sec: Change | None = None
    # the changes of bricks, of bricks in a layer, and of layers, the largest change first
    changes: tuple[PlaceChange, ...] = ()
    # whether both have about as many cached positions; False if unknown
    is_same_cache: bool = True

    @property
    def bricks(self) -> Mapping[Brick, Change]:
        """Each brick's change over all layers."""
        return {one.brick: one.change for one in self.changes if one.brick and one.layer is None}

    @property
    def layers(self) -> Mapping[str, Change]:
        """For each layer, the change of its whole time."""
        return {one.layer: one.change for one in self.changes if one.brick is None and one.layer is not None}

    @property
    def places(self) -> Mapping[Place, Change]:
        """The changes of whole layers, of bricks in a layer, and of bricks outside of layers."""
        inside = {one.brick for one in self.changes if one.layer is not None}
        return {
            (one.brick, one.layer): one.change
            for one in self.changes
            if one.layer is not None or one.brick not in inside
        }

    def median_us(self, phase: str, place: Place) -> float | None:
        """Return the median time (µs) of a call of `place` in the baseline: a brick, a layer, or a brick in a layer.

        None if unknown, or if the phase was not compared.
        """
        before = self.base.of(phase)
        if self.why_not or phase != self.phase or before is None or before.times is None:
            return None
        if place == WHOLE_STEP:
            return before.times.step_us.median_us
        found = before.times.places.get(place)
        return None if found is None else found.time.median_us

    @property
    def work(self) -> Mapping[Brick, WorkChange]:
        """Each brick with FLOP and bytes: its roofline point, and its change of GFLOP/s."""
        before, now = (found.times if (found := each.of(self.phase)) else None for each in (self.base, self.now))
        if self.why_not or before is None or now is None:
            return {}
        changes = {one.brick: one for one in self.changes if one.brick and one.layer is None}
        return {
            brick: WorkChange(
                then.intensity, then.gflops, _work_change(changes.get(brick), then, now.work.get(brick))
            )
            for brick, then in before.work.items()
        }

    @property
    def slower(self) -> list[PlaceChange]:
        """The bricks that became slower beyond noise, the largest change first."""
        return slower(self.changes, is_same_cache=self.is_same_cache)

    @property
    def worst_layer(self) -> PlaceChange | None:
        """The layer with the largest slowdown beyond noise.

        A longer cache may slow all layers. So if cached positions differ, only layers with a brick in `slower` count.
        """
        slower = self._slower_layers
        if not self.is_same_cache:
            slower = [one for one in self.slower if one.layer is not None]
        return max(slower, key=lambda one: one.change.delta, default=None)

    @property
    def slower_layers(self) -> int:
        """Number of layers that became slower beyond noise, even if a longer cache is the reason."""
        return len(self._slower_layers)

    @property
    def _slower_layers(self) -> list[PlaceChange]:
        return [one for one in self.changes if one.brick is None and _is_slower(one)]


def compare(base: Snapshot, now: Snapshot, phase: str, alike: int = 1) -> Comparison:
    """Return the changes in `phase` from the snapshot `base` to `now`.

    `alike` is how many baselines match `now` equally well.
    """
    before, after = base.of(phase), now.of(phase)
    why_not = _why_not(base, now, phase)
    if why_not or before is None or after is None or before.times is None or after.times is None:
        return Comparison(base, now, phase, why_not)
    is_same_cache = _alike(before.cached, after.cached, ALIKE_CACHE) and before.cached is not None
    chosen = [f"{count(alike)} processes of the baseline are alike, the first is taken"] if alike > 1 else []
    return Comparison(
        base,
        now,
        phase,
        notes=(
            *chosen,
            *differences(base.surroundings, now.surroundings),
            *_cache(before, after),
            *_only(before, after),
        ),
        unit=before.times.unit,
        step_us=change(before.times.step_us, after.times.step_us, 2),
        tokens_per_sec=_change(before.times.tokens_per_sec, after.times.tokens_per_sec, 2),
        changes=_changes(before.times, after.times, _units(before)),
        is_same_cache=is_same_cache,
    )


def rate_change(base: Snapshot, now: Snapshot, phase: str) -> tuple[Change | None, str]:
    """Return the change of tokens/s in `phase` from the snapshot `base` to `now`, or the reason why it is unknown."""
    before, after = base.of(phase), now.of(phase)
    why_not = _why_not(base, now, phase)
    if why_not or before is None or after is None or before.times is None or after.times is None:
        return None, why_not
    found = _change(before.times.tokens_per_sec, after.times.tokens_per_sec, 1)
    return found, "" if found else "steps that were not recorded left nothing, or not every step said its tokens"


def slower(changes: Iterable[PlaceChange], *, is_same_cache: bool = True) -> list[PlaceChange]:
    """Return the bricks that became slower beyond noise, the largest change first.

    If one layer has most of the change, the entry is the brick in it. A longer cache slows bricks that read it in
    every layer. So these are left out if the cache is longer, or of unknown length.
    """
    worst_cell: dict[Brick, PlaceChange] = {}
    layers: dict[Brick, int] = {}
    whole: dict[Brick, PlaceChange] = {}
    for one in changes:
        if one.brick is None:
            continue
        if one.layer is None:
            whole[one.brick] = one
            continue
        layers[one.brick] = layers.get(one.brick, 0) + 1
        if one.brick not in worst_cell or one.change.delta > worst_cell[one.brick].change.delta:
            worst_cell[one.brick] = one
    found = []
    for brick, all_of_it in whole.items():
        cell = worst_cell.get(brick)
        has_most = cell is not None and _is_most(cell.change, all_of_it.change)
        if cell and _is_slower(cell) and has_most and layers[brick] >= MIN_PEERS:
            found.append(cell)
        elif _is_slower(all_of_it) and (is_same_cache or not _reads_cache(brick)):
            found.append(all_of_it)
    return sorted(found, key=lambda one: -one.change.delta)


def _is_most(part: Change, whole: Change) -> bool:
    """Return whether the change `part` is more than half of `whole`. Changes relative to all other bricks and layers
    count, if known.
    """
    if part.own and whole.own:
        part, whole = part.own, whole.own
    return part.delta > whole.delta / 2


def baselines_of(bases: Sequence[Snapshot], now: Snapshot) -> list[Snapshot]:
    """Return the baselines that match `now` best. Empty only if `bases` is empty.

    Baselines of the same process come first, then baselines of the same model. Among these, the same rank comes
    first.
    """

    def is_far(base: Snapshot) -> tuple[bool, bool, bool]:
        other_rank = base.surroundings.rank != now.surroundings.rank
        return base.key != now.key, bool(other_model(base.surroundings, now.surroundings)), other_rank

    nearest = min(map(is_far, bases), default=None)
    return [base for base in bases if is_far(base) == nearest]


def _changes(before: PhaseTimes, after: PhaseTimes, units: float) -> tuple[PlaceChange, ...]:
    both = [place for place in before.places if place in after.places]
    compared = looks(*([each.places[place].calls for place in both] for each in (before, after)))
    shared = shared_ratio(before.places, after.places)
    moves = [place_change(before.places, after.places, place, compared, shared, units) for place in both]
    found = [
        PlaceChange(*place, move.judged, move.calls)
        for place, move in zip(both, moves, strict=True)
        if move.judged is not None
    ]
    return tuple(sorted(found, key=lambda one: -abs(one.change.delta)))


def _units(phase: PhaseFigures) -> float:
    """Return the mean units of work per step: tokens, or 1 if the unit is a step."""
    is_counted = phase.times is not None and phase.times.unit == "token"
    return phase.tokens or 1.0 if is_counted else 1.0


def _change(before: Figure | None, after: Figure | None, compared: int) -> Change | None:
    return None if before is None or after is None else change(before, after, compared)


def _work_change(place: PlaceChange | None, before: BrickWork, now: BrickWork | None) -> Change | None:
    """Return the change of a brick's GFLOP/s as a first-order approximation.

    `place` is the change of the brick's typical time.
    """
    found = place.change if place else None
    if not place or not found or found.medians_us is not None or now is None or min(found.before, found.now) <= 0:
        return None
    # The times are for the baseline's number of calls, unless it changed beyond noise. Compute the work for the same
    # number.
    calls = place.calls
    as_many = 1.0 if calls is None or calls.is_beyond_noise or calls.now <= 0 else calls.before / calls.now
    then, is_now = before.flops / found.before / 1e3, as_many * now.flops / found.now / 1e3
    return replace(found, before=then, now=is_now, half=is_now * found.half / found.now, error=0.0)


def _is_slower(one: PlaceChange) -> bool:
    return one.change.delta > 0 and one.change.is_beyond_noise


def _reads_cache(brick: Brick) -> bool:
    name, category = brick
    return brick == BETWEEN_BRICKS or (category is BrickCategory.ATTENTION and name not in _NO_CACHE)


def _why_not(base: Snapshot, now: Snapshot, phase: str) -> str:
    """Return why two snapshots cannot be compared in `phase`, or ""."""
    if other := other_model(base.surroundings, now.surroundings):
        return other
    if base.key == now.key and now.begin_ns == now.end_ns:
        return "these seconds are the baseline's own"
    before, after = base.of(phase), now.of(phase)
    if before is None:
        return f"the baseline has no {phase} steps"
    if after is None or after.times is None:
        blocks = after.blocks if after else 0
        return f"too little yet: {phase} steps in {count(blocks)} of the last seconds, {MIN_BLOCKS} are needed"
    if before.times is None:
        return f"the baseline is too short: {phase} steps in {count(before.blocks)} seconds, {MIN_BLOCKS} are needed"
    for what, then, is_now in (
        ("sequences a step", before.sequences, after.sequences),
        ("tokens a step", before.tokens, after.tokens),
    ):
        if not _alike(then, is_now, ALIKE):
            return f"another batch: {number(is_now)} {what}, the baseline has {number(then)}"
    for name in dict.fromkeys(one.phase for one in (*base.phases, *now.phases)):
        then_share, now_share = (found.share if (found := each.of(name)) else 0.0 for each in (base, now))
        if abs(then_share - now_share) > ALIKE_SHARE:
            return (
                f"another mix of phases: {percent(100 * now_share)} of the steps are {name}, "
                f"of the baseline {percent(100 * then_share)}"
            )
    if before.times.unit != after.times.unit:
        return "tokens are counted in one of the two alone"
    for whose, lost in (("", now.lost_percent), ("of the baseline ", base.lost_percent)):
        if lost > MAX_LOST_PERCENT:
            return f"{percent(lost)} of the records {whose}were lost"
    return ""


def other_model(
    base: Surroundings, now: Surroundings, base_name: str = "the baseline", *, any_type: bool = False
) -> str:
    """Return how the models differ, or "" if all reported properties are equal.

    With `any_type`, the type of the weights may differ, which `differences` reports.
    """
    if (base.model or base.program) != (now.model or now.program):
        return f"another model: {now.model or now.program}, {base_name} has {base.model or base.program}"
    for what, then, is_now in (
        ("architecture", base.architecture, now.architecture),
        ("type of weights", base.quantization, base.quantization if any_type else now.quantization),
        ("number of layers", base.layers, now.layers),
    ):
        if then != is_now:
            return f"another {what}: {is_now or 'not said'}, {base_name} has {then or 'not said'}"
    return ""


def differences(base: Surroundings, now: Surroundings) -> list[str]:
    """Return how the machines and settings of two snapshots differ. This may be intended."""
    differ = [
        ("type of weights", base.quantization, now.quantization),
        ("rank", base.rank, now.rank),
        ("host", base.host, now.host),
        ("GPU", ", ".join(base.devices), ", ".join(now.devices)),
        ("backend", base.backend, now.backend),
        ("threads", base.threads, now.threads),
        ("steps recorded, one in", base.sample_every, now.sample_every),
    ]
    said = [(what, *("n/a" if word in (None, "") else word for word in words)) for what, *words in differ]
    return [f"{what} {is_now}, was {then}" for what, then, is_now in said if then != is_now]


def _cache(before: PhaseFigures, after: PhaseFigures) -> list[str]:
    if _alike(before.cached, after.cached, ALIKE_CACHE):
        return []
    return [f"{count(after.cached)} positions cached, were {count(before.cached)}: attention takes its time by that"]


def _only(before: PhaseFigures, after: PhaseFigures) -> list[str]:
    """Return notes about bricks that only one of the snapshots has."""
    then, is_now = (set(each.times.bricks) if each.times else set() for each in (before, after))
    gone, new = (", ".join(sorted(name for name, _ in some)) for some in (then - is_now, is_now - then))
    return [*([f"no longer there: {gone}"] if gone else []), *([f"new: {new}"] if new else [])]


def _alike(before: float | None, after: float | None, part: float) -> bool:
    """Return whether two numbers differ by at most `part` (relative). Two unknown numbers are equal."""
    if before is None or after is None:
        return before is after
    return abs(after - before) <= part * max(before, after)
