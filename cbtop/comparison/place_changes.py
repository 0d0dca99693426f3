"""The change of a brick or layer between two runs: of the time of its calls, and of the number of calls per step."""

# Rules
# - If the calls per step did not change beyond noise, the typical call is judged. So a chance difference in calls
#   does not look like a slowdown.
# - Otherwise the time of all calls is judged. So a brick that was split into two calls of half the time does not look
#   slower.

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import sqrt

from cbtop.comparison.call_counts import CallsChange, calls_change
from cbtop.comparison.items import BETWEEN_BRICKS, MIN_SHARING, Place, PlaceTimes, tells_pace
from cbtop.comparison.noise import Change, Figure, change

Places = Mapping[Place, PlaceTimes]
_ROUNDING = 1e-6  # Smaller differences between calls per step are rounding errors.


@dataclass(frozen=True, slots=True)
class Move:
    """The change of a brick or layer between two runs. None if a run has too few calls.

    `judged` is in µs per unit. It assumes the baseline's number of calls. If this number changed beyond noise, each
    run's own number is used. `call` is the change of a typical call in µs.
    """

    judged: Change | None = None
    call: Change | None = None
    calls: CallsChange | None = None


def shared_ratio(befores: Places, afters: Places) -> float | None:
    """Return the common factor of all bricks' times, which is attributed to the machine.

    It is the median over bricks in layers, weighted by time. None for fewer than MIN_SHARING, because one slow brick
    would then look like a slow machine.
    """
    ratios = sorted(
        (now.call.mean / was.call.mean, was.call.mean * was.calls.mean)
        for place, now in afters.items()
        if tells_pace(place)
        and (was := befores.get(place))
        and now.call
        and was.call
        and was.calls
        and was.call.mean > 0
    )
    if len(ratios) < MIN_SHARING:
        return None
    # Weighted by time, because cache pollution slows down many bricks that take little of the time.
    reached_us = list(accumulate(us for _, us in ratios))
    return ratios[bisect_left(reached_us, reached_us[-1] / 2)][0]


def place_change(
    befores: Places,
    afters: Places,
    place: Place,
    compared: int,
    shared: float | None,
    units: float,
    was: Place | None = None,
) -> Move:
    """Return the change of a brick or layer between two runs.

    `was` is its name in the baseline, if it was renamed. `compared` figures are tested together. `shared` is the
    common factor of all times. `units` is the number of tokens or steps per step of the baseline.
    """
    before, now = fixed_mix(befores, afters, place, was or place)
    if before.calls is None or now.calls is None:
        return Move()
    calls = calls_change(before.calls, now.calls, compared)
    if before.call is None or now.call is None:
        return Move(calls=calls)
    call = change(before.call, now.call, compared, shared)
    judged = _times(call, before.calls.mean / units)
    if calls.is_beyond_noise:
        cost = change(_cost(before.call, before.calls), _cost(now.call, now.calls), compared, shared)
        judged = _times(cost, 1 / units)
    return Move(judged, call, calls)


def fixed_mix(befores: Places, afters: Places, place: Place, was: Place) -> tuple[PlaceTimes, PlaceTimes]:
    """Return the times of a brick or layer in both runs. Typical calls of a brick over several layers have the same
    weights in both.

    A layer's weight is its number of calls in the baseline. One weight is for all other calls: outside of layers, or
    in layers with too few calls in a run.
    """
    before, now = befores[was], afters[place]
    brick, layer = place
    if brick is None or layer or brick == BETWEEN_BRICKS:
        return before, now
    layers = [one for name, one in befores if name == was[0] and one]
    cells = [(befores[was[0], one], afters.get((brick, one))) for one in layers]
    both = [(then, is_now) for then, is_now in cells if then.call and is_now and is_now.call]
    sides = [_mix(before, [then for then, _ in both]), _mix(now, [is_now for _, is_now in both])]
    if not both or None in sides:
        return before, now
    weights = [weight for weight, _ in sides[0] or ()]
    if min(rest := [side[-1][0] for side in sides if side]) <= _ROUNDING * max(rest[0], 1.0):
        weights[-1] = 0.0
    found = []
    for times, side in zip((before, now), sides, strict=True):
        us = [mean_us for _, mean_us in side or ()]
        mean_us = sum(weight * one for weight, one in zip(weights, us, strict=True)) / sum(weights)
        found.append(replace(times, call=_at_mean(times.call, mean_us)))
    return found[0], found[1]


def _mix(whole: PlaceTimes, cells: list[PlaceTimes]) -> list[tuple[float, float]] | None:
    """Return (calls per step, µs of a call) for each of `cells`, and for the rest of the brick."""
    if whole.call is None or whole.calls is None:
        return None
    found = [(one.calls.mean, one.call.mean) for one in cells if one.calls and one.call]
    rest = whole.calls.mean - sum(calls for calls, _ in found)
    rest_us = whole.calls.mean * whole.call.mean - sum(calls * us for calls, us in found)
    return [*found, (rest, rest_us / rest if rest > _ROUNDING else 0.0)]


def _at_mean(figure: Figure | None, mean: float) -> Figure | None:
    if figure is None or figure.mean <= 0 or mean <= 0:
        return figure
    by = mean / figure.mean
    return replace(
        figure,
        mean=mean,
        error=figure.error * by,
        scatter=figure.scatter * by,
        own_error=None if figure.own_error is None else figure.own_error * by,
        own_scatter=figure.own_scatter * by,
    )


def _cost(call: Figure, calls: Figure) -> Figure:
    """Return the time of all calls in µs per step. Its error combines two errors: of the number of calls, and of the
    time of a call.
    """

    def both(of_call: float, of_calls: float) -> float:
        return sqrt((of_call * calls.mean) ** 2 + (of_calls * call.mean) ** 2)

    return replace(
        call,
        mean=call.mean * calls.mean,
        error=both(call.error, calls.error),
        blocks=min(call.blocks, calls.blocks) if calls.error else call.blocks,
        median_us=None,
        scatter=both(call.scatter, calls.scatter),
        own_error=None if call.own_error is None else both(call.own_error, calls.error),
        own_scatter=both(call.own_scatter, calls.scatter),
    )


def _times(one: Change, by: float) -> Change:
    own = None if one.own is None else _times(one.own, by)
    return replace(one, before=one.before * by, now=one.now * by, half=one.half * by, error=one.error * by, own=own)
