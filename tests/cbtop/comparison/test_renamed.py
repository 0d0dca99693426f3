"""A renamed brick is recognised by its layers, its kernels and its number of calls."""

from __future__ import annotations

from cbtop.comparison.items import BETWEEN_BRICKS, WHOLE_STEP, Brick, Place, PlaceTimes
from cbtop.comparison.noise import Figure
from cbtop.comparison.renamed import renamed
from cbtop.protocol.vocabulary import BrickCategory

FFN, NORM = BrickCategory.FFN, BrickCategory.NORM
OLD, NEW, OTHER, THIRD = ("Old", FFN), ("New", FFN), ("Other", FFN), ("Third", FFN)
RMS: Brick = ("RmsNorm", NORM)


def places(*bricks: Brick, calls: float = 1.0, error: float = 0.0, layers: int = 3) -> dict[Place, PlaceTimes]:
    """Return the times of bricks in all layers, in the order of their first call.

    `calls` is the number per step and layer.
    """
    found: dict[Place, PlaceTimes] = {}
    for brick in bricks:
        time = Figure(10.0, 0.1, 60)
        found[brick, None] = PlaceTimes(time, calls=Figure(layers * calls, layers * error, 60))
        for layer in range(layers):
            found[brick, f"Layer {layer}"] = PlaceTimes(time, calls=Figure(calls, error, 60))
    return found


def test_a_brick_called_about_as_often_is_renamed_whatever_its_noise() -> None:
    rare = places(RMS, OLD, calls=0.31, error=0.03)
    assert renamed(rare, places(RMS, NEW, calls=0.28, error=0.03), {}, {}, 100) == {NEW: OLD}
    assert renamed(places(RMS, OLD), places(RMS, NEW), {}, {}, 100) == {NEW: OLD}


def test_a_layer_that_a_rare_brick_does_not_call_by_chance_tells_nothing() -> None:
    now = places(RMS, NEW, calls=0.01, error=0.005)
    del now[NEW, "Layer 1"]
    assert renamed(places(RMS, OLD, calls=0.01, error=0.005), now, {}, {}, 100) == {NEW: OLD}
    often = places(RMS, NEW)
    del often[NEW, "Layer 1"]
    assert renamed(places(RMS, OLD), often, {}, {}, 100) == {}


def test_another_category_kernel_or_number_of_calls_is_another_brick() -> None:
    before = places(RMS, OLD)
    assert renamed(before, places(RMS, ("New", NORM)), {}, {}, 100) == {}
    assert renamed(before, places(RMS, NEW), {OLD: ("gemv",)}, {NEW: ("gemm",)}, 100) == {}
    assert renamed(before, places(RMS, NEW), {OLD: ("gemv",)}, {NEW: ("gemv",)}, 100) == {NEW: OLD}
    assert renamed(before, places(RMS, NEW, calls=2.0), {}, {}, 100) == {}
    assert renamed(before, places(RMS, NEW, layers=2), {}, {}, 100) == {}


def test_of_several_alike_the_one_at_the_same_position_is_renamed() -> None:
    before, now = places(RMS, OLD, OTHER), places(RMS, NEW, THIRD)
    assert renamed(before, now, {}, {}, 100) == {NEW: OLD, THIRD: OTHER}
    assert renamed(places(OLD, RMS, OTHER), places(RMS, NEW), {}, {}, 100) == {NEW: OTHER}
    assert renamed(places(OLD, OTHER, RMS), places(NEW, RMS), {}, {}, 100) == {NEW: OLD}
    assert renamed(before, before, {}, {}, 100) == {}
    # Only NEW can be the new name of OLD.
    assert renamed(places(OLD, RMS), places(RMS, NEW), {}, {}, 100) == {NEW: OLD}
    assert renamed(places(RMS, OLD, layers=0), places(RMS, NEW, layers=0), {}, {}, 100) == {NEW: OLD}
    assert renamed(places(RMS, OLD), now, {}, {}, 100) == {NEW: OLD}
    assert renamed(before, places(RMS, NEW), {}, {}, 100) == {NEW: OLD}


def test_neither_time_between_bricks_nor_a_layer_or_step_is_a_renamed_brick() -> None:
    now = places(RMS, BETWEEN_BRICKS)
    assert renamed(places(RMS, ("Old", BrickCategory.OTHER)), now, {}, {}, 100) == {}
    assert (
        renamed(places(RMS, OLD), now | {WHOLE_STEP: now[RMS, None], (None, "Layer 0"): now[RMS, None]}, {}, {}, 100)
        == {}
    )
