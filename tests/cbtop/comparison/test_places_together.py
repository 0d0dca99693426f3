"""Figures of a brick in several runs are merged if enough runs have them.

A run without the brick counts as 0 calls.
"""

from __future__ import annotations

import pytest

from cbtop.comparison.items import Brick, Place, PlaceTimes
from cbtop.comparison.noise import Figure
from cbtop.comparison.places_together import places_together
from cbtop.protocol.vocabulary import BrickCategory

ALWAYS: Place = (("Always", BrickCategory.FFN), None)
RARE_BRICK: Brick = ("Rare", BrickCategory.FFN)
RARE: Place = (RARE_BRICK, None)


def times(us: float, calls: float, *, error: float = 0.0, is_call_known: bool = True) -> PlaceTimes:
    call = Figure(us, 0.01 * us, 60, own_error=0.005 * us) if is_call_known else None
    return PlaceTimes(Figure(us * calls, 0.1, 60, own_error=0.05), call, call, None, Figure(calls, error, 60))


def test_a_place_that_one_of_four_runs_does_not_call_is_the_mean_of_all() -> None:
    runs = [{ALWAYS: times(100.0 + at, 1.0), RARE: times(50.0 + at, 0.04, error=0.01)} for at in range(3)]
    runs.append({ALWAYS: times(103.0, 1.0)})
    found = places_together(runs, [1.0, 1.01, 0.99, 1.0], 3)
    assert list(found) == [ALWAYS, RARE]
    rare = found[RARE]
    assert rare.call
    assert rare.calls
    assert (rare.call.mean, rare.call.runs) == (pytest.approx(51.0), 3)
    assert rare.calls.mean == pytest.approx(0.03)
    assert rare.calls.scatter == pytest.approx(0.02)
    assert rare.time.mean == pytest.approx(sum(one[RARE].time.mean for one in runs[:3]) / 4)
    always = found[ALWAYS].calls
    assert always is not None
    assert (always.mean, always.error, always.scatter) == (1.0, 0.0, 0.0)


def test_a_figure_that_two_of_four_runs_know_is_not_known() -> None:
    runs = [{ALWAYS: times(100.0, 1.0), RARE: times(50.0, 0.04, error=0.01, is_call_known=at < 2)} for at in range(4)]
    found = places_together(runs, None, 3)
    assert found[RARE].call is None
    assert found[RARE].calls is not None
    assert found[ALWAYS].call is not None


def test_a_run_that_does_not_call_a_place_adds_no_error_to_its_time() -> None:
    rare = PlaceTimes(Figure(1e-3, 1e-4, 60, own_error=1e-4, slope=1e-5, slope_error=1e-6))
    found = places_together(
        [{ALWAYS: times(100.0, 1.0), RARE: rare}] * 3 + [{ALWAYS: times(100.0, 1.0)}], [1.0] * 4, 3
    )
    time = found[RARE].time
    # The expected error is half of the standard deviation between the four runs.
    assert (time.error, time.own_error) == (pytest.approx(2.5e-4), pytest.approx(2.5e-4))
    assert found[RARE].calls == Figure(0.0, 0.0, 8, runs=4)  # No run has calls of this brick.
    assert (time.slope, time.slope_error) == (pytest.approx(0.75e-5), pytest.approx(3**0.5 / 4 * 1e-6))
