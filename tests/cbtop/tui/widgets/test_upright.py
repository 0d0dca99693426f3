"""Tests of charts with vertical bars: if several bars share a column, the highest one is drawn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cbtop.tui.widgets.lines import plain, width_of
from cbtop.tui.widgets.upright import Bar, Spacing, upright


def text_of(values: list[float | None], width: int, height: int, top: float) -> list[str]:
    bars = [Bar(value, "ffn") for value in values]
    return [plain(line) for line in upright(bars, Spacing.of(len(bars), width), height, top)]


@given(st.integers(1, 500), st.integers(1, 200), st.integers(1, 6))
def test_every_bar_lies_within_the_width(bars: int, width: int, height: int) -> None:
    spacing = Spacing.of(bars, width)
    assert spacing.width <= width
    assert {spacing.column(bar) for bar in range(bars)} == set(range(0, spacing.width, spacing.cells))
    lines = upright([Bar(1.0, "ffn")] * bars, spacing, height, 2.0)
    assert [width_of(line) for line in lines] == [spacing.width] * height


@given(st.integers(2, 300), st.integers(1, 120), st.data())
def test_the_one_high_bar_of_many_is_the_highest_that_is_drawn(bars: int, width: int, data: st.DataObject) -> None:
    odd = data.draw(st.integers(0, bars - 1))
    spacing = Spacing.of(bars, width)
    (line,) = text_of([8.0 if bar == odd else 3.0 for bar in range(bars)], width, 1, 8.0)
    assert line[spacing.column(odd)] == "█"
    assert line.count("█") == max(1, spacing.cells - (spacing.cells >= 3))


def test_a_bar_is_as_high_as_its_part_of_the_top() -> None:
    assert text_of([8.0, 4.0, 1.0, 0.0, None, 0.001], 6, 1, 8.0) == ["█▄▁ ·▁"]
    assert text_of([8.0, 6.0, 4.0, 2.0, None], 5, 2, 8.0) == ["█▄   ", "███▄·"]


def test_what_is_over_the_top_is_cut() -> None:
    assert text_of([80.0, 8.0], 2, 1, 8.0) == ["██"]
