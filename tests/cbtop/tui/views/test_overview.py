"""Tests of the first screen: at every size, the screen shows what is slow and why.

Its numbers equal those of text and JSON.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from cbtop import units
from cbtop.protocol.attributes import ModuleAttributes
from cbtop.reports import REPORTS
from cbtop.text import comparison_text
from cbtop.tui.app import CbtopApp
from cbtop.tui.views.bricks import Bricks
from cbtop.tui.views.layers import LayerMap
from cbtop.tui.views.overview import OverviewDrawing
from cbtop.tui.widgets.lines import plain, width_of
from cbtop.viewmodels.serving import EnginePartRow, LatencyView, LoadView, ServingView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Severity, Subject, Verdict
from tests.cbtop import made_machines, samples
from tests.cbtop.conftest import ScriptedFeed, screen_text, view_of
from tests.representatives import first_by_default

FOUND = Verdict(
    "odd-layer",
    Severity.WARNING,
    "Layer 4 is 1.43× the median layer",
    (),
    "compare its weights with those of the others",
    Subject(About.LAYER, "Layer 4"),
    3.1,
    "it were as fast as the median layer",
)
SLOW = replace(samples.LIVE, verdicts=(FOUND, replace(FOUND, id="idle", sentence="Half of the time no step runs")))
BUSY = replace(SLOW, machines=(made_machines.EIGHT,))
BARE = replace(samples.LIVE, layer_times=None, bricks=(), books=None, tokens_per_sec_history=(), verdicts=())
SERVED = replace(
    SLOW,
    serving=ServingView(
        "vLLM",
        9,
        2_000.0,
        (EnginePartRow("scheduler", 25.0, 500.0, 500.0), EnginePartRow("model", 75.0, 1_500.0, 1_500.0)),
        3,
        LatencyView(3, 1_000.0, 2_000.0),
        None,
        LoadView(0.5, 1, 2, 40.0),
        (LoadView(0.5, 1, 2, 40.0),),
        (),
        0,
    ),
)
SOURCES = [SLOW, BUSY, BARE, SERVED, samples.COMPILING, samples.DEEP, samples.SLOWEST]
WIDTHS, HEIGHTS = (40, 61, 80, 100, 120, 159, 160, 200, 300), (5, 9, 18, 28, 34, 54, 100)


def drawn(source: SourceView, width: int, height: int) -> list[str]:
    drawing = OverviewDrawing()
    drawing.show_source(source)
    lines = drawing.draw(width, height)
    assert max(map(width_of, lines), default=0) <= width
    return [plain(line) for line in lines]


@first_by_default("source", SOURCES, 2, ids=["slow", "eight", "bare", "served", "compiling", "deep", "slowest"])
def test_it_is_drawn_at_every_size_within_it(source: SourceView) -> None:
    for width in WIDTHS:
        for height in HEIGHTS:
            assert len(drawn(source, width, height)) <= height


def test_an_engine_has_two_lines_with_its_latencies_and_its_parts() -> None:
    text = "\n".join(drawn(SERVED, 120, 40))
    assert "  engine TTFT p50 1.00 ms, p99 2.00 ms (3 requests); inter-token n/a; 1 running, 2 waiting" in text
    assert "  engine step 2.00 ms: scheduler 25.0 %, model 75.0 % (the latest 9 steps)" in text
    assert "TTFT" in "\n".join(drawn(SERVED, 80, 24))
    assert "TTFT" not in "\n".join(drawn(SLOW, 120, 40))


def test_a_large_screen_has_bars_of_bricks_by_layer_and_device_curves() -> None:
    source = replace(SLOW, machines=(made_machines.H100,))
    text = "\n".join(drawn(source, 200, 55))
    for name in ("DownProjection", "UpProjection", "QkvProjection"):
        assert re.search(rf"^  {name} +[▁-█ ]+ [\d.,]+ .s  L\d", text, re.MULTILINE), name
    assert "─ GPU 0 busy % ─" in text


@pytest.mark.parametrize(("width", "height"), [(120, 35), (200, 55)])
def test_most_of_the_screen_is_used(width: int, height: int) -> None:
    lines = drawn(replace(SLOW, machines=(made_machines.H100,)), width, height)
    assert sum(len(line.rstrip()) for line in lines) >= 0.6 * width * height


@pytest.mark.parametrize(("width", "height"), [(80, 19), (120, 35), (200, 55)])
def test_what_is_slow_and_what_mending_it_gives_is_on_the_first_screen(width: int, height: int) -> None:
    text = "\n".join(drawn(SLOW, width, height))
    assert FOUND.sentence in text
    assert "▼ Layer 4: p50 1.41× that of its peers" in text
    if height > 19:
        assert "+3.10 tokens/s if it were as fast as the median layer (derived)" in text
        assert "Half of the time no step runs" in text


@pytest.mark.parametrize(("width", "height"), [(80, 17), (80, 19), (100, 24), (120, 34), (200, 17), (200, 55)])
@pytest.mark.parametrize("source", [SLOW, SERVED, samples.COMPARED, samples.SLOWEST], ids=lambda one: one.program)
def test_the_three_costliest_bricks_are_on_the_first_screen(source: SourceView, width: int, height: int) -> None:
    text = "\n".join(drawn(source, width, height))
    for row in source.bricks[:3]:
        assert re.search(rf"{row.name} +█", text), row.name


def test_a_warm_up_that_is_not_shown_takes_no_line_of_the_first_screen() -> None:
    steps = SLOW.steps
    assert steps is not None
    warmed = replace(SLOW, phases=(*SLOW.phases, *(replace(steps, phase=f"{at} (warm-up)") for at in "abc")))
    assert drawn(warmed, 80, 19) == drawn(SLOW, 80, 19)


def test_only_several_phases_have_a_mark_of_the_shown_one() -> None:
    phases = samples.LIVE.phases
    assert len(phases) > 1
    assert "▸decode" in "\n".join(drawn(samples.LIVE, 120, 33))
    # A mark of the only phase would look like the cursor.
    assert "▸" not in "\n".join(drawn(replace(samples.LIVE, phases=phases[:1]), 120, 33))


LONG = replace(FOUND, sentence=FOUND.sentence + " by its median call" * 9, advice=FOUND.advice + ", one by one" * 20)


def test_where_there_is_room_nothing_that_a_verdict_says_is_cut() -> None:
    right = [line[200 * 3 // 5 + 2 :] for line in drawn(replace(SLOW, verdicts=(LONG, LONG)), 200, 55)]
    text = " ".join(line.strip() for line in right)
    assert text.count(LONG.sentence) == text.count(LONG.advice) == 2


def test_the_gain_is_next_to_the_sentence_if_there_is_no_room_for_the_advice() -> None:
    lines = drawn(replace(SLOW, verdicts=(LONG, replace(FOUND, gain_tokens_per_sec=None), LONG)), 80, 19)
    assert ["+3.10 tokens/s" in line for line in lines if "Layer 4 is 1.43×" in line] == [True, False, True]
    assert any("gains are derived" in line for line in lines)


def test_verdicts_that_find_no_room_are_counted() -> None:
    many = replace(SLOW, verdicts=(FOUND,) * 9)
    text = "\n".join(drawn(many, 80, 19))
    assert f"{9 - text.count(FOUND.sentence)} more" in text


def test_a_source_without_problems_says_so() -> None:
    assert "✓ no problem found" in "\n".join(drawn(BARE, 80, 19))


async def test_screen_text_and_json_hold_the_same_rate() -> None:
    said = json.loads(REPORTS["json"]([samples.LIVE], [], None))["sources"][0]
    rate = units.number(said["steps"]["tokens_per_sec"])
    app = CbtopApp(ScriptedFeed(samples.LIVE), interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        lines = screen_text(app).splitlines()
        assert view_of(app) == "overview"
    assert f" {rate}, last 10.4 s ─" in lines[4]
    phase = next(line for line in lines if line.startswith("▸decode"))
    assert phase.split()[1] == rate
    assert f"{rate} tokens/s" in REPORTS["text"]([samples.LIVE], [], None)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_tokens_and_steps_stand_beside_those_of_the_baseline(width: int, height: int) -> None:
    found = samples.COMPARED.baseline
    assert found is not None
    text = "\n".join(drawn(samples.COMPARED, width, height - 5))
    for rate in comparison_text.baseline_rates(found):
        assert rate in text
    assert "DownProjection in Layer 5 is 266.8 ± 69.69 µs/token slower" in text
    text = "\n".join(drawn(samples.UNLIKE, width, height - 5))
    assert "n/a: another batch: 1.00 sequences a step, the baseline has 4.00" in text
    assert "tokens/s, was" not in text


def test_moved_bytes_are_next_to_the_cpu_as_derived_or_with_why_unknown() -> None:
    on_cpu = replace(samples.LIVE, machines=(made_machines.NO_GPU,))
    moved = sum(row.bytes or 0.0 for row in on_cpu.bricks)
    assert on_cpu.time_range is not None
    assert on_cpu.moved_gb_per_sec == pytest.approx(moved / on_cpu.time_range.wall_us / 1e3)
    assert f"{units.number(on_cpu.moved_gb_per_sec)} GB/s moved by bricks (derived)" in "\n".join(
        drawn(on_cpu, 120, 40)
    )
    bare = replace(on_cpu, bricks=tuple(replace(row, bytes=None) for row in on_cpu.bricks))
    assert "GB/s n/a: no brick declares its bytes" in "\n".join(drawn(bare, 120, 40))
    assert on_cpu.steps is not None
    sampled = replace(on_cpu, steps=replace(on_cpu.steps, recorded=3))
    assert "GB/s n/a: not every step is recorded" in "\n".join(drawn(sampled, 120, 40))
    on_gpu = replace(on_cpu, machines=(made_machines.H100,))
    assert "moved by bricks" not in "\n".join(drawn(on_gpu, 120, 40))


SLOWEST_LAYER = SLOW.layer_times.slowest if SLOW.layer_times else None
assert SLOWEST_LAYER is not None
ODD = replace(FOUND, about=Subject(About.LAYER, SLOWEST_LAYER.name, SLOWEST_LAYER.id))
ACTED = replace(SLOW, verdicts=(ODD,), machines=(made_machines.H100,))


def line_of(app: CbtopApp, text: str) -> tuple[int, int]:
    """Return (column, line) of the first line of the screen with `text`."""
    lines = screen_text(app).splitlines()
    y = next(at for at, line in enumerate(lines) if text in line)
    return lines[y].index(text), y


def under_cursor(app: CbtopApp) -> str:
    """Return the first line of the screen with the mark of the cursor, or ""."""
    return next((line for line in screen_text(app).splitlines() if line.startswith("▎")), "")


EVIDENCE = [
    (ODD.sentence, "layers"),
    ("▼ Layer 4: p50", "layers"),
    ("■ DownProjection", "bricks"),
    (" prefill  ", "timeline"),
    ("% busy", "devices"),  # not there if the terminal has 80 columns
]


@pytest.mark.parametrize(
    ("size", "text", "view"),
    [
        # Each line runs by default at one size, and each size with one line.
        pytest.param(size, text, view, marks=() if row % 3 == column else pytest.mark.slow)
        for row, (text, view) in enumerate(EVIDENCE)
        for column, size in enumerate([(80, 24), (120, 40), (200, 60)])
        if not (size == (80, 24) and view == "devices")
    ],
)
async def test_a_click_goes_to_the_evidence_and_esc_comes_back(size: tuple[int, int], text: str, view: str) -> None:
    app = CbtopApp(ScriptedFeed(ACTED), interval_s=60)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        assert await pilot.click(offset=line_of(app, text))
        await pilot.pause()
        assert view_of(app) == view
        await pilot.press("escape")
        await pilot.pause()
        assert view_of(app) == "overview"
        assert "▎" in screen_text(app) or view == "timeline"


async def test_enter_opens_the_row_under_the_cursor_which_starts_on_the_worst_verdict() -> None:
    app = CbtopApp(ScriptedFeed(ACTED), interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert under_cursor(app) == ""
        await pilot.press("j")
        await pilot.pause()
        assert ODD.sentence in under_cursor(app)
        await pilot.press("enter")
        await pilot.pause()
        assert view_of(app) == "layers"
        row = app.query_one(LayerMap).current
        assert row is not None
        assert row.id == ODD.about.node
        await pilot.press("escape", "j", "j", "j")
        await pilot.pause()
        assert "DownProjection" in under_cursor(app)


async def test_the_evidence_of_a_layer_has_the_cursor_on_its_slow_brick() -> None:
    app = CbtopApp(ScriptedFeed(ACTED), interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("enter", "enter")
        await pilot.pause()
        assert "▸ DownProjection" in screen_text(app)
        assert "Layer 4 · DownProjection" in screen_text(app)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_the_evidence_of_a_brick_is_its_open_detail_even_if_it_was_filtered(size: tuple[int, int]) -> None:
    app = CbtopApp(ScriptedFeed(ACTED), interval_s=60)
    async with app.run_test(size=size) as pilot:
        app.query_one(Bricks).look_for("Norm")
        await pilot.pause()
        await pilot.click(offset=line_of(app, "■ DownProjection"))
        await pilot.pause()
        assert view_of(app) == "bricks"
        brick = app.query_one(Bricks)._table.current
        assert brick is not None
        assert brick.name == "DownProjection"
        assert "─ ■ DownProjection ─" in screen_text(app)


async def test_a_click_on_a_bar_opens_its_layer() -> None:
    app = CbtopApp(ScriptedFeed(ACTED), interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        _, y = line_of(app, "whole layer")
        first_bar = screen_text(app).splitlines()[y].index("█")
        await pilot.click(offset=(first_bar, y))
        await pilot.pause()
        row = app.query_one(LayerMap).current
        assert row is not None
        assert row.index == "0"


async def test_esc_does_not_leave_a_view_that_the_user_chose_by_its_number() -> None:
    app = CbtopApp(ScriptedFeed(ACTED), interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("enter", "enter", "4", "escape")
        await pilot.pause()
        assert view_of(app) == "timeline"


def test_the_cursor_goes_over_each_row_once_and_stays_within_them() -> None:
    drawing = OverviewDrawing()
    drawing.show_source(ACTED)
    for width, height in ((80, 19), (120, 35), (200, 55)):
        drawing.draw(width, height)
        assert len(drawing.rows) == len(set(drawing.rows)) >= 6
        drawing.move(0)
        drawing.move(-99)
        assert drawing.current == drawing.rows[0]
        drawing.move(99)
        assert drawing.current == drawing.rows[-1]


def test_each_brick_has_its_limit_if_the_roofs_are_known() -> None:
    lines = drawn(SLOW, 80, 19)
    assert any(line.rstrip().endswith("ms  memory 73 %") for line in lines)
    bare = replace(SLOW, bricks=tuple(replace(row, roof=None) for row in SLOW.bricks))
    assert "n/a" not in "".join(line for line in drawn(bare, 80, 19) if "█" in line)
    launched = replace(bare.bricks[0], name="LmHead, launch-bound")
    waits = "".join(drawn(replace(bare, bricks=(launched, *bare.bricks[1:])), 100, 19))
    assert re.search(r"LmHead, launch-bound .* ms  launch ", waits)
    assert re.search(r"DownProjection .* ms  n/a ", waits)


ODD_CLASS = replace(
    ODD,
    sentence="Layer 4 is 8.7× the median layer (6.91 ms against 794.6 µs), most of it in DownProjection (+4.44 ms a "
    "step); its `down` is `Int8Linear`, odd_class.py:8; the others are `torch.nn.Linear`",
)


async def test_a_verdict_under_the_cursor_is_shown_whole_and_moves_no_row() -> None:
    app = CbtopApp(ScriptedFeed(replace(ACTED, verdicts=(ODD_CLASS,))), interval_s=60)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "odd_class.py:8" not in screen_text(app)
        rows = app.query_one(OverviewDrawing).rows
        await pilot.press("j")
        await pilot.pause()
        words = " ".join(screen_text(app).replace("▎", " ").split())
        assert ODD_CLASS.sentence in words
        assert ODD_CLASS.advice in words
        assert app.query_one(OverviewDrawing).rows == rows
        await pilot.press("j")
        await pilot.pause()
        assert "odd_class.py:8" not in screen_text(app)


async def test_a_process_that_waits_for_a_processor_opens_who_has_them() -> None:
    starved = replace(FOUND, id="starved", about=Subject(About.SOURCE, ACTED.program))
    app = CbtopApp(ScriptedFeed(replace(ACTED, verdicts=(starved,))), interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("j", "enter")
        await pilot.pause()
        assert view_of(app) == "devices"


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)])
async def test_enter_goes_from_a_verdict_to_the_source_line_and_esc_back(size: tuple[int, int]) -> None:
    module = ModuleAttributes(module_class="Int8Linear", module_source="odd_class.py:8")
    graph = tuple(replace(row, module=module) if row.name == "DownProjection" else row for row in ACTED.graph)
    app = CbtopApp(ScriptedFeed(replace(ACTED, graph=graph)), interval_s=60)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await pilot.press("enter", "enter")
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()
        assert view_of(app) == "graph"
        assert "DownProjection" in under_cursor(app)
        assert "Int8Linear, odd_class.py:8" in screen_text(app)
        views = []
        for _ in range(2):
            await pilot.press("escape")
            await pilot.pause()
            views.append(view_of(app))
        assert views == ["layers", "overview"]


async def test_enter_on_a_node_without_children_shows_and_hides_its_details() -> None:
    app = CbtopApp(ScriptedFeed(ACTED), interval_s=60)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("6", "z")
        await pilot.pause()
        await pilot.press("G")
        await pilot.pause()
        opened = []
        for _ in range(2):
            await pilot.press("enter")
            await pilot.pause()
            opened.append("measured and derived" in screen_text(app))
            assert under_cursor(app)
        assert sorted(opened) == [False, True]
