"""Tests of drawing functions: their widths are exact, their order is stable, and no control character is output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.binding import Binding

from cbtop.tui.app import CbtopApp
from cbtop.tui.views.brick_columns import brick_columns
from cbtop.tui.widgets.bars import BarSegment, bar, stacked
from cbtop.tui.widgets.braille import BrailleCanvas, area
from cbtop.tui.widgets.columns import Column, head_line, place, row_line
from cbtop.tui.widgets.footer import footer_line, key_at, key_name
from cbtop.tui.widgets.lines import both_ends, clean, clip, fit, fit_line, join_fitting, plain, rule, width_of
from cbtop.tui.widgets.loglog import LogLogPlot, Span1D, Spot, span_around
from cbtop.viewmodels.bricks import BrickRow

texts = st.text(max_size=40).map(clean)
widths = st.integers(min_value=0, max_value=60)


@given(texts, widths)
def test_fitted_text_is_exactly_as_wide_as_asked(text: str, width: int) -> None:
    assert width_of(((fit(text, width), ""),)) == width
    assert width_of(fit_line(((text, ""), (text, "dim")), width)) == width


@given(texts, widths)
def test_clipped_text_is_never_wider_than_asked(text: str, width: int) -> None:
    assert width_of(((clip(text, width), ""),)) <= width


@given(texts, texts, st.integers(min_value=1, max_value=80))
def test_a_line_with_two_ends_and_a_rule_fill_their_width(left: str, right: str, width: int) -> None:
    assert width_of(both_ends(((left, ""),), ((right, ""),), width)) == width
    assert width_of(rule(((left, ""),), width, ((right, ""),))) == width


def test_control_characters_never_reach_the_terminal() -> None:
    assert clean("a\x1b[31m\nb\u202ec\t") == "a�[31m�b�c�"
    assert clean("[red]µ 注意 🚀[/]") == "[red]µ 注意 🚀[/]"


def test_only_whole_parts_are_joined() -> None:
    assert plain(join_fitting([(("one", ""),), (("two", ""),), (("three", ""),)], 10)) == "one  two"


@pytest.mark.parametrize(
    ("fraction", "text"),
    [(0, "    "), (1, "████"), (0.5, "██  "), (0.28, "█▏  "), (0.001, "▏   "), (7, "████"), (None, "····")],
)
def test_a_bar_is_drawn_to_an_eighth_of_a_cell(fraction: float | None, text: str) -> None:
    assert plain(bar(fraction, 4, "accent")) == text


@given(st.lists(st.floats(min_value=0, max_value=1e9), min_size=1, max_size=8), st.integers(8, 120))
def test_a_stacked_bar_fills_its_width_and_loses_no_part(values: list[float], width: int) -> None:
    line = stacked([BarSegment(value, str(index), "label") for index, value in enumerate(values)], width)
    if sum(values) > 0:
        assert width_of(line) == width
        assert {role for _, role in line} == {str(i) for i, value in enumerate(values) if value / sum(values) > 0}


def test_a_part_of_a_bar_carries_its_label_where_it_fits() -> None:
    assert plain(stacked([BarSegment(9, "a", "FFN"), BarSegment(1, "b", "dispatch", "▒")], 10)) == " FFN     ▒"


def test_the_newest_values_stand_at_the_right_edge() -> None:
    assert plain(area([0.0, 0.0, 8.0], 2, 1, "")[0]) == " ⢸"
    assert area([], 2, 2, "") == area([0.0], 2, 2, "")


def test_dots_outside_the_canvas_are_not_drawn() -> None:
    canvas = BrailleCanvas(2, 1)
    for x, y in ((-1, 0), (0, -1), (4, 0), (0, 4)):
        canvas.dot(x, y, "")
    canvas.write(1, 0, "注意", "")
    assert plain(canvas.lines()[0]) == " �"


ends = st.floats(-400, 400)


@given(ends, ends, ends, ends, st.integers(0, 3))
def test_of_a_line_that_leaves_the_canvas_the_dots_on_it_stay_where_they_are(
    x0: float, y0: float, x1: float, y1: float, dash: int
) -> None:
    part, whole = BrailleCanvas(20, 10), BrailleCanvas(20, 10)
    part.line(x0, y0, x1, y1, "", dash)
    steps = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
    for step in range(steps + 1):
        if not dash or step % (2 * dash) < dash:
            whole.dot(round(x0 + (x1 - x0) * (step / steps)), round(y0 + (y1 - y0) * (step / steps)), "")
    assert part.lines() == whole.lines()


@pytest.mark.parametrize("line", [(-1e7, -1e7, 1e7, 1e7), (5, 5, 1e7, 9), (-1e7, 5, -1e6, 5), (0, 1e7, 1e7, 1e8)])
def test_what_of_a_line_is_far_away_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, line: tuple[float, float, float, float]
) -> None:
    canvas, dots = BrailleCanvas(20, 10), []
    monkeypatch.setattr(canvas, "dot", lambda *dot: dots.append(dot))
    canvas.line(*line, "")
    assert len(dots) <= 50


def _columns(*priorities: int) -> list[Column[str]]:
    return [Column(str(p), 5, p, lambda row, _: ((row, ""),), "", stretch=int(p == 0)) for p in priorities]


def test_columns_leave_by_priority_and_keep_their_own_order() -> None:
    assert [placed.column.title for placed in place(_columns(2, 0, 1), 13)] == ["0", "1"]
    assert [placed.column.title for placed in place(_columns(2, 0, 1), 19)] == ["2", "0", "1"]


@given(st.integers(min_value=5, max_value=100), texts)
def test_a_row_never_outgrows_its_columns(width: int, text: str) -> None:
    assert width_of(row_line(place(_columns(2, 0, 1), width), text)) <= width


def test_a_label_takes_no_cell_of_a_point_or_of_another_label() -> None:
    plot = LogLogPlot(40, 8, Span1D(0.1, 10), Span1D(1, 100))
    plot.mark(plot.cell(1, 10), "Q", "")
    here = [Spot(0.5, 10), Spot(0.5, 10, rows_up=1)]
    assert [plot.label(text, "", here) for text in ("first label", "other", "third")] == [True, False, False]
    text = [plain(line) for line in plot.lines("x")]
    assert any("Q" in line and "label" not in line for line in text)
    assert any("first label" in line for line in text)
    assert not plot.label("far too long for a plot this wide, wherever it begins", "", here)


@given(st.lists(st.floats(min_value=1e-6, max_value=1e9), max_size=5))
def test_an_axis_holds_its_values_and_spans_a_decade(values: list[float]) -> None:
    span = span_around(values)
    assert span.high / span.low >= 9.99
    assert all(0 <= span.position(value) <= 1 for value in values)


@pytest.mark.parametrize("column", brick_columns(100.0, budgets=True, checks=True), ids=lambda column: column.title)
@pytest.mark.parametrize("width", [38, 78, 118, 198])
def test_the_head_names_the_sorted_column_even_if_it_has_no_room_for_it(column: Column[BrickRow], width: int) -> None:
    head = head_line(place(brick_columns(100.0, budgets=True, checks=True), width), column.title, descending=True)
    assert f"{column.title}▼" in plain(head)
    assert width_of(head) <= width


def test_the_footer_drops_global_keys_but_help_and_quit_before_local_keys() -> None:
    here = [Binding("s", "sort", "sort"), Binding("enter", "open", "details")]
    everywhere = [Binding("p", "phase", "phase"), Binding("f1", "help", "help"), Binding("q", "quit", "quit")]
    kept = {
        46: ["s", "sort", "⏎", "details", "p", "phase", "f1", "help", "q", "quit"],
        44: ["s", "sort", "⏎", "details", "f1", "help", "q", "quit"],
        28: ["s", "sort", "f1", "help", "q", "quit"],
        20: ["f1", "help", "q", "quit"],
    }
    for width, words in kept.items():
        assert plain(footer_line(here, everywhere, width)).split() == words


@given(st.integers(min_value=20, max_value=60))
def test_help_and_quit_are_cut_nowhere(width: int) -> None:
    everywhere = [Binding(key, "phase", "phase") for key in "abcdef"]
    everywhere += [Binding("f1", "help", "help"), Binding("q", "quit", "quit")]
    assert plain(footer_line([], everywhere, width)).endswith("f1 help  q quit ")


@given(st.integers(min_value=20, max_value=90))
def test_a_click_on_the_footer_finds_the_key_that_is_drawn_there(width: int) -> None:
    here = [Binding("s", "sort", "sort"), Binding("enter", "open", "details")]
    everywhere = [Binding("p", "phase", "phase"), Binding("f1", "help", "help"), Binding("q", "quit", "quit")]
    line = plain(footer_line(here, everywhere, width))
    for x, cell in enumerate(line):
        binding = key_at(here, everywhere, width, x)
        if binding is not None and cell != " ":
            assert cell in f"{key_name(binding.key)} {binding.description}"
        elif binding is None:
            assert cell in " …"


def test_keys_are_named_as_on_a_keyboard() -> None:
    assert [key_name(key) for key in ("ctrl+c", "shift+tab", "space", "x")] == ["^c", "⇧tab", "␣", "x"]
    everywhere = [key for binding in CbtopApp.BINDINGS for key in Binding.make_bindings([binding])]
    assert [binding.key for binding in everywhere if "_" in key_name(binding.key)] == []
