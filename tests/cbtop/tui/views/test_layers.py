"""Tests of the map of layers and bricks: it shows the one slow layer of eighty, without colours and without a key."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from cbtop.tui.app import CbtopApp
from cbtop.tui.views import VIEWS
from cbtop.tui.views.graph import Graph
from cbtop.tui.views.layer_map import how_many, whole_layers
from cbtop.tui.views.layers import LayerMap, Layers
from cbtop.tui.widgets.lines import plain, width_of
from cbtop.tui.widgets.table import Table
from cbtop.viewmodels.source import SourceView
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed, screen_text, view_of
from tests.cbtop.made_training import Training, trained
from tests.representatives import first_by_default

KEY = str(1 + VIEWS.index(Layers))
SIZES = [(80, 24), (120, 40), (200, 60)]


async def opened(pilot: Pilot[int], *keys: str) -> str:
    await pilot.press(KEY, *keys)
    await pilot.pause()
    assert isinstance(pilot.app, CbtopApp)
    return screen_text(pilot.app)


@first_by_default("size", SIZES, ids="{0[0]}x{0[1]}".format)
async def test_the_slow_layer_of_eighty_is_named_and_stands_highest(
    size: tuple[int, int], golden: Callable[[str, str], None]
) -> None:
    app = CbtopApp(ScriptedFeed(samples.DEEP), interval_s=60)
    async with app.run_test(size=size) as pilot:
        text = await opened(pilot)
    assert "▼ Layer 57: p50 1.4" in text
    assert "µs in DownProjection" in text
    lines = text.splitlines()
    mark = next(line for line in lines if "▼57" in line).index("▼57")
    down = next(at for at, line in enumerate(lines) if line.startswith("  DownProjection"))
    first = next(at for at in range(down, 0, -1) if lines[at - 1][2:20].strip() and "┤" not in lines[at - 1][:20])
    bars = [line.ljust(mark + 1) for line in lines[first : down + 1]]
    heights = [sum(" ▁▂▃▄▅▆▇█".find(bar[column]) for bar in bars) for column in range(21, mark - 1)]
    assert sum(" ▁▂▃▄▅▆▇█".find(bar[mark]) for bar in bars) == 8 * len(bars) > 1.3 * max(heights) > 0
    golden(f"layers-of-eighty-{size[0]}x{size[1]}", text)


@pytest.mark.slow
async def test_a_layer_that_is_slow_in_a_few_steps_is_not_said_to_stand_out() -> None:
    layers = samples.DEEP.layer_times
    assert layers
    for steps, said in ((19, "in 19 steps: too few to tell"), (20, "▼ Layer 57: p50 1.4")):
        app = CbtopApp(ScriptedFeed(replace(samples.DEEP, layer_times=replace(layers, steps=steps))), interval_s=60)
        async with app.run_test(size=(80, 24)) as pilot:
            assert said in await opened(pilot)


@pytest.mark.slow
async def test_median_is_one_figure_and_the_median_call_is_called_p50() -> None:
    """The view has two medians with different names.

    "Median" is the median of the layers' mean times. "p50" is the median call of a layer.
    """
    for source in (samples.LIVE, samples.DEEP):
        app = CbtopApp(ScriptedFeed(source), interval_s=60)
        async with app.run_test(size=(159, 60)) as pilot:
            text = await opened(pilot)
        assert set(re.findall(r"median +(of the layers|\w+)", text)) == {"slowest", "of the layers"}
        assert len(re.findall(r"p50 1\.4\d× that of its peers", text)) == 2


@pytest.mark.slow
async def test_arrows_move_the_cursor_and_the_foot_says_what_is_under_it() -> None:
    app = CbtopApp(ScriptedFeed(samples.LIVE), interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        # The slowest layer is selected until the user moves the cursor.
        assert "Layer 4 · whole layer" in await opened(pilot)
        assert "Layer 5 · whole layer" in await opened(pilot, "right")
        assert "Layer 5 · RmsNorm" not in await opened(pilot, "down")
        assert "Layer 0 · " in await opened(pilot, "home")
        assert "Layer 0 · " in await opened(pilot, "left")
        assert "Layer 9 · " in await opened(pilot, "end")
        assert "Layer 9 · between bricks" in await opened(pilot, *["down"] * 40)


async def test_enter_opens_the_layer_in_the_graph() -> None:
    app = CbtopApp(ScriptedFeed(samples.LIVE), interval_s=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press("enter")
        await pilot.pause()
        graph = app.query_one(Graph)
        layer = next(place for place in samples.LIVE.graph if place.name == "Layer 4")
        assert view_of(app) == graph.id
        current = graph.query_one("#graph-table", Table).current
        assert current is not None
        assert (current.id, current.unfolded) == (layer.id, True)


@first_by_default("source", [samples.LIVE, samples.DEEP, samples.SLOWEST], ids=["ten", "eighty", "none"])
async def test_it_is_drawn_at_any_size_and_no_line_is_too_long(source: SourceView) -> None:
    app = CbtopApp(ScriptedFeed(source), interval_s=60)
    async with app.run_test(size=(80, 24)) as pilot:
        await opened(pilot)
        view = app.query_one(LayerMap)
        for width in (20, 40, 61, 99, 100, 151, 300):
            for height in (1, 4, 9, 20, 60):
                lines = view.draw(width, height)
                assert max(map(width_of, lines), default=0) <= width
    if source is samples.SLOWEST:
        assert "several ranks" in plain(view.draw(80, 20)[0])


@first_by_default("size", SIZES, ids="{0[0]}x{0[1]}".format)
async def test_the_layer_slower_than_the_baseline_by_most_is_marked_and_named(size: tuple[int, int]) -> None:
    app = CbtopApp(ScriptedFeed(samples.COMPARED), interval_s=60)
    async with app.run_test(size=size) as pilot:
        text = await opened(pilot)
        assert "(derived) Layer 5 is 265.4 ± 88.20 µs/token slower than the baseline" in text
        marks = next(line for line in text.splitlines() if "Δ5" in line)
        assert marks.index("▼") < marks.index("Δ5")
        text = await opened(pilot, "right", "down")
        assert "Layer 5 · DownProjection  " in text
        assert "Δ +22.2 %" in text


async def test_that_all_layers_are_slower_is_said_where_a_longer_cache_may_be_why() -> None:
    found = samples.COMPARED.baseline
    assert found is not None
    wholes = tuple(one for one in found.changes if one.brick is None or one.layer is None)
    source = replace(samples.COMPARED, baseline=replace(found, changes=wholes, is_same_cache=False))
    app = CbtopApp(ScriptedFeed(source), interval_s=60)
    async with app.run_test(size=(80, 24)) as pilot:
        text = await opened(pilot)
    assert "no layer is slower" not in text
    assert "Δ (derived) 1 of 10 layers are slower, as a longer cache makes them" in text


def test_in_training_a_layer_counts_once_and_its_backward_has_a_sign(tmp_path: Path) -> None:
    view = trained(tmp_path, Training(steps=30)).one()
    layers = view.layer_times
    assert layers is not None
    assert [row.is_backward for row in layers.rows] == [False] * 3 + [True] * 3
    assert how_many(layers) == "3 layers, forward and backward"
    ruler, *bars = [plain(line) for line in whole_layers(layers, 120, 3)]
    assert ruler.split()[:2] == ["0", "◂0"]
    assert bars[-1].split()[-1].startswith("◂L")
    forward = replace(layers, rows=layers.rows[:3])
    assert (how_many(forward), how_many(replace(layers, rows=layers.rows[:4]))) == (
        "3 layers",
        "3 layers, 1 of them also backward",
    )
