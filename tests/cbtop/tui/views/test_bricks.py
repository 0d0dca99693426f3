"""Tests of the view of bricks: every brick has a row, and details use the free space.

The screen, text and JSON have the same numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop import units
from cbtop.profiler.analysis.roofline import NO_ROOF, SHARED, Distance
from cbtop.protocol.attributes import KernelAttributes
from cbtop.reports import REPORTS
from cbtop.text.roof_text import limit
from cbtop.text.statistics import BRICK_COLUMNS, BUDGET_COLUMNS, FORMATS, TREND_REPORT, statistic
from cbtop.tui.app import CbtopApp
from cbtop.tui.views.brick_columns import brick_columns, limit_cell
from cbtop.tui.views.brick_detail import detail_lines
from cbtop.tui.views.bricks import Bricks
from cbtop.tui.widgets.columns import Cells
from cbtop.tui.widgets.lines import plain, width_of
from cbtop.units import NOT_MEASURED
from cbtop.viewmodels.bricks import BrickModule
from cbtop.viewmodels.checks import CheckRow
from cbtop.viewmodels.kernels import BrickKernels, KernelRow
from cbtop.viewmodels.on_demand import with_parts
from cbtop.viewmodels.source import SourceView, source_view
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed, screen_text
from tests.cbtop.recorded import decode_run
from tests.representatives import first_by_default

FEW = replace(samples.LIVE, bricks=samples.BRICKS[:5])
DOWN = next(row for row in samples.CHECKED.bricks if row.name == "DownProjection")


async def screens(source: SourceView, size: tuple[int, int], *turns: str) -> list[str]:
    """Open the view of bricks and press each key of `turns`.

    Return the text of the screen before and after each key.
    """
    app = CbtopApp(ScriptedFeed(source), interval_s=60)
    async with app.run_test(size=size) as pilot:
        await pilot.press("2")
        await pilot.pause()
        texts = [screen_text(app)]
        for key in turns:
            await pilot.press(key)
            await pilot.pause()
            texts.append(screen_text(app))
        return texts


def rows_on(text: str, source: SourceView) -> int:
    """Return how many bricks of `source` have a row in the table."""
    return sum(any(row.name in line[:24] and "─" not in line for line in text.splitlines()) for row in source.bricks)


@first_by_default("size", [(80, 24), (100, 30), (120, 40), (200, 60)], ids="{0[0]}x{0[1]}".format)
async def test_details_stand_open_where_rows_would_be_blank_and_hide_no_row(size: tuple[int, int]) -> None:
    (text,) = await screens(FEW, size)
    assert "durations" in text
    assert rows_on(text, FEW) == 5


@pytest.mark.slow
async def test_on_a_small_screen_rows_come_first_and_enter_opens_the_details() -> None:
    before, opened, closed = await screens(samples.LIVE, (80, 24), "enter", "enter")
    assert "durations" not in before
    assert "durations" in opened
    assert "durations" not in closed
    assert rows_on(before, samples.LIVE) > 12 > rows_on(opened, samples.LIVE)


@pytest.mark.slow
async def test_where_the_details_have_room_for_all_enter_closes_them() -> None:
    for size in ((160, 45), (120, 60)):
        before, closed, opened = await screens(FEW, size, "enter", "enter")
        assert "durations" in before
        assert "durations" not in closed
        assert "durations" in opened


async def test_from_160_columns_the_details_stand_beside_the_rows() -> None:
    for width, is_beside in ((159, False), (160, True)):
        (text,) = await screens(samples.LIVE, (width, 45))
        head = next(line for line in text.splitlines() if "wall %" in line)
        assert ("─ ▲ LmHead" in head) == is_beside


async def test_the_details_follow_the_cursor() -> None:
    first, second = await screens(FEW, (120, 40), "j")
    assert f"{samples.BRICKS[0].name} ──" in first
    assert f"{samples.BRICKS[1].name} ──" in second


@first_by_default(
    "heights", [(*range(1, 60, 7), 59), pytest.param(range(1, 60), marks=pytest.mark.slow)], 2, ids=["some", "every"]
)
@first_by_default("width", [1, 12, 40, 59, 80, 118, 200], 2)
def test_details_are_drawn_at_every_size_within_it(width: int, heights: Sequence[int]) -> None:
    for height in heights:
        for source in (samples.CHECKED, samples.HOSTILE, replace(samples.LIVE, layer_times=None, phase=None)):
            for row in source.bricks[:4]:
                lines = detail_lines(row, source, width, height)
                assert len(lines) <= height
                assert all(width_of(line) <= max(width, 8) for line in lines)


def details(source: SourceView, brick: str, width: int = 80) -> str:
    row = next(row for row in source.bricks if row.name == brick)
    return "\n".join(plain(line) for line in detail_lines(row, source, width, 60))


def test_details_have_the_modes_slow_layer_last_seconds_and_excess_of_budget() -> None:
    text = details(samples.CHECKED, "DownProjection")
    assert "12,000 calls" in text
    assert "highest bar 610" in text
    assert f"╷{FORMATS['µs'].in_full(DOWN.durations[0].from_us)}" in text
    assert f"{FORMATS['µs'].in_full(DOWN.durations[-1].to_us)}╷" in text
    assert "▼ Layer 4 413.1 µs" in text
    assert "last 1.62 ms, least 1.41 ms, most 1.83 ms" in text
    assert re.search(r"over +105\.0 µs", text)
    assert "✓ equals the NumPy reference" in text


def test_the_details_name_what_a_check_met_in_place_of_an_error() -> None:
    failed = CheckRow("DownProjection", "equals the NumPy reference", False, None, 1e-3, "NaN")
    text = details(replace(samples.LIVE, checks=(failed,)), "DownProjection")
    assert "✗ equals the NumPy reference  met NaN" in text


def test_a_brick_in_no_layer_has_no_layers_and_uncounted_calls_have_no_bars() -> None:
    assert "layers" not in details(samples.LIVE, "LmHead")
    bare = replace(samples.LIVE, bricks=(replace(samples.BRICKS[0], durations=(), trend_us=()),))
    text = details(bare, samples.BRICKS[0].name)
    assert "n/a: its calls are not counted apart" in text
    assert "a token, 60 s" not in text


def test_kernels_of_a_burst_stand_in_the_details_of_their_brick_alone() -> None:
    row = KernelRow("gemv_q4_k", 10.0, KernelAttributes(), 12.5, 0.5, 12.0, 13.0)
    source = replace(samples.LIVE, kernels=(BrickKernels("DownProjection", "down", 10, (row,)),))
    text = details(source, "DownProjection")
    assert "10 × 12.50 µs ± 500 ns" in text
    assert "125.0 µs a step down" in text
    assert "gemv_q4_k" not in details(source, "UpProjection")
    (said,) = json.loads(REPORTS["json"]([source], [], None))["sources"]
    assert (said["kernels"][0]["brick"], said["kernels"][0]["kernels"][0]["mean_us"]) == ("DownProjection", 12.5)


def test_the_limit_names_the_roof_and_its_use_and_is_grey_if_that_is_unsure() -> None:
    row = samples.BRICKS[0]
    for roof, text, role in (
        (None, NOT_MEASURED, "faint"),
        (Distance(100.0, 78.6, "memory", False), "memory 79 %", ""),
        (Distance(100.0, 78.6, "compute", True), "compute ~79 %", "dim"),
        (Distance(100.0, 12.0, NO_ROOF), "latency 12 %", ""),
        (Distance(100.0, 37.7, SHARED), "shared 38 %", ""),
        (Distance(100.0, 104.0, "memory"), "⚠ memory 104 %", "bad"),
    ):
        roofed = replace(row, roof=roof)
        assert limit_cell(roofed) == ((text, role),)
        assert limit(roofed) == text


def test_of_seconds_that_share_a_place_in_the_trend_the_longest_is_drawn() -> None:
    (trend,) = [column for column in brick_columns(100.0, budgets=False, checks=False) if column.title == "trend"]
    us = [10.0] * 60
    us[31] = 35.0
    row = replace(samples.BRICKS[0], trend_us=tuple(us))
    for width in (10, 15, 30):
        text = plain(trend.cell(row, width))
        assert len(text) == width
        # The cell contains only two characters: one for all steady seconds, and one for the second that differs.
        assert len(set(text)) == 2
    assert plain(trend.cell(replace(row, trend_us=(None,) * 60), 10)) == NOT_MEASURED


def text_tables(text: str) -> dict[str, dict[str, str]]:
    """Return the tables of a text report, by brick and column."""
    found: dict[str, dict[str, str]] = {}
    for block in text.split("\n\n"):
        head, *lines = block.splitlines()
        if head.startswith("brick "):
            titles = ["brick", *head.split("  ")[1:]]
            titles = [title.strip() for title in titles if title.strip()]
            for line in lines:
                cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
                if len(cells) == len(titles):
                    found.setdefault(cells[0], {}).update(zip(titles, cells, strict=True))
    return found


@pytest.mark.parametrize("name", ["checked", "recorded"])
def test_screen_text_and_json_hold_the_same_figures_of_each_brick(name: str, runtime: Path) -> None:
    source = samples.CHECKED if name == "checked" else source_view(decode_run(runtime))
    screen = Cells.of(brick_columns(100.0, budgets=True, checks=True), source.bricks)
    of_screen = {cells[0][2:]: dict(zip(screen.head, cells, strict=True)) for cells in screen.rows}
    of_text = text_tables(REPORTS["text"]([source], ["bricks"], None))
    (said,) = json.loads(REPORTS["json"]([source], [], None))["sources"]
    assert len(of_screen) == len(of_text) == len(said["bricks"]) == len(source.bricks)
    compared = 0
    for brick in said["bricks"]:
        shown = [place.statistic for place in (*BRICK_COLUMNS, *BUDGET_COLUMNS)]
        for one in (*shown, *TREND_REPORT, statistic("percent_of_roof")):
            figure = FORMATS[one.unit].bare(brick[one.key])
            if one in shown and one.key != "budget_used_percent":
                assert of_screen[brick["name"]][one.title] == figure
            title = one.report_title or one.title
            if title in of_text[brick["name"]]:
                expected = units.exact_count(brick[one.key]) if one.unit == "count" else figure
                assert of_text[brick["name"]][title] == expected
                compared += 1
        assert len(brick["durations"]) <= 64
        assert sum(bar["count"] for bar in brick["durations"]) == (1_194 if name == "checked" else brick["count"])
        known = [us for us in brick["trend_us"] if us is not None]
        (row,) = [row for row in source.bricks if row.name == brick["name"]]
        assert brick["trend_us"] == list(row.trend_us)
        assert len(brick["trend_us"]) <= 60
        assert (brick["trend_least_us"], brick["trend_most_us"]) == (
            min(known, default=None),
            max(known, default=None),
        )
    assert compared > 10 * len(said["bricks"])


def test_of_layers_text_says_the_medians_of_the_json(runtime: Path) -> None:
    source = source_view(decode_run(runtime))
    of_text = text_tables(REPORTS["text"]([source], ["bricks"], None))
    (said,) = json.loads(REPORTS["json"]([source], [], None))["sources"]
    for brick in said["bricks"]:
        us = [
            cell["p50_us"]
            for layer in said["layer_times"]["layers"]
            for cell in layer["bricks"]
            if cell["name"] == brick["name"]
        ]
        assert of_text[brick["name"]]["layers"] == str(len(us)) == "2"
        assert of_text[brick["name"]]["slowest µs"] == FORMATS["µs"].bare(max(us))


def test_every_column_is_explained() -> None:
    titles = {title for title, _ in Bricks.columns_doc}
    assert {"trend", "% of roof", "µs/tok", "wall %", "incl p50", "incl p99", "incl max"} <= titles


@pytest.mark.parametrize(("width", "height"), [(80, 26), (120, 26)])
def test_the_details_of_a_brick_have_the_modules_behind_it(width: int, height: int) -> None:
    linear = BrickModule("torch.nn.Linear", "torch/nn/modules/linear.py:134", "64x256", "float32", 7)
    quantized = BrickModule("Quantized", "slow.py:10", "64x256", "int8", 1)
    brick = with_parts(samples.LIVE.bricks[1], modules=(linear, quantized))
    text = "\n".join(map(plain, detail_lines(brick, samples.LIVE, width, height)))
    assert "torch.nn.Linear, torch/nn/modules/linear.py:134," in text
    assert "Quantized, slow.py:10, weight 64x256 int8, 1 place" in text
    bare = "\n".join(map(plain, detail_lines(samples.LIVE.bricks[1], samples.LIVE, width, height)))
    assert " module " not in bare
    many = with_parts(brick, modules=(linear,) * 5)
    assert "2 more kinds of modules" in "\n".join(map(plain, detail_lines(many, samples.LIVE, width, 60)))


@pytest.mark.parametrize("height", [5, 6, 7, 8, 9])
def test_a_low_panel_of_a_brick_has_the_figures_of_its_time(height: int) -> None:
    brick = with_parts(
        samples.LIVE.bricks[1], modules=(BrickModule("torch.nn.Linear", "linear.py:134", "8x8", "int8", 1),)
    )
    text = "\n".join(map(plain, detail_lines(brick, samples.LIVE, 120, height)))
    assert "exclusive" in text
    assert "of the step" in text
    assert "none set" not in text


@pytest.mark.parametrize(
    ("passed", "failed", "cell"), [(4, 0, "4 ok"), (4, 1, "1 fail"), (0, 12, "12 fail"), (0, 0, "–")]
)
def test_the_cell_of_checks_says_in_words_whether_they_failed(passed: int, failed: int, cell: str) -> None:
    (column,) = [one for one in brick_columns(100.0, budgets=False, checks=True) if one.title == "checks"]
    row = replace(DOWN, checks_passed=passed, checks_failed=failed)
    assert plain(column.cell(row, column.width)) == cell
    assert len(cell) <= column.width
