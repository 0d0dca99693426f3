"""Tests of curves: each value is drawn at the height that the scale shows, at any size."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cbtop.tui.widgets.braille import DOTS_DOWN, BrailleCanvas
from cbtop.tui.widgets.curve import LEAST_CHART, MIN_HEIGHT, Chart, charts, curve, nice_top
from cbtop.tui.widgets.lines import plain, width_of


def text_of(values: list[float | None], width: int, height: int) -> list[str]:
    return [plain(line) for line in curve(values, width, height, "accent", lambda value: f"{value:g}")]


@given(st.floats(1e-9, 1e12))
def test_a_scale_ends_at_a_round_number_that_has_room_and_wastes_little(value: float) -> None:
    assert value <= nice_top(value) <= 1.7 * value or nice_top(value) == pytest.approx(value)


@given(
    st.lists(st.none() | st.floats(0, 1e6), max_size=130),
    st.integers(12, 200),
    st.integers(MIN_HEIGHT, 30),
)
@example([5e-324], 12, 3)
@example([1e6] * 6, 12, 3)
def test_a_curve_has_the_size_asked_for(values: list[float | None], width: int, height: int) -> None:
    lines = curve(values, width, height, "accent", lambda value: f"{value:.0f}")
    assert len(lines) == height
    assert max(map(width_of, lines)) <= width


def test_full_height_is_the_number_at_the_top_and_none_is_zero() -> None:
    lines = text_of([100.0, 0.0, 50.0, None], 8, 5)
    assert [line[:4] for line in lines[:4]] == ["100┤", "   │", "   │", "  0┤"]
    assert [line[4:] for line in lines[:4]] == ["⣿   ", "⣿   ", "⣿ ⣿ ", "⣿ ⣿ "]


def test_the_newest_second_is_at_the_right_edge_and_the_oldest_has_its_time() -> None:
    lines = text_of([5.0] * 60, 44, 4)
    assert lines[-1].endswith("0 s")  # The axis ends with "0 s". "now" would be wrong in a recording.
    assert "-60 s" in lines[-1]
    assert len(lines[-1]) == 44
    few = text_of([5.0] * 60, 24, 4)
    assert "-44 s" in few[-1]


def test_without_values_nothing_is_drawn_under_the_scale() -> None:
    assert text_of([], 12, 4) == ["1┤" + " " * 10, " │" + " " * 10, "0┤" + " " * 10, ""]


@given(st.integers(1, 8), st.integers(1, 5), st.lists(st.integers(0, 24), max_size=20))
def test_a_bar_is_the_dots_from_the_bottom_up(width: int, height: int, bars: list[int]) -> None:
    drawn, dotted = BrailleCanvas(width, height), BrailleCanvas(width, height)
    for x, dots in enumerate(bars):
        drawn.bar(x, dots, "good")
        for dot in range(dots):
            dotted.dot(x, height * DOTS_DOWN - 1 - dot, "good")
    assert drawn.lines() == dotted.lines()


def test_a_scale_that_is_given_stays_and_what_is_above_it_is_cut() -> None:
    drawn = [plain(line) for line in curve([50.0, 200.0], 8, 5, "accent", lambda value: f"{value:g}", 100.0)]
    assert [line[:4] for line in drawn[:4]] == ["100┤", "   │", "   │", "  0┤"]
    assert [line[4:] for line in drawn[:4]] == ["  ⣿⣿", "  ⣿⣿", "⣿⣿⣿⣿", "⣿⣿⣿⣿"]


@given(st.integers(0, 9), st.integers(20, 260), st.integers(-3, 90))
def test_charts_fill_a_grid_and_those_without_room_are_left_out(wanted: int, width: int, height: int) -> None:
    made = [Chart(f"chart {at}", [], [1.0, 2.0], "accent", str) for at in range(wanted)]
    lines = charts(made, width, height)
    assert len(lines) <= max(0, height)
    assert max(map(width_of, lines), default=0) <= max(width, 40)
    text = "\n".join(map(plain, lines))
    shown = sum(f"chart {at}" in text for at in range(wanted))
    assert shown == min(wanted, max(1, width // 40) * (max(0, height) // LEAST_CHART))
