"""The p99 of a step and of each brick is judged separately from its median call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cbtop.comparison.noise import Change, Figure, change_between_runs
from cbtop.comparison.run_diff import diff_of
from cbtop.comparison.runs import Run
from cbtop.comparison.tails import Tail, tails_of
from tests.cbtop.comparison.made_runs import STEADY, Noise, made_run, steady
from tests.representatives import first_by_default

TAIL = replace(STEADY, tail=9.0)


def tails(bases: Sequence[Run], now: Run) -> dict[str, Tail]:
    (part,) = diff_of(bases, [now]).parts
    return {tail.place.name: tail for tail in tails_of(part)}


def longer(bases: Sequence[Run], now: Run) -> list[str]:
    return [name for name, tail in tails(bases, now).items() if tail.is_longer]


def three(noise: Noise = STEADY, steps: int = 240) -> list[Run]:
    return [made_run(seed, noise, steps) for seed in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("bases", [1, 3])
def test_a_brick_with_a_few_calls_ten_times_as_long_has_a_longer_p99(bases: int) -> None:
    found = tails(three()[:bases], made_run(4, TAIL))
    assert [name for name, tail in found.items() if tail.is_longer] == ["DownProjection"]
    tail = found["DownProjection"]
    assert tail.base_runs == bases
    assert tail.change.now / tail.change.before == pytest.approx(9.5, rel=0.1)
    assert tail.median_ratio == pytest.approx(1.0, abs=0.01)
    assert longer(three(TAIL)[:bases], made_run(4, TAIL)) == []
    assert longer(three(TAIL)[:bases], made_run(4, STEADY)) == []


def test_a_slower_layer_explains_the_long_calls_of_its_own_brick_alone() -> None:
    found = tails(three(), made_run(4, STEADY, slower=2.0))
    assert found["DownProjection"].named_ratio == pytest.approx(2.0, rel=0.05)
    assert found["RmsNorm"].named_ratio == 1.0


def test_a_brick_without_a_p99_takes_that_of_no_other_away() -> None:
    (part,) = steady().parts
    (first, *rest) = [tail.place for tail in tails_of(part)]
    assert first.now is not None
    unknown = replace(first, now=replace(first.now, p99=None))
    others = tuple(unknown if one is first else one for one in part.places)
    assert [tail.place for tail in tails_of(replace(part, places=others))] == rest


@pytest.mark.slow
def test_a_step_has_a_p99_from_400_steps_on() -> None:
    assert "step" not in tails(three(), made_run(4, TAIL))
    found = tails(three(steps=800), made_run(4, replace(TAIL, tail=20.0), 800))
    assert [name for name, tail in found.items() if tail.is_longer] == ["step", "DownProjection"]


@first_by_default("noise", [replace(STEADY, late=0.3), replace(STEADY, late=0.5)])
def test_a_drift_or_calls_that_are_longer_anyway_are_not_named_again(noise: Noise) -> None:
    assert longer(three(), made_run(4, noise)) == []
    for planted in ({"all_longer": 1.5}, {"slower": 1.5}, {"slower": 2.0, "in_layer": None}):
        assert longer(three(), made_run(4, STEADY, **planted)) == []


def test_a_p99_is_longer_by_more_than_a_tenth_its_interval_and_the_median() -> None:
    (part,) = steady().parts
    place = part.bricks[0]
    for now, half, ratio, named, expected in (
        (111.0, 10.0, 1.0, 1.0, True),
        (110.0, 5.0, 1.0, 1.0, False),
        (111.0, 12.0, 1.0, 1.0, False),
        (112.0, 12.0, 1.0, 1.0, False),
        (150.0, 10.0, 1.4, 1.0, False),
        (153.95, 10.0, 1.4, 1.0, False),
        (1.1 * 100.0, 5.0, 1.0, 1.0, False),
        (150.0, 10.0, 1.3, 1.0, True),
        (150.0, 10.0, 1.0, 1.4, False),
        (150.0, 10.0, 0.5, 1.0, True),
    ):
        assert Tail(place, Change(100.0, now, half), 3, ratio, named).is_longer is expected
    for now, half, expected in ((111.0, 10.0, True), (110.0, 5.0, False), (80.0, 10.0, True), (80.0, 20.0, False)):
        assert Tail(place, Change(100.0, now, half), 3, 1.0, 1.0).is_beyond is expected


def test_bricks_share_the_chance_of_a_false_alarm_among_them_and_with_the_step() -> None:
    (part,) = diff_of([made_run(1, STEADY)], [made_run(2, STEADY)]).parts
    assert len(part.bricks) == 5
    for tail in tails_of(part):
        before, now = (side and side.p99 for side in (tail.place.before, tail.place.now))
        assert isinstance(before, Figure)
        assert isinstance(now, Figure)
        assert tail.change == change_between_runs(before, now, 10)


def test_the_interval_is_the_wider_of_that_between_runs_and_that_inside() -> None:
    base = Figure(100.0, 2.0, 60, scatter=3.0, runs=3)
    between = change_between_runs(base, Figure(100.0, 0.1, 20), 1)
    inside = change_between_runs(base, Figure(500.0, 100.0, 20), 1)
    alone = change_between_runs(replace(base, runs=1, scatter=0.0), Figure(500.0, 100.0, 20), 1)
    assert between.half == pytest.approx(14.09 * (2.0**2 + 3.0**2) ** 0.5, rel=0.01)
    assert inside.half == alone.half
    assert inside.half == pytest.approx(2.86 * 100, rel=0.01)
    # The half width of the interval is even larger than the value of the baseline.
    assert inside.half > inside.before


@pytest.mark.slow
def test_a_p99_among_pauses_is_as_unsure_as_the_step_down_from_them() -> None:
    """1 % of the calls take much longer because of a pause. So it depends on chance whether the p99 is a pause."""
    figures = [made_run(seed, Noise(pauses=4e-4), 480).parts[0].places[None, None].p99 for seed in (2, 7)]
    paused = [figure for figure in figures if figure and figure.mean > 10_000]
    assert paused
    assert all(figure.error > figure.mean / 4 for figure in paused)
