"""Tests of the view of training steps: the parts of the bar add up, and both passes of a brick share one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.protocol.vocabulary import TrainingPart
from cbtop.tui.app import CbtopApp
from cbtop.tui.views.brick_detail import BrickDetail
from cbtop.tui.views.training import LOOKS, legend, lines_below, training_bar, training_lines, training_rows
from cbtop.tui.widgets.lines import ROLES, plain, width_of
from cbtop.units import percent
from cbtop.viewmodels.communication import CommunicationView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.training import TrainingPartRow, TrainingView
from tests.cbtop.conftest import KnownCost, ScriptedFeed, screen_text
from tests.cbtop.made_training import NORM, ROOMY, STEADY_SCALE, Training, trained
from tests.representatives import first_by_default

SIZES = [(80, 24), *(pytest.param(size, marks=pytest.mark.slow) for size in ((120, 40), (200, 60)))]
WORST = Training(recomputes=True, data_us=12_000, warm_up=3)
SHARES = st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(any)


@pytest.fixture
def view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceView:
    monkeypatch.setattr("cbtop.feeds.feed.OwnCost", KnownCost)
    found = trained(tmp_path, WORST).one(window=True).held()
    return replace(found, key="host:1:2:0", pid=1, host="host", program="train.py", listed=None)


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize("size", SIZES, ids="{0[0]}x{0[1]}".format)
async def test_a_training_step_looks_like_its_golden(
    size: tuple[int, int], view: SourceView, golden: Callable[[str, str], None]
) -> None:
    app = CbtopApp(ScriptedFeed(view), interval_s=60)
    texts = []
    async with app.run_test(size=size) as pilot:
        for key in ("1", "2"):
            await pilot.press(key)
            await pilot.pause()
            texts.append(screen_text(app))
    golden(f"training-{size[0]}x{size[1]}", "\n".join(texts))


def training(shares: list[float]) -> TrainingView:
    whole = sum(shares)
    rows = [
        TrainingPartRow(part.value, 100 * share / whole, share, share)
        for part, share in zip(TrainingPart, shares, strict=False)
    ]
    return TrainingView(64, whole, tuple(rows), ())


@given(SHARES, st.integers(20, 200))
def test_the_bar_of_a_training_step_always_fills_its_width(shares: list[float], width: int) -> None:
    assert width_of(training_bar(training(shares), width)) == width - 2


@given(SHARES, st.integers(80, 200))
def test_the_legend_has_every_part_that_took_time(shares: list[float], width: int) -> None:
    found = training(shares)
    lines = legend(found, width)
    assert all(width_of(line) <= width for line in lines)
    assert len(lines) <= 3
    text = " ".join(plain(line) for line in lines)
    for part in found.parts:
        assert (f"{part.name} {percent(part.percent)}" in text) == (part.mean_us > 0)


def test_overlapped_communication_is_in_the_legend_but_in_no_part() -> None:
    communication = CommunicationView((), 1_200.0, "")
    found = replace(training([1.0, 2.0]), communication=communication)
    text = " ".join(plain(line) for line in legend(found, 80))
    assert text.endswith("overlapped 1.20 ms at most")
    unknown = replace(found, communication=replace(communication, overlapped_us=None))
    assert " ".join(plain(line) for line in legend(unknown, 80)).endswith("overlapped n/a")


def test_a_low_part_of_the_screen_has_the_bar_and_the_largest_shares(view: SourceView) -> None:
    assert view.training
    lines = [plain(line) for line in training_lines(view, view.training, 80, 2)]
    assert len(lines) == 2
    assert lines[1].startswith("  ◂ backward 51.3 %  ▒ data wait 22.5 %")


def test_the_norm_the_loss_scale_and_the_memory_follow_where_there_is_room(tmp_path: Path) -> None:
    view = trained(tmp_path, Training(gradients=(NORM, STEADY_SCALE, ROOMY))).one()
    assert view.training
    lines = [plain(line) for line in training_lines(view, view.training, 100, 20)]
    assert lines[-3:] == [
        "  gradient norm 0.75 in step 298, before clipping (p50 0.50, max 1.50 of the latest 64 norms)",
        "  loss scale 65,536; 3 of 300 steps were skipped",
        "  memory of a step ≥42.0 GB at its peak; reserved 48.0 GB of 79.0 GB (most of 12 recorded steps)",
    ]
    for height in (3, len(lines) - 1):
        assert len(training_lines(view, view.training, 100, height)) <= height
    assert all(width_of(line) <= 60 for line in lines_below(view, view.training, 60))


def test_every_part_has_a_look_of_its_own() -> None:
    assert list(LOOKS) == list(TrainingPart)
    assert len({look.glyph for look in LOOKS.values()}) == len(LOOKS)
    assert {role for look in LOOKS.values() for role in (look.role, look.fill)} <= ROLES


def test_a_part_of_a_later_version_is_in_the_bar_and_the_legend() -> None:
    found = TrainingView(1, 10.0, (TrainingPartRow("all-reduce", 100.0, 10.0, 10.0),), ())
    assert "all-reduce" in plain(training_bar(found, 80))
    assert "all-reduce 100.0 %" in plain(legend(found, 80)[0])


def test_a_brick_has_one_row_and_a_lone_backward_pass_keeps_its_own(view: SourceView) -> None:
    names = [row.name for row in training_rows(view.bricks)]
    assert sorted(names) == sorted(
        ["DownProjection", "QkvProjection", "RmsNorm", "Loss", "Optimizer", "DataWait", "ClipGradients", "ZeroGrad"]
    )
    lone = tuple(row for row in view.bricks if row.name == "Loss backward")
    assert training_rows(lone) == lone


@first_by_default("size", [(120, 60), (200, 60)], ids=["below", "beside"])
async def test_enter_shows_the_passes_of_a_brick_before_it_hides_the_details(
    size: tuple[int, int], view: SourceView
) -> None:
    app = CbtopApp(ScriptedFeed(view), interval_s=60)
    shown = []
    async with app.run_test(size=size) as pilot:
        await pilot.press("2")
        for key in ("home", "enter", "enter", "enter", "enter"):
            await pilot.press(key)
            await pilot.pause()
            detail = app.screen.query_one("#brick-detail", BrickDetail)
            lines = [plain(line) for line in detail.draw(*detail.size)]
            shown.append(lines[0].split(" ─")[0].split(" ", 1)[1].strip() if detail.display else "hidden")
    forward, *others = shown
    assert others == [f"{forward} backward", f"{forward} recompute", "hidden", forward]


@pytest.mark.slow
async def test_another_row_shows_its_first_pass(view: SourceView) -> None:
    app = CbtopApp(ScriptedFeed(view), interval_s=60)
    async with app.run_test(size=(120, 60)) as pilot:
        for key in ("2", "home", "enter", "down", "up"):
            await pilot.press(key)
            await pilot.pause()
        detail = app.screen.query_one("#brick-detail", BrickDetail)
        assert "backward" not in plain(detail.draw(*detail.size)[0])


@pytest.mark.slow
@pytest.mark.parametrize("size", [(120, 40), (80, 12)], ids="{0[0]}x{0[1]}".format)
async def test_the_head_of_training_has_tokens_per_second_and_ms_per_step(
    size: tuple[int, int], tmp_path: Path
) -> None:
    found = trained(tmp_path, Training(tokens=4_096)).one(window=True).held()
    app = CbtopApp(ScriptedFeed(replace(found, listed=None)), interval_s=60)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        head = "\n".join(screen_text(app).splitlines()[:6])
    assert "ms/step" in head
    assert "tokens/s" in head or "tok/s" in head
    assert "ms/tok" not in head
