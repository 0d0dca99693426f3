"""Tests of how a change of a brick is judged.

The time of a call decides. If the number of calls changes, the total time decides.
"""

from __future__ import annotations

import pytest

from cbtop.comparison.items import Brick, Place, PlaceTimes
from cbtop.comparison.noise import Figure
from cbtop.comparison.place_changes import Move, place_change, shared_ratio
from cbtop.protocol.vocabulary import BrickCategory

BRICK: Brick = ("Brick", BrickCategory.FFN)
PLACE: Place = (BRICK, None)


def times(us: float, calls: float, *, error: float = 0.0) -> PlaceTimes:
    """Return the figures of a brick: `calls` calls per step, each taking `us` µs with an error of 1 %."""
    return PlaceTimes(Figure(us * calls, 0.1, 60), Figure(us, 0.01 * us, 60), calls=Figure(calls, error, 60))


def moved(before: PlaceTimes, now: PlaceTimes, units: float = 1.0) -> Move:
    return place_change({PLACE: before}, {PLACE: now}, PLACE, 100, None, units)


def verdict(move: Move) -> str:
    assert move.judged is not None
    return "" if not move.judged.is_beyond_noise else "slower" if move.judged.delta > 0 else "faster"


def test_chance_in_the_number_of_calls_makes_nothing_slower() -> None:
    found = moved(times(100.0, 0.25, error=0.03), times(100.0, 0.33, error=0.03))
    assert verdict(found) == ""
    assert found.judged
    assert found.judged.now / found.judged.before == 1.0


def test_a_slower_call_is_slower_at_as_many_calls_as_before() -> None:
    found = moved(times(100.0, 0.3, error=0.03), times(180.0, 0.25, error=0.03), units=2.0)
    assert verdict(found) == "slower"
    assert found.judged
    assert found.call
    assert (found.judged.before, found.judged.now) == (pytest.approx(15.0), pytest.approx(27.0))  # µs a token
    assert (found.call.before, found.call.now) == (100.0, 180.0)
    assert 0 < found.judged.half / found.judged.before < 0.2


@pytest.mark.parametrize(("ratio", "word"), [(2.0, "slower"), (0.5, "faster")])
def test_more_calls_of_the_same_time_are_slower_and_fewer_are_faster(ratio: float, word: str) -> None:
    for error in (0.0, 0.02):
        found = moved(times(100.0, 0.4, error=error), times(100.0, 0.4 * ratio, error=error))
        assert verdict(found) == word
        assert found.calls
        assert found.calls.is_beyond_noise
        assert found.judged
        assert found.judged.now / found.judged.before == pytest.approx(ratio)
        assert found.call
        assert not found.call.is_beyond_noise


def test_a_brick_split_into_two_calls_of_half_the_time_is_not_slower() -> None:
    for before, now in ((times(100.0, 1.0), times(50.0, 2.0)), (times(50.0, 2.0), times(100.0, 1.0))):
        found = moved(before, now)
        assert verdict(found) == ""
        assert found.calls
        assert found.calls.text


def test_too_few_calls_for_a_median_are_not_judged_but_counted() -> None:
    few = PlaceTimes(Figure(1.0, 0.5, 60), calls=Figure(0.02, 0.01, 60))
    found = moved(times(100.0, 0.5, error=0.03), few)
    assert found.judged is None
    assert found.calls
    assert found.calls.is_beyond_noise
    assert moved(PlaceTimes(Figure(1.0, 0.5, 60)), few) == Move()


def of_layers(calls: dict[str, float], us: dict[str, float], outside: float = 0.0) -> dict[Place, PlaceTimes]:
    """Return the figures of a brick that runs in several layers. `calls` and `us` have its calls, and its µs per
    call, by layer.

    In addition, the brick has `outside` calls of 10 µs outside of layers.
    """
    total = sum(calls.values()) + outside
    mean = (sum(calls[layer] * us[layer] for layer in calls) + 10 * outside) / total
    cells: dict[Place, PlaceTimes] = {(BRICK, layer): times(us[layer], calls[layer], error=0.01) for layer in calls}
    return {PLACE: times(mean, total, error=0.02), **cells}


@pytest.mark.parametrize("outside", [0.0, 0.1])
def test_another_mix_of_layers_moves_no_brick_over_all_of_them(outside: float) -> None:
    us = {"Layer 0": 100.0, "Layer 1": 300.0}
    before = of_layers({"Layer 0": 0.50, "Layer 1": 0.50}, us, outside)
    now = of_layers({"Layer 0": 0.46, "Layer 1": 0.54}, us, outside)
    found = place_change(before, now, PLACE, 100, None, 1.0)
    assert found.call
    assert found.call.now / found.call.before == pytest.approx(1.0)
    # The times of both runs have an error of 1 %.
    assert found.call.error == pytest.approx(0.01 * 2**0.5 * found.call.now)
    longer = of_layers({"Layer 0": 0.46, "Layer 1": 0.54}, {"Layer 0": 100.0, "Layer 1": 400.0}, outside)
    found = place_change(before, longer, PLACE, 100, None, 1.0)
    assert found.call
    total_us = 0.5 * 100 + 0.5 * 300 + 10 * outside
    assert found.call.now / found.call.before == pytest.approx((total_us + 0.5 * 100) / total_us)


def test_calls_below_a_microsecond_have_the_mix_of_the_baseline_too() -> None:
    us = {"Layer 0": 0.1, "Layer 1": 0.3}
    sides = (of_layers({"Layer 0": 0.5, "Layer 1": 0.5}, us), of_layers({"Layer 0": 0.4, "Layer 1": 0.6}, us))
    found = place_change(*sides, PLACE, 100, None, 1.0)
    assert found.call
    assert found.call.now == pytest.approx(found.call.before)


def test_the_ratio_that_all_places_share_is_the_median_of_their_time() -> None:
    """Four bricks have 40 % of the time and do not change. Four other bricks take 1.2 times as long."""
    sides: list[dict[Place, PlaceTimes]] = [{}, {}]
    for at in range(8):
        for side, ratio in zip(sides, (1.0, 1.0 if at < 4 else 1.2), strict=True):
            side[BRICK, f"Layer {at}"] = times((40.0 if at < 4 else 60.0) * ratio, 1.0)
    assert shared_ratio(*sides) == pytest.approx(1.2)
    assert shared_ratio(*({place: side[place] for place in list(side)[:7]} for side in sides)) is None


def test_a_layer_that_only_one_run_knows_has_no_weight() -> None:
    us = {"Layer 0": 100.0, "Layer 1": 300.0}
    before, now = of_layers({"Layer 0": 0.5, "Layer 1": 0.02}, us), of_layers({"Layer 0": 0.5}, us)
    found = place_change(before, now, PLACE, 100, None, 1.0)
    assert found.call
    assert found.call.now / found.call.before == pytest.approx(1.0)
