"""Tests of the sampled functions on the first screen: a line at every size, and all functions behind Enter."""

from __future__ import annotations

from dataclasses import replace

from cbtop.tui.app import CbtopApp
from cbtop.tui.views.overview import OverviewDrawing
from cbtop.tui.views.sampled import HOW, TITLE
from cbtop.tui.widgets.lines import plain, width_of
from cbtop.viewmodels.cpu_samples import FunctionShare, SampledTimeView
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed, screen_text

ENCODE = FunctionShare("Tokenizer.encode", "tok/fast.py", 88, 60, 60.0, 50.2, 69.1, 0.0, "serve.py:12 main")
SLEEP = FunctionShare("Queue.get", "queue.py", 171, 36, 36.0, 27.3, 45.8, 97.0, "")
BETWEEN = SampledTimeView("between steps", 100, 41.0, 2.0, 2.0, (ENCODE, SLEEP))
FEW = SampledTimeView("not instrumented", 7, 41.0, 0.0, 0.0, (replace(ENCODE, percent=None),))
SAMPLED = replace(samples.LIVE, sampled=(BETWEEN, FEW))
LINE = "between steps (sampled, n = 100"


def drawn(width: int, height: int, *, is_open: bool = False) -> list[str]:
    drawing = OverviewDrawing()
    drawing.show_source(SAMPLED)
    drawing.open_sampled(is_open)
    lines = drawing.draw(width, height)
    assert max(map(width_of, lines)) <= width
    assert len(lines) <= height
    return [plain(line) for line in lines]


def test_the_first_screen_names_the_function_that_ran_most() -> None:
    for width in (80, 120, 200):
        assert any(LINE in line for line in drawn(width, 40))
    few_lines = [line.rstrip() for line in drawn(84, 18)]
    assert "  between steps (sampled, n = 100): 60 % (50 to 69) in Tokenizer.encode fast.py:88" in few_lines
    text = "\n".join(drawn(200, 60))
    assert "60 % (50 to 69)  Tokenizer.encode tok/fast.py:88, from serve.py:12 main" in text
    assert "36 % (27 to 46)  Queue.get queue.py:171 (waits 97.0 %)" in text


def test_a_place_with_too_few_samples_is_only_in_the_list() -> None:
    assert "not instrumented" not in "\n".join(drawn(200, 60))
    text = "\n".join(drawn(200, 60, is_open=True))
    assert "not instrumented (sampled, n = 7 in 41 s): fewer than 20 samples, so no shares" in text
    assert HOW.split(". ")[0] in text


def test_the_list_fits_into_every_size() -> None:
    for width in (40, 80, 200):
        for height in (5, 18, 40):
            assert TITLE[:20] in drawn(width, height, is_open=True)[0]


async def test_enter_on_the_line_shows_all_functions_and_escape_closes_them() -> None:
    app = CbtopApp(ScriptedFeed(SAMPLED))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert LINE in screen_text(app)
        for _ in range(30):
            await pilot.press("j")
            cursor = app.query_one(OverviewDrawing).current
            if cursor is not None and cursor.part == "sampled":
                break
        await pilot.press("enter")
        await pilot.pause()
        assert TITLE in screen_text(app)
        assert "Tokenizer.encode tok/fast.py:88" in screen_text(app)
        await pilot.press("escape")
        await pilot.pause()
        assert TITLE not in screen_text(app)
        assert LINE in screen_text(app)
