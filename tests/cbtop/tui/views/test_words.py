"""The project's own words: said plainly where they stand, or explained behind `?`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cbtop.profiler.books import BETWEEN_LAYERS, INNER_STEPS, INSIDE_LAYERS
from cbtop.tui.app import CbtopApp
from cbtop.tui.views.books import books_equation
from cbtop.tui.views.bricks import Bricks
from cbtop.tui.views.help import help_lines
from cbtop.tui.widgets.lines import plain
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed, screen_text


@pytest.mark.parametrize("word", [INSIDE_LAYERS, BETWEEN_LAYERS, INNER_STEPS, "own daemon", "backend", "numba-omp×2"])
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
    line = books_equation(replace(samples.LIVE.books, open_us=600.0), 1, 200)
    assert plain(line).endswith("   a step still runs, 600.0 µs")
