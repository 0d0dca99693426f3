"""Tests of the view that shows the output of the profiled program."""

from __future__ import annotations

from cbtop.tui.views.output import OutputPage
from cbtop.tui.widgets.lines import plain


def test_an_empty_output_says_so_and_a_written_one_is_cut_to_the_width() -> None:
    page = OutputPage()
    assert [plain(line) for line in page.text(40)] == ["nothing was written yet"]
    page.show(["200 tokens", ""])
    assert [plain(line) for line in page.text(5)] == ["200 t", "okens", ""]
