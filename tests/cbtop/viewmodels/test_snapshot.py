"""Tests of a stored baseline. The baseline has the figures of the last seconds by phase, brick and layer.

It also has the environment of the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cbtop.client.store import Store
from cbtop.comparison.baseline import Snapshot
from cbtop.comparison.items import BETWEEN_BRICKS
from cbtop.protocol.vocabulary import BrickCategory, NodeKind
from cbtop.viewmodels.graph import GraphRow
from cbtop.viewmodels.snapshot import snapshot
from tests.cbtop.made_machines import HELLO
from tests.cbtop.recorded import Clock, apply, profiler_in, seen_at, source_of
from tests.cbtop.viewmodels.verdicts.cases import DOWN_WORK
from tests.cbtop.viewmodels.verdicts.streams import (
    GAP_US,
    IN_LAYERS,
    LAYERS,
    LM_HEAD_US,
    Decoding,
    Made,
    run,
)

DOWN = ("DownProjection", BrickCategory.FFN)
LM_HEAD = ("LmHead", BrickCategory.OTHER)


def layer_of(rows: Sequence[GraphRow], row: GraphRow) -> str | None:
    outer = next((other for other in rows if other.id == row.parent), None)
    return f"Layer {outer.name}" if outer else None


def one(made: Made) -> Snapshot:
    (found,) = made.snapshots()
    return found


def test_it_has_every_brick_and_every_layer_of_the_window(tmp_path: Path) -> None:
    found = one(run(tmp_path, Decoding(noise=0)))
    decode = found.of("decode")
    assert decode is not None
    times = decode.times
    assert times is not None
    assert (times.unit, decode.blocks) == ("token", 11)  # Steps are grouped into blocks that begin at whole seconds.
    assert times.bricks[DOWN].mean == pytest.approx(LAYERS * IN_LAYERS["DownProjection"])
    assert times.cells[DOWN, "Layer 3"].mean == pytest.approx(IN_LAYERS["DownProjection"])
    assert times.cells[DOWN, "Layer 3"].median_us == pytest.approx(IN_LAYERS["DownProjection"], rel=0.01)
    assert times.bricks[LM_HEAD].median_us == pytest.approx(LM_HEAD_US, rel=0.01)
    assert times.layers["Layer 7"].median_us == pytest.approx(sum(IN_LAYERS.values()) + GAP_US, rel=0.01)
    assert times.cells[BETWEEN_BRICKS, "Layer 7"].median_us == times.layers["Layer 7"].median_us
    assert times.step_us.median_us == pytest.approx(times.step_us.mean, rel=0.01)
    assert times.layers["Layer 3"].mean == pytest.approx(sum(IN_LAYERS.values()) + GAP_US)
    assert times.cells[BETWEEN_BRICKS, "Layer 3"].mean == pytest.approx(GAP_US)
    assert times.bricks[LM_HEAD].mean == pytest.approx(LM_HEAD_US)
    # The LM head runs outside the layers, so it has no time by layer.
    assert not [layer for brick, layer in times.cells if brick == LM_HEAD]
    assert sum(figure.mean for figure in times.bricks.values()) == pytest.approx(times.step_us.mean)
    assert times.tokens_per_sec is not None
    assert times.tokens_per_sec.mean == pytest.approx(1e6 / (times.step_us.mean + 200), rel=0.01)
    assert (found.covers_s, found.lost_percent) == (pytest.approx(10, abs=1), 0.0)


def test_its_times_are_those_that_the_views_show(tmp_path: Path) -> None:
    made = run(tmp_path, Decoding(noise=0.2, seconds=9.6))
    view = made.one(window=True)
    decode = one(made).of("decode")
    assert decode is not None
    times = decode.times
    assert times is not None
    for row in view.bricks:
        assert times.bricks[row.key].mean == pytest.approx(row.us_per_token, rel=0.02)
    assert view.layer_times is not None
    for layer in view.layer_times.rows:
        assert times.layers[layer.name].mean == pytest.approx(layer.us, rel=0.02)


def test_it_has_every_layer_and_every_brick_of_the_graph(tmp_path: Path) -> None:
    made = run(tmp_path, Decoding(noise=0))
    decode = one(made).of("decode")
    assert decode is not None
    assert decode.times is not None
    rows = tuple(made.one(window=True).graph)
    assert {row.kind for row in rows} >= {NodeKind.LAYER, NodeKind.BRICK}
    for row in rows:
        assert row.place is not None
        assert decode.times.places[row.place].time.mean == pytest.approx(row.avg_inclusive_us)
        is_layer = row.kind is NodeKind.LAYER
        place = (None, f"Layer {row.name}") if is_layer else ((row.name, row.category), layer_of(rows, row))
        assert row.place == place


def test_it_has_where_each_brick_stood_under_the_roofs(tmp_path: Path) -> None:
    made = run(tmp_path, Decoding(noise=0, work=DOWN_WORK))
    decode = one(made).of("decode")
    assert decode is not None
    assert decode.times is not None
    points = made.one(window=True).roofline.points
    assert points
    assert decode.times.work.keys() == {point.key for point in points}
    for point in points:
        work = decode.times.work[point.key]
        assert (work.intensity, work.gflops) == (
            pytest.approx(point.intensity),
            pytest.approx(point.gflops, rel=0.02),
        )
        assert work.flops / decode.times.bricks[point.key].mean / 1e3 == pytest.approx(work.gflops, rel=0.02)


def test_it_has_every_phase_and_what_its_steps_were(tmp_path: Path) -> None:
    plan = Decoding(prefills=5, tokens=lambda _step: 3, cached=lambda _step: 128)
    found = one(run(tmp_path, plan))
    decode, prefill = found.of("decode"), found.of("prefill")
    assert decode is not None
    assert prefill is not None
    assert (decode.tokens, decode.sequences, decode.cached) == (3, 1, 128)
    assert (decode.share, prefill.share) == (pytest.approx(0.8, abs=0.02), pytest.approx(0.2, abs=0.02))
    assert prefill.times is not None
    assert prefill.tokens is not None
    per_token = LAYERS * 4 * IN_LAYERS["DownProjection"] / prefill.tokens
    assert prefill.times.bricks[DOWN].mean == pytest.approx(per_token, rel=0.1)
    assert found.of("encode") is None


def test_recorded_steps_of_a_sample_make_the_bricks_and_all_steps_the_rate(tmp_path: Path) -> None:
    whole = one(run(tmp_path, Decoding(noise=0, sample_every=8))).of("decode")
    assert whole is not None
    assert whole.times is not None
    assert whole.times.bricks[DOWN].mean == pytest.approx(LAYERS * IN_LAYERS["DownProjection"])
    assert whole.times.tokens_per_sec is not None
    assert whole.times.tokens_per_sec.mean == pytest.approx(1e6 / (whole.times.step_us.mean + 200), rel=0.01)


def test_where_nobody_counts_tokens_times_are_of_the_recorded_steps(tmp_path: Path) -> None:
    decode = one(run(tmp_path, Decoding(noise=0, sample_every=8, tokens=lambda _step: 0))).of("decode")
    assert decode is not None
    assert decode.times is not None
    assert decode.times.unit == "step"
    assert decode.times.bricks[DOWN].mean == pytest.approx(LAYERS * IN_LAYERS["DownProjection"])


def test_what_ran_in_fewer_than_five_seconds_of_its_window_is_no_baseline(tmp_path: Path) -> None:
    made = run(tmp_path, Decoding(seconds=4.4))
    (seen,) = made.seen().values()
    decode = snapshot(seen.record).of("decode")
    assert decode is not None
    assert (decode.blocks, decode.times) == (4, None)
    assert made.snapshots() == ()
    assert not made.mark_baseline(seen.record.key)
    assert made.one().baseline is None


def test_seconds_of_the_baseline_itself_are_not_compared_with_it(tmp_path: Path) -> None:
    made = run(tmp_path, Decoding())
    (seen,) = made.seen().values()
    assert made.mark_baseline(seen.record.key)
    compared = made.one().baseline
    assert compared is not None
    assert compared.why_not == "these seconds are the baseline's own"
    (base,) = made.baselines
    before = Snapshot(base.key, base.surroundings, base.phases, 0, base.begin_ns + 3 * 10**9, None, 0.0)
    later = snapshot(seen.record, (), "decode", (before,))
    decode = later.of("decode")
    assert decode is not None
    assert later.begin_ns >= before.end_ns
    assert decode.blocks == 8
    of_another = Snapshot("other", base.surroundings, base.phases, 0, base.end_ns, None, 0.0)
    assert snapshot(seen.record, (), "decode", (of_another,)).begin_ns == base.begin_ns


def test_who_clears_it_compares_with_nothing(tmp_path: Path) -> None:
    made = run(tmp_path, Decoding())
    assert made.mark_baseline(next(iter(made.seen())))
    made.clear_baseline()
    assert made.one().baseline is None


def test_of_bricks_in_bricks_each_has_its_own_time(tmp_path: Path) -> None:
    """The time of a brick excludes the bricks inside it, so the sum of all bricks is the step."""
    clock = Clock(0)
    profiler = profiler_in(tmp_path, clock)
    store, source = Store(), None
    store.apply(HELLO)
    for _ in range(8):
        for _ in range(10):
            with profiler.step("decode", 1), profiler.layer(0), profiler.brick("Outer"):
                clock.sleep_us(300)
                with profiler.brick("Inner"):
                    clock.sleep_us(700)
        clock.sleep_us(990_000)
        source = source or source_of(tmp_path)
        apply(store, seen_at(source, clock()))
    (record,) = store.sources.values()
    decode = snapshot(record).of("decode")
    assert decode is not None
    assert decode.times is not None
    means = {name: round(figure.mean) for (name, _), figure in decode.times.bricks.items()}
    assert means == {"Outer": 300, "Inner": 700, "between bricks": 0}
