"""Tests of the list of processes: which processes are watched, the quality of their data, and which is selected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.feeds.replay import ReplayFeed
from cbtop.protocol.device_messages import Unknown
from cbtop.tui.app import CbtopApp
from cbtop.tui.replay_app import ReplayApp
from cbtop.tui.views import VIEWS
from cbtop.tui.views.overview import OverviewDrawing
from cbtop.tui.views.sources import Sources
from cbtop.tui.widgets.lines import plain
from cbtop.viewmodels.loss import LossView
from cbtop.viewmodels.merge_mode import MergeMode
from cbtop.viewmodels.merged import MergedView
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.sources import SourceRow
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed, screen_text
from tests.cbtop.samples import ALONE, ROWS, list_of, row_of
from tests.cbtop.tui.views.test_screens import SIZES
from tests.representatives import first_by_default

IMPERFECT = Path(__file__).parents[2] / "imperfect.cbtop"
TAB = str(VIEWS.index(Sources) + 1)
WIDE = (200, 60)
Golden = Callable[[str, str], None]


async def shown(source: SourceView, size: tuple[int, int], *turns: str) -> list[str]:
    """Return the text of the screen when the view opens, and after each key of `turns`."""
    app = CbtopApp(ScriptedFeed(source), section="sources", interval_s=60)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        texts = [screen_text(app)]
        for key in turns:
            await pilot.press(key)
            await pilot.pause()
            texts.append(screen_text(app))
        return texts


def listing(*rows: SourceRow) -> SourceView:
    return replace(samples.LIVE, listed=list_of(*rows, costs=samples.COSTS))


def line_of(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)


@pytest.mark.slow
async def test_at_two_hundred_columns_every_figure_of_every_source_is_there(golden: Golden) -> None:
    folded, *_, unfolded = await shown(samples.LIVE, WIDE, *["j"] * 4, "enter")
    for title, _ in Sources.columns_doc:
        assert (title in folded) == (title != "Δ")  # The list has this column only if there is a baseline.
    assert "bench.py" not in folded
    golden("sources-200x60", unfolded)


async def test_those_that_have_ended_are_one_row_that_enter_unfolds_and_folds() -> None:
    first, *_, unfolded, folded = await shown(samples.LIVE, WIDE, *["j"] * 4, "enter", "enter")
    assert "▸ 2 ended" in first
    assert "▾ 2 ended" in unfolded
    assert "train.py" in unfolded
    # If the list is folded, one of its lines says how to unfold it. This line also contains the word "ended".
    assert folded.count("ended") == first.count("ended") + 1
    assert "train.py" not in folded


async def test_where_nothing_runs_those_that_have_ended_are_there_at_once() -> None:
    ended = listing(*(row for row in ROWS if row.state != "live"))
    (text,) = await shown(ended, (80, 24))
    assert "bench.py" in text
    assert "train.py" in text


async def test_enter_on_a_source_shows_it_in_every_view_and_ends_a_merge() -> None:
    other = replace(samples.LIVE, key="rank1", pid=7001, program="serve.py")
    app = CbtopApp(ScriptedFeed(samples.LIVE, other), section="sources", interval_s=60)
    async with app.run_test(size=(120, 34)) as pilot:
        await pilot.pause()
        await pilot.press("m", "j", "j")
        await pilot.pause()
        assert app.selection.key == samples.LIVE.key
        await pilot.press("enter")
        await pilot.pause()
        assert (app.selection.key, app.merge) == ("rank1", None)
        assert "● serve.py         Qwen2.5-7B      7001" in screen_text(app)
        await pilot.press("1")
        await pilot.pause()
        assert "serve.py 7001@buildbox" in screen_text(app)


async def test_nothing_but_a_key_chooses_and_the_cursor_stays_on_its_source() -> None:
    feed = ScriptedFeed(samples.LIVE)
    app = CbtopApp(feed, section="sources", interval_s=60)
    async with app.run_test(size=(120, 34)) as pilot:
        await pilot.pause()
        await pilot.press("j", "j")
        newest = row_of(samples.LIVE, key="newest", program="newest.py")
        feed.seen = [listing(newest, *ROWS), replace(samples.LIVE, key="newest", program="newest.py")]
        app.tick()
        await pilot.pause()
        text = screen_text(app)
    assert app.selection.key == samples.LIVE.key
    assert line_of(text, "newest.py").startswith("   newest.py")
    assert line_of(text, "7001").startswith("▎")


async def test_another_is_chosen_also_while_the_one_shown_has_recorded_nothing_yet() -> None:
    here, elsewhere = await shown(samples.COMPILING, (80, 24), "1")
    assert "serve.py" in here
    assert "compiling kernels" in here
    assert "serve.py" not in elsewhere


async def test_of_a_merge_every_member_is_marked() -> None:
    merged = MergedView(MergeMode.SUM, ("rank 0", "rank 1"), ("rank0", "rank1"), left_out=0)
    (text,) = await shown(replace(samples.LIVE, merged=merged), (120, 34))
    assert [line[1:3].strip() for line in text.splitlines() if "serve.py" in line] == ["●", "●"]
    assert "  cbtop demo" in line_of(text, " 4242  buildbox")


async def test_one_that_is_shown_and_folded_away_is_said() -> None:
    (text,) = await shown(replace(samples.LIVE, key="killed"), (80, 24))
    assert "▸ 2 ended ●" in text


@first_by_default("size", SIZES, ids="{0[0]}x{0[1]}".format)
async def test_what_was_lost_before_anybody_looked_is_said_here_and_nowhere_else(size: tuple[int, int]) -> None:
    loss = LossView(208_000, 206_500, 1_500, 1_500, 0)
    source = replace(listing(replace(ALONE, loss=loss)), loss=loss)
    here, *others = await shown(source, size, *(str(at) for at in range(1, len(VIEWS) + 1) if str(at) != TAB))
    assert "before attach" in here or size[1] < 20
    for text in others:
        assert "before" not in text.split("─")[0]
        assert "1,500" not in text
        assert "! " not in text


async def test_words_below_the_selected_source_explain_each_figure_that_is_na() -> None:
    first, *_, other, stuck = await shown(samples.LIVE, (80, 24), "j", "j", "j")
    assert "n/a       recording costs: it does not measure that: under" in first
    assert "records   2,000,000 produced, 8,000 lost (0.4 % since the daemon looked)" in other
    assert "by a clock 3.21 ms behind ± 110.0 µs (derived)" in other
    assert "state     STALLED 32 s: stalled for 32 s in decode → Layer 17 → AllReduce" in stuck
    assert "n/a       steps/s: it has marked no step" in stuck


async def test_forty_columns_and_ten_lines_say_who_is_there_and_how_it_is() -> None:
    (text,) = await shown(samples.LIVE, (40, 10))
    assert "hangs.py" in text or "serve.py" in text
    assert "LIVE" in text


async def test_names_are_cleaned_and_a_reason_is_one_line_of_text() -> None:
    hostile = replace(ALONE, program="\x1b[31mx", unknown=(Unknown("model", "a\x07\nb"),))
    (text,) = await shown(listing(hostile), WIDE)
    assert "\x1b" not in text
    assert "\x07" not in text


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_overview_has_what_this_viewer_costs_where_that_is_known(width: int) -> None:
    drawing = OverviewDrawing()
    drawing.show_source(samples.LIVE)
    assert "this viewer 3.4 % of a core" in "\n".join(map(plain, drawing.draw(width, 40)))
    drawing.show_source(replace(samples.LIVE, listed=list_of(ALONE)))
    assert "of a core" not in "\n".join(map(plain, drawing.draw(width, 40)))


@pytest.mark.usefixtures("utc", "known_cost")
@first_by_default("size", [(80, 24), (120, 40)], ids="{0[0]}x{0[1]}".format)
async def test_of_the_imperfect_recording_it_looks_like_its_golden(size: tuple[int, int], golden: Golden) -> None:
    with ReplayFeed(IMPERFECT) as feed:
        feed.is_playing = False
        feed.seek(20.0)
        app = ReplayApp(feed, interval_s=60, section="sources")
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await pilot.press("j", "enter", "j")
            await pilot.pause()
            golden(f"imperfect-sources-{size[0]}x{size[1]}", screen_text(app))


async def test_words_that_find_no_room_are_counted() -> None:
    why = tuple(Unknown(figure, "it is not known") for figure in ("model", "tokens_per_sec", "lag_s", "devices"))
    (text,) = await shown(listing(replace(ALONE, unknown=why)), (80, 13))
    assert "on a taller terminal" in text
    assert "n/a       model" not in text
    (text,) = await shown(listing(replace(ALONE, unknown=why)), (80, 24))
    assert "more line" not in text
    assert "n/a       on: it is not known" in text


async def test_under_the_words_stand_its_last_two_minutes() -> None:
    charted = replace(ALONE, tokens_per_sec_history=(20.0, 30.0), step_us_history=(8_000.0, None))
    (text,) = await shown(listing(charted), (120, 40))
    assert "─ 30.00 · 20.00 to 30.00 ─" in text
    assert "─ ms a decode step, mean of each second ─" in text
