"""Find bricks that only have another name in the new run."""

# Rule
# - A new brick is a renamed one if a removed brick ran the same kernels in the same layers, and about as often. If
#   several match, their positions in the order of bricks decide.

from __future__ import annotations

from collections.abc import Mapping

from cbtop.comparison.call_counts import calls_change
from cbtop.comparison.items import BETWEEN_BRICKS, Brick, Place, PlaceTimes

Places = Mapping[Place, PlaceTimes]
Kernels = Mapping[Brick, tuple[str, ...]]


def renamed(
    befores: Places, afters: Places, kernels_then: Kernels, kernels_now: Kernels, compared: int
) -> dict[Brick, Brick]:
    """Return each renamed brick's old name. `compared` figures are tested together."""
    then, now = _bricks(befores), _bricks(afters)
    gone, new = [brick for brick in then if brick not in now], [brick for brick in now if brick not in then]
    alike = [
        (was, brick)
        for was in gone
        for brick in new
        if was[1] is brick[1]
        and kernels_then.get(was, ()) == kernels_now.get(brick, ())
        and _is_called_alike(befores, afters, was, brick, compared)
    ]
    found = {}
    for was, brick in alike:
        rivals = [pair for pair in alike if pair != (was, brick) and (pair[0] == was or pair[1] == brick)]
        if not rivals or _slot(then, was, now) == _slot(now, brick, then):
            found[brick] = was
    return found


def _bricks(places: Places) -> list[Brick]:
    return [brick for brick, layer in places if brick and layer is None and brick != BETWEEN_BRICKS]


def _is_called_alike(befores: Places, afters: Places, was: Brick, brick: Brick, compared: int) -> bool:
    """Whether two bricks are called equally often in the same layers. By chance, a layer may have no calls."""
    then, now = _by_layer(befores, was), _by_layer(afters, brick)
    for layer in then.keys() | now.keys():
        sides = [times.calls if (times := each.get(layer)) else None for each in (then, now)]
        if any(sides) and calls_change(sides[0], sides[1], compared).is_beyond_noise:
            return False
    return True


def _by_layer(places: Places, brick: Brick) -> dict[str | None, PlaceTimes]:
    return {layer: one for (name, layer), one in places.items() if name == brick}


def _slot(order: list[Brick], brick: Brick, other: list[Brick]) -> tuple[Brick | None, int]:
    """Return a brick's position in `order` as (nearest earlier brick that is also in `other`, distance from it).
    None: no such brick exists.
    """
    at = order.index(brick)
    known = max((before for before in range(at) if order[before] in other), default=-1)
    return (order[known] if known >= 0 else None), at - known
