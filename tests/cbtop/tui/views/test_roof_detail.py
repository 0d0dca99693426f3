"""Tests of the details next to the roofline.

They show which share of each roof (peak rate) a brick reaches, and the time that would be saved if the brick reached
its own roof.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.protocol.vocabulary import Provenance
from cbtop.reports.json import json_report
from cbtop.tui.views.roof_detail import RoofDetail
from cbtop.tui.widgets.lines import plain
from cbtop.viewmodels.bricks import BrickRow, SizePoint
from cbtop.viewmodels.roofline import CeilingRow, missing_ceilings
from cbtop.viewmodels.source import SourceView
from tests.cbtop import samples
from tests.cbtop.viewmodels.verdicts.streams import DOWN_WORK, Decoding, ceiling, run


def drawn(source: SourceView, brick: BrickRow, height: int = 30, width: int = 90) -> str:
    detail = RoofDetail()
    detail.show_brick(brick, source)
    return "\n".join(map(plain, detail.draw(width, height)))


def brick_of(source: SourceView, name: str) -> BrickRow:
    return next(row for row in source.roofline.points if row.name == name)


def test_a_brick_is_next_to_every_roof_and_is_latency_if_below_them_all() -> None:
    text = drawn(samples.LIVE, brick_of(samples.LIVE, "LmHead"))
    assert "13.76 GB/s · 33.60 GFLOP/s" in text
    assert "DRAM read" in text
    assert "44.1 %" in text
    assert "28.5 %" in text
    assert "→ At 44.1 % of the nearest roof. The rest may be launches, waiting" in text
    # The brick takes 1,497 of 8,450 µs a token and reaches 44.1 % of its roof (peak rate). If it reached 100 %, 6.57
    # tokens/s would be gained.
    assert "+6.57" in text


def test_a_brick_is_far_below_every_roof_only_if_all_shares_are_small() -> None:
    brick = brick_of(samples.LIVE, "LmHead")
    assert brick.gflops is not None
    assert brick.gb_per_sec is not None
    slow = replace(brick, gflops=brick.gflops / 2, gb_per_sec=brick.gb_per_sec / 2)
    assert "→ Far below every roof: launches, waiting" in drawn(samples.LIVE, slow)


def test_a_brick_whose_type_is_not_measured_here_has_the_reason() -> None:
    roofs = tuple(
        replace(one, dtype="float32") if one.kind == "compute" else one for one in samples.LIVE.roofline.ceilings
    )
    brick = replace(brick_of(samples.LIVE, "LmHead"), dtypes=("float16",), roof=None)
    source = replace(samples.LIVE, roofline=replace(samples.LIVE.roofline, ceilings=roofs, points=(brick,)))
    text = " ".join(drawn(source, brick).split())
    assert "% of roof n/a: no compute roof in float16: cbtop measures such products only on GPUs." in text
    assert missing_ceilings(source.roofline) == (
        "float16 compute ceiling n/a: cbtop measures such products only on GPUs"
    )
    on_gpu = replace(
        source, roofline=replace(source.roofline, ceilings=tuple(replace(one, gpu="GPU-1") for one in roofs))
    )
    assert "no compute roof in float16: not measured by this source" in " ".join(drawn(on_gpu, brick).split())


def test_what_a_place_under_the_roofs_says_is_whole_where_there_is_room() -> None:
    lines = drawn(samples.LIVE, brick_of(samples.LIVE, "LmHead"), width=50).splitlines()
    at = next(index for index, line in enumerate(lines) if "→ At 44.1 % of the nearest roof" in line)
    said = " ".join(line.strip() for line in lines[at : lines.index("", at)])
    assert said.endswith("or work beside the arithmetic, as unpacking weights.")


def test_a_cache_level_is_no_roof_and_explains_what_is_above_memory() -> None:
    levels = tuple(
        CeilingRow(name, "cache", value, "GB/s", Provenance.MEASURED)
        for name, value in (("l1_read", 200.0), ("l2_read", 90.0), ("l3_read", 40.0))
    )
    roofline = replace(samples.LIVE.roofline, ceilings=samples.LIVE.roofline.ceilings + levels)
    source = replace(samples.LIVE, roofline=roofline)
    brick = brick_of(source, "DownProjection")
    assert brick.roof is not None
    assert brick.roof == brick_of(samples.LIVE, "DownProjection").roof
    fast = replace(brick, gb_per_sec=45.0, roof=replace(brick.roof, percent_of_roof=144.0))
    assert "its data may come from a cache (l2_read)" in drawn(source, fast)
    faster = replace(fast, gb_per_sec=450.0)
    assert "look at its FLOP, its bytes, or the roof" in drawn(source, faster)


def test_a_share_of_one_roof_and_a_limit_by_another_are_told_apart() -> None:
    cache = CeilingRow("weights_read", "bandwidth", 90.0, "GB/s", Provenance.MEASURED)
    roofline = replace(samples.LIVE.roofline, ceilings=(*samples.LIVE.roofline.ceilings, cache))
    brick = brick_of(samples.LIVE, "DownProjection")
    assert brick.roof is not None
    low = replace(brick, roof=replace(brick.roof, percent_of_roof=25.3, bound="memory"))
    assert "Limited by DRAM read, a lower roof" in drawn(replace(samples.LIVE, roofline=roofline), low)
    assert "lower roof" not in drawn(samples.LIVE, brick)


def test_what_is_made_of_an_unsure_roof_saves_nothing_that_is_said() -> None:
    brick = brick_of(samples.LIVE, "LmHead")
    assert brick.roof is not None
    unsure = replace(brick, roof=replace(brick.roof, is_unsure=True))
    others = tuple(row for row in samples.LIVE.roofline.points if row is not brick)
    source = replace(samples.LIVE, roofline=replace(samples.LIVE.roofline, points=(unsure, *others)))
    assert "+6.57" not in drawn(source, unsure)
    alone = replace(source, roofline=replace(source.roofline, points=(unsure,)))
    assert "n/a: the roofs are unsure; C measures them again" in drawn(alone, unsure)


def test_without_roofs_it_says_so() -> None:
    assert "n/a: no roof was measured" in drawn(samples.NO_ROOF, samples.NO_ROOF.roofline.points[0])


def test_the_trail_of_a_brick_that_becomes_slower_leads_down_to_its_place(tmp_path: Path) -> None:
    slower = Decoding(step_factor=lambda step: 1 + step / 200, noise=0.0, work=DOWN_WORK)
    view = run(tmp_path, slower).one()
    brick = brick_of(view, "DownProjection")
    points = [point for point in brick.trail if point]
    assert len(points) == len(brick.trail) >= 10
    assert {intensity for intensity, _ in points} == {2.0}
    gflops = [at for _, at in points]
    assert sorted(gflops, reverse=True) == gflops
    # The brick's mark in the plot is its mean over all time, so it is between the first and the last second.
    assert gflops[0] > (brick.gflops or 0) > gflops[-1]
    (said,) = json.loads(json_report([view]))["sources"]
    trails = {one["name"]: one["trail"] for one in said["bricks"]}
    assert trails["DownProjection"] == [{"intensity": 2.0, "gflops": at} for at in gflops]
    assert trails["RmsNorm"] == []  # the brick declares no work


def test_what_grows_with_the_cache_stands_by_how_much_is_cached(tmp_path: Path) -> None:
    growing = Decoding(
        cached=lambda step: 100 + step,
        step_factor=lambda step: 1 + step / 1_000,
        noise=0.0,
        work=DOWN_WORK,
        ceilings=(ceiling("bandwidth", 100), ceiling("compute", 1_000)),
    )
    view = run(tmp_path, growing).one()
    brick = next(row for row in view.bricks if row.name == "DownProjection")
    ranges = [(point.from_size, point.to_size) for point in brick.by_cached]
    assert ranges == [(128, 256), (256, 512)]
    assert sum(point.seconds for point in brick.by_cached) >= 9
    us = [point.us_per_token for point in brick.by_cached]
    # The two groups of steps have 190 and 380 cached positions on average.
    assert us[1] / us[0] == pytest.approx((1 + 0.28) / (1 + 0.09), rel=0.07)
    text = drawn(view, brick)
    assert "as the cache grows, last 60 s (derived)" in text
    assert "256 to 511 positions" in text
    assert "as the cache grows" not in drawn(samples.LIVE, brick_of(samples.LIVE, "LmHead"))


def test_bars_by_size_begin_in_one_column_and_there_are_two_of_them_or_none() -> None:
    sizes = (SizePoint(1, 2, 1, 8.0), SizePoint(2, 4, 20, 8.0), SizePoint(4, 8, 3, 4.0))
    brick = replace(brick_of(samples.LIVE, "LmHead"), by_batch=sizes)
    shown = drawn(samples.LIVE, brick, 40).splitlines()
    begins = {line.index("█") for line in shown if "sequence" in line}
    assert len(begins) == 1
    for height in range(5, 20):
        assert sum("sequence" in line for line in drawn(samples.LIVE, brick, height).splitlines()) != 1


def test_growth_with_the_batch_is_shown_by_the_sequences_in_a_step(tmp_path: Path) -> None:
    def batch(step: int) -> int:
        return 1 if step < 100 else 2 + step % 2 if step < 200 else 6

    growing = Decoding(
        sequences=batch,
        tokens=batch,
        step_factor=lambda step: (1 + batch(step)) / 2,
        noise=0.0,
        between_us=0.0,
        work=DOWN_WORK,
        ceilings=(ceiling("bandwidth", 100), ceiling("compute", 1_000)),
    )
    view = run(tmp_path, growing).one()
    brick = brick_of(view, "DownProjection")
    ranges = [(point.from_size, point.to_size) for point in brick.by_batch]
    assert ranges == [(1, 2), (2, 4), (4, 8)]
    assert sum(point.seconds for point in brick.by_batch) >= 9
    us = [point.us_per_token for point in brick.by_batch]
    assert us[0] == pytest.approx(8 * 1_200, rel=0.01)
    # The second group of steps (2 to 3 sequences) has 2.5 sequences on average.
    assert us[1] / us[0] == pytest.approx((1 + 2.5) / 2 / 2.5, rel=0.07)
    assert us[2] / us[0] == pytest.approx((1 + 6) / 2 / 6, rel=0.07)
    text = drawn(view, brick)
    assert "as the batch grows, last 60 s (derived)" in text
    assert [label in text for label in ("  1 sequence ", "  2 to 3 sequences ", "  4 to 7 sequences ")] == [True] * 3
    assert "as the cache grows" not in text  # The process does not report how many positions are cached.
    assert brick.by_cached == ()


def test_a_batch_that_is_always_the_same_or_that_nobody_says_has_no_part(tmp_path: Path) -> None:
    always = run(tmp_path, Decoding(sequences=lambda _: 4, tokens=lambda _: 4, work=DOWN_WORK)).one()
    brick = brick_of(always, "DownProjection")
    assert [(point.from_size, point.to_size) for point in brick.by_batch] == [(4, 8)]
    assert "as the batch grows" not in drawn(always, brick)
    (tmp_path / "silent").mkdir()
    silent = run(tmp_path / "silent", Decoding(tokens=lambda step: 1 + step // 100, work=DOWN_WORK)).one()
    brick = brick_of(silent, "DownProjection")
    assert brick.by_batch == ()
    assert "as the batch grows" not in drawn(silent, brick)


def test_each_growth_has_a_part_and_a_mean_between_sizes_is_of_the_nearer(tmp_path: Path) -> None:
    growing = Decoding(
        cached=lambda step: 100 + step,
        sequences=lambda step: 1 if step < 200 or step % 5 == 0 else 2,
        work=DOWN_WORK,
        ceilings=(ceiling("bandwidth", 100), ceiling("compute", 1_000)),
    )
    view = run(tmp_path, growing).one()
    brick = brick_of(view, "DownProjection")
    assert [(point.from_size, point.to_size) for point in brick.by_cached] == [(128, 256), (256, 512), (512, 1_024)]
    # A step with 1.8 sequences on average counts as a step with 2 sequences.
    assert [(point.from_size, point.to_size) for point in brick.by_batch] == [(1, 2), (2, 4)]
    text = drawn(view, brick, 40)
    assert text.index("as the cache grows") < text.index("as the batch grows") < text.index("its roof would save")


@pytest.mark.parametrize(
    ("dtypes", "over"), [(("int8",), {"dot"}), (("float32",), {"fma"}), ((), {"fma"}), (("bfloat16",), set())]
)
def test_a_brick_stands_beside_no_compute_roof_of_what_it_does_not_multiply(
    dtypes: tuple[str, ...], over: set[str]
) -> None:
    peaks = tuple(
        CeilingRow(name, "compute", 900.0, "GFLOP/s", Provenance.MEASURED, dtype=dtype)
        for name, dtype in (("fma", "float32"), ("dot", "int8"))
    )
    memory = tuple(one for one in samples.LIVE.roofline.ceilings if one.kind == "bandwidth")
    source = replace(samples.LIVE, roofline=replace(samples.LIVE.roofline, ceilings=memory + peaks))
    text = drawn(source, replace(brick_of(source, "LmHead"), dtypes=dtypes))
    assert {peak.name for peak in peaks if f" {peak.name} " in text} == over
    assert "DRAM read" in text
