"""Words that only this project uses are not on the screen, or the help (`?`) explains them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cbtop.profiler.analysis.time_breakdown import BETWEEN_LAYERS, INNER_STEPS, INSIDE_LAYERS
from cbtop.reports import REPORTS
from cbtop.tui.app import CbtopApp
from cbtop.tui.views.books import books_equation
from cbtop.tui.views.bricks import Bricks
from cbtop.tui.views.help import help_lines
from cbtop.tui.widgets.lines import plain
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed, screen_text


@pytest.mark.parametrize(
    "word", [INSIDE_LAYERS, BETWEEN_LAYERS, INNER_STEPS, "read here", "backend", "numba-avx2-omp×2"]
)
@pytest.mark.parametrize("width", [80, 120])
def test_the_help_explains_what_is_no_plain_word(word: str, width: int) -> None:
    said = [plain(line) for line in help_lines((), CbtopApp.SHOWN, width)]
    assert any(word in line for line in said[next(at for at, line in enumerate(said) if "─ words" in line) :])


async def test_what_finds_no_room_says_which_view_shows_it() -> None:
    async with CbtopApp(ScriptedFeed(samples.LIVE), interval_s=60).run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        assert "more: Bricks" in screen_text(pilot.app)  # type: ignore[arg-type]
        await pilot.press("2")
        assert pilot.app.query_one(Bricks) in pilot.app.focused.ancestors  # type: ignore[union-attr]


def test_of_a_step_that_has_not_ended_the_books_say_that_it_still_runs() -> None:
    assert samples.LIVE.books is not None
    line = books_equation(samples.LIVE, replace(samples.LIVE.books, open_us=600.0), 200)
    assert plain(line).endswith("   a step still runs, 600.0 µs")


@pytest.mark.parametrize(
    ("count", "why"),
    [(0, "no decode step ended in this time"), (7, "none of 7 decode steps of this time was recorded inside")],
)
def test_the_books_say_that_no_step_was_recorded_and_not_a_zero_wall_time(count: int, why: str) -> None:
    assert samples.LIVE.books is not None
    assert samples.LIVE.steps is not None
    steps = replace(samples.LIVE.steps, count=count, recorded=0)
    books = replace(samples.LIVE.books, wall_us=0.0, bricks_us=0.0, gaps=(), unattributed_us=0.0, open_us=600.0)
    source = replace(samples.LIVE, steps=steps, books=books)
    assert plain(books_equation(source, books, 200)) == f"n/a: {why}   a step still runs, 600.0 µs"
    text = REPORTS["text"]([source], ["bricks"])
    assert f"step time: n/a ({why}); 600.0 µs in a step still running" in text
