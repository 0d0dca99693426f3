"""Tests of the map of layers: each cell (a brick in a layer) equals the time on the fake clock.

A layer is compared only with layers that have the same bricks.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.client.source_record import SourceRecord
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.vocabulary import BrickCategory, BrickId
from cbtop.reports import REPORTS
from cbtop.viewmodels.layers import LayerBrick, LayersView
from cbtop.viewmodels.source import source_view
from tests.cbtop import samples
from tests.cbtop.recorded import Clock, profiler_in, record_of, source_of
from tests.representatives import first_by_default

STEPS = 4


def layers_of(record: SourceRecord, *, window: bool = False) -> LayersView:
    found = source_view(record, window=window).layer_times
    assert found is not None
    return found


def run_layer(profiler: BrickProfiler, clock: Clock, layer: int, stack: str = "", *, mixer: bool = False) -> None:
    """Run a layer: Attention takes 20 µs (a mixer 50 µs), then 10 µs without a brick, then Down takes 30 µs.

    In layer 4, Down takes 90 µs.
    """
    with profiler.layer(layer, stack):
        with profiler.brick("Mixer" if mixer else "Attention"):
            clock.sleep_us(50 if mixer else 20)
        clock.sleep_us(10)
        with profiler.brick("Down"):
            clock.sleep_us(90 if layer == 4 else 30)


def odd_fourth(runtime: Path) -> SourceRecord:
    """Record steps of six layers. The brick Down is three times as slow in the fifth layer.

    Each step ends with a brick outside layers.
    """
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for _ in range(STEPS):
        with profiler.step("decode", tokens=1):
            for layer in range(6):
                run_layer(profiler, clock, layer)
            with profiler.brick("Head"):
                clock.sleep_us(7)
    return record_of(source_of(runtime))


def test_a_cell_is_the_time_of_a_brick_in_a_layer_of_one_step(runtime: Path) -> None:
    layers = layers_of(odd_fourth(runtime))
    assert (layers.unit, layers.steps) == ("step", STEPS)
    assert [brick.name for brick in layers.bricks] == ["Attention", "Down"]
    assert [row.name for row in layers.rows] == [f"Layer {at}" for at in range(6)]
    assert [row.cells for row in layers.rows] == [(20, 90 if at == 4 else 30) for at in range(6)]
    assert [row.us for row in layers.rows] == [120 if at == 4 else 60 for at in range(6)]
    assert {row.between_us for row in layers.rows} == {10}


def test_the_slowest_layer_is_named_with_what_makes_it_slow(runtime: Path) -> None:
    layers = layers_of(odd_fourth(runtime))
    slowest = layers.slowest
    assert slowest is not None
    assert slowest.name == "Layer 4"
    assert (slowest.p50_us, slowest.median_us) == (pytest.approx(120, rel=0.01), pytest.approx(60, rel=0.01))
    assert slowest.to_median == pytest.approx(2, rel=0.02)
    assert slowest.excess == ("Down", pytest.approx(60, rel=0.02))
    assert layers.median([row.cells[1] for row in layers.rows]) == 30


def test_what_makes_a_layer_slow_that_few_steps_run_is_told_of_these(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for step in range(STEPS):
        with profiler.step("decode", tokens=1):
            for layer in range(6 if step % 10 == 0 else 5):
                with profiler.layer(layer), profiler.brick("Attention"):
                    clock.sleep_us(50 if layer == 5 else 20)
    layers = layers_of(record_of(source_of(runtime)))
    assert layers.slowest is not None
    assert layers.slowest.name == "Layer 5"
    assert layers.slowest.excess is not None
    name, us = layers.slowest.excess
    assert (name, us) == ("Attention", pytest.approx(30 * layers.slowest.calls, rel=0.05))


def test_a_layer_is_compared_with_those_of_its_stack_that_have_its_bricks(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", tokens=1):
        for layer in (0, 1, 2, 3):
            run_layer(profiler, clock, layer, mixer=layer == 1)
        for layer in (0, 1):
            run_layer(profiler, clock, layer, "vision")
    rows = layers_of(record_of(source_of(runtime))).rows
    assert [row.median_us and round(row.median_us) for row in rows] == [60, None, 60, 60, None, None]
    assert [row.stack for row in rows] == ["", "", "", "", "vision", "vision"]
    assert rows[1].cells == (None, 30, 50)


def test_a_pause_that_hits_a_layer_once_makes_it_no_slow_layer(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for step in range(STEPS):
        with profiler.step("decode", tokens=1):
            for layer in range(4):
                with profiler.layer(layer), profiler.brick("Attention"):
                    clock.sleep_us(5_000 if (step, layer) == (2, 1) else 20)
    for row in layers_of(record_of(source_of(runtime))).rows:
        assert row.to_median == pytest.approx(1, rel=0.02)


def test_what_makes_a_layer_slow_is_what_usually_does_not_what_once_did(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for step in range(20):
        with profiler.step("decode", tokens=1):
            for layer in range(5):
                with profiler.layer(layer):
                    with profiler.brick("Attention"):
                        clock.sleep_us(9_000 if (step, layer) == (7, 3) else 20)
                    with profiler.brick("Down"):
                        clock.sleep_us(90 if layer == 3 else 30)
    layers = layers_of(record_of(source_of(runtime)))
    assert layers.slowest is not None
    assert layers.slowest.cells == (469, 90)  # The times are means of the layer, as in the cells of the map.
    assert layers.slowest.excess == ("Down", pytest.approx(60, rel=0.02))


def test_the_slow_layer_of_a_brick_stands_out_by_median_and_a_pause_does_not(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for step in range(9):
        with profiler.step("decode", tokens=1):
            for layer in range(6):
                run_layer(profiler, clock, layer)
                with profiler.layer(layer), profiler.brick(BrickId.RMS_NORM):
                    clock.sleep_us(900 if (step, layer) == (3, 1) else 5)
    layers = layers_of(record_of(source_of(runtime)))
    down, norm = (layers.of_brick(brick) for brick in layers.bricks if brick.name in ("Down", "RmsNorm"))
    assert down is not None
    assert norm is not None
    assert down.p50_us == pytest.approx((30, 30, 30, 30, 90, 30), rel=0.01)
    assert down.odd == (False, False, False, False, True, False)
    assert (down.slowest, down.median_us) == (4, pytest.approx(30, rel=0.01))
    assert norm.odd == (False,) * 6
    assert next(brick.category for brick in layers.bricks if brick.name == "RmsNorm") is BrickCategory.NORM
    assert layers.of_brick(LayerBrick("Head", BrickCategory.OTHER)) is None


def test_text_and_json_name_the_slow_layer(runtime: Path) -> None:
    view = source_view(odd_fourth(runtime))
    text = REPORTS["text"]([view], ["layers"], None)
    (line,) = [line for line in text.splitlines() if "Down (+60" in line]
    assert line.split()[:3] == ["Layer", "4", "120.0"]
    said = json.loads(REPORTS["json"]([view], [], None))["sources"][0]["layer_times"]
    assert said["unit"] == "step"
    assert said["layers"][4]["bricks"] == [
        {"name": "Attention", "us": 20, "p50_us": pytest.approx(20, rel=0.01)},
        {"name": "Down", "us": 90, "p50_us": pytest.approx(90, rel=0.01)},
    ]
    assert (said["layers"][4]["us"], said["layers"][4]["between_us"]) == (120, 10)


def test_time_between_bricks_may_be_what_makes_a_layer_slow(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", tokens=1):
        for layer in range(5):
            with profiler.layer(layer):
                with profiler.brick("Attention"):
                    clock.sleep_us(20)
                clock.sleep_us(100 if layer == 2 else 0)
    layers = layers_of(record_of(source_of(runtime)))
    assert layers.slowest is not None
    assert layers.slowest.excess == ("between bricks", pytest.approx(100, rel=0.02))


@first_by_default("steps", [20, 60, 200])
def test_of_layers_that_are_alike_none_stands_out_however_noisy_they_are(steps: int, runtime: Path) -> None:
    """In half of the calls, the brick waits for a processor and takes three times as long."""
    chance, found = random.Random(steps), 0
    for trial in range(20):
        clock = Clock()
        (directory := runtime / str(trial)).mkdir(mode=0o700)
        profiler = profiler_in(directory, clock)
        for _ in range(steps):
            with profiler.step("decode", tokens=1):
                for layer in range(12):
                    with profiler.layer(layer), profiler.brick("Attention"):
                        clock.sleep_us(chance.choice((20, 60)) * chance.gauss(1, 0.05))
        layers = layers_of(record_of(source_of(directory)))
        found += any(layers.stands_out(row) for row in layers.rows)
    assert found <= 1


def test_a_slow_layer_stands_out_next_to_a_first_one_with_cold_caches(runtime: Path) -> None:
    chance, clock = random.Random(7), Clock()
    profiler = profiler_in(runtime, clock)
    for _ in range(25):
        with profiler.step("decode", tokens=1):
            for layer in range(6):
                with profiler.layer(layer), profiler.brick("Attention"):
                    clock.sleep_us({0: 124, 4: 146}.get(layer, 100) * chance.gauss(1, 0.05))
    layers = layers_of(record_of(source_of(runtime)))
    assert [row.name for row in layers.rows if layers.stands_out(row)] == ["Layer 4"]


@pytest.mark.parametrize(("first_us", "odd"), [(109, []), (160, ["Layer 0"])])
def test_a_first_layer_does_not_stand_out_by_what_our_own_cold_code_takes(
    first_us: int, odd: list[str], runtime: Path
) -> None:
    chance, clock = random.Random(7), Clock()
    profiler = profiler_in(runtime, clock)
    for _ in range(25):
        with profiler.step("decode", tokens=1):
            for layer in range(12):
                with profiler.layer(layer), profiler.brick("FeedForward"):
                    clock.sleep_us({0: first_us}.get(layer, 80) * chance.gauss(1, 0.02))
    layers = layers_of(record_of(source_of(runtime)))
    assert [row.name for row in layers.rows if layers.stands_out(row)] == odd


def test_no_time_lies_between_bricks_if_now_one_is_slow_and_now_another(runtime: Path) -> None:
    """The median of each brick is as usual, but the layer's median is longer, because the slow calls alternate.

    The difference of these medians is not a measured time, so it is not shown.
    """
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for odd_us in ((20, 30), (80, 30), (80, 30), (20, 100), (20, 100)) * 8:
        with profiler.step("decode", tokens=1):
            for layer in range(6):
                attention_us, down_us = odd_us if layer == 4 else (20, 30)
                with profiler.layer(layer):
                    with profiler.brick("Attention"):
                        clock.sleep_us(attention_us)
                    clock.sleep_us(10)
                    with profiler.brick("Down"):
                        clock.sleep_us(down_us)
    layers = layers_of(record_of(source_of(runtime)))
    assert layers.slowest is not None
    assert layers.slowest.name == "Layer 4"
    # Down takes 70 µs longer in two of five steps: 28 µs on average.
    assert layers.slowest.excess == ("Down", pytest.approx(28, rel=0.02))


def test_layers_inside_layers_and_bricks_inside_bricks_are_counted_once(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", tokens=1):
        for block in range(3):
            with profiler.layer(block), profiler.brick("Experts"):
                clock.sleep_us(5)
                with profiler.layer(0), profiler.brick("Down"):
                    clock.sleep_us(11)
    rows = layers_of(record_of(source_of(runtime))).rows
    assert [row.cells for row in rows] == [(5, 11)] * 3
    assert {row.between_us for row in rows} == {0}


def test_a_process_without_steps_has_the_times_of_a_call(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for _ in range(3):
        run_layer(profiler, clock, 0)
    layers = layers_of(record_of(source_of(runtime)))
    assert (layers.unit, layers.rows[0].us, layers.rows[0].cells) == ("call", 60, (20, 30))


def test_a_step_that_has_not_ended_is_in_no_layer(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    for _ in range(2):
        with profiler.step("decode", tokens=1):
            run_layer(profiler, clock, 0)
    with profiler.step("decode", tokens=1):
        run_layer(profiler, clock, 0)
        record = record_of(source_of(runtime))
        assert layers_of(record).rows[0].us == 60


def test_a_process_without_layers_has_none(runtime: Path) -> None:
    clock = Clock()
    profiler = profiler_in(runtime, clock)
    with profiler.step("decode", tokens=1), profiler.brick("Head"):
        clock.sleep_us(7)
    assert source_view(record_of(source_of(runtime))).layer_times is None


@given(times=st.lists(st.tuples(*[st.integers(0, 500)] * 3), min_size=1, max_size=12))
def test_the_cells_of_a_layer_and_what_lies_between_them_are_the_layer(times: list[tuple[int, int, int]]) -> None:
    with TemporaryDirectory() as directory:
        clock = Clock()
        profiler = profiler_in(Path(directory), clock)
        with profiler.step("decode", tokens=1):
            for layer, (first, between, last) in enumerate(times):
                with profiler.layer(layer):
                    with profiler.brick("first"):
                        clock.sleep_us(first)
                    clock.sleep_us(between)
                    with profiler.brick("last"):
                        clock.sleep_us(last)
        rows = layers_of(record_of(source_of(Path(directory)))).rows
    assert [(*row.cells, row.between_us) for row in rows] == [
        (first, last, between) for first, between, last in times
    ]
    assert [row.us for row in rows] == [sum(parts) for parts in times]


def test_the_bricks_of_a_layer_are_compared_with_those_of_the_layers_like_it() -> None:
    layers = samples.LIVE.layer_times
    assert layers is not None
    slow = layers.rows[4]
    found = layers.inside(slow)
    assert [one.us for one in found] == sorted((us for us in slow.cells if us is not None), reverse=True)
    assert found[0].brick.name == "DownProjection"
    assert found[0].to_usual == pytest.approx(2.88, abs=0.01)
    assert all(one.to_usual is not None and 0.9 < one.to_usual < 1.1 for one in found[1:])
    assert sum(one.percent or 0.0 for one in found) == pytest.approx(100 * (slow.us - slow.between_us) / slow.us)
    alone = replace(layers, rows=(slow,))
    assert all(one.usual_p50_us is None for one in alone.inside(slow))
