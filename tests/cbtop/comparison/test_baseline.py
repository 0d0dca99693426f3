"""Tests of a stored baseline.

It has the duration of the baseline, and the kinds of its places (the step, bricks, and bricks of a layer).
"""

from __future__ import annotations

from cbtop.comparison.baseline import PhaseTimes, Snapshot
from cbtop.comparison.items import WHOLE_STEP, Place, PlaceTimes
from cbtop.comparison.noise import Figure
from cbtop.protocol.vocabulary import BrickCategory
from tests.cbtop.comparison.made_runs import AT

DOWN = ("DownProjection", BrickCategory.FFN)


def test_times_are_of_bricks_of_bricks_in_a_layer_and_of_layers() -> None:
    names: list[Place] = [WHOLE_STEP, (DOWN, None), (DOWN, "Layer 0"), (None, "Layer 0")]
    times = {name: Figure(float(at), 0.1, 20) for at, name in enumerate(names)}
    found = PhaseTimes("token", times[WHOLE_STEP], None, {name: PlaceTimes(one) for name, one in times.items()})
    assert found.bricks == {DOWN: times[DOWN, None]}
    assert found.cells == {(DOWN, "Layer 0"): times[DOWN, "Layer 0"]}
    assert found.layers == {"Layer 0": times[None, "Layer 0"]}


def test_a_baseline_covers_the_seconds_from_its_begin_to_its_end() -> None:
    found = Snapshot("here:1", AT, (), 1_000_000_000, 3_500_000_000, None, 0.0)
    assert found.covers_s == 2.5
    assert found.of("decode") is None
