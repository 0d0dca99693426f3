"""Tests of the marks in the roofline plot: each mark is in the cell of its values, or is counted there.

Every letter is explained. The trail of a mark (its earlier values) hides no other mark.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis.roofline import Distance
from cbtop.protocol.vocabulary import Provenance
from cbtop.tui.views import roofline_plot
from cbtop.tui.views.brick_detail import detail_lines
from cbtop.tui.views.roofline import POINT_COLUMNS
from cbtop.tui.views.roofline_plot import LetteredPoint, RooflinePlot, axes, letter, roofline_lines
from cbtop.tui.widgets.lines import Line, plain, width_of
from cbtop.tui.widgets.loglog import usual
from cbtop.viewmodels.roofline import CeilingRow, RooflineView
from tests.cbtop import samples

BEFORE_THE_PLOT = 7  # number of columns for the ticks and the axis, left of the plot
MEMORY = CeilingRow("read", "bandwidth", 100.0, "GB/s", Provenance.MEASURED, 98.0, 90.0)
PEAK = CeilingRow("fma", "compute", 1000.0, "GFLOP/s", Provenance.MEASURED, 990.0, 980.0)
BARE = RooflineView((), (), ())
ROOFED = RooflineView((MEMORY, PEAK), (), ())

powers = st.floats(-2, 3).map(lambda power: float(10**power))
far = st.floats(-250, 250).map(lambda power: float(10**power))
trails = st.lists(st.none() | st.tuples(powers, powers) | st.tuples(far, far), max_size=60)
places = st.lists(st.tuples(powers, powers), max_size=60)
sizes = st.tuples(st.integers(1, 200), st.integers(1, 60))


def lettered(values: Sequence[tuple[float, float]]) -> list[LetteredPoint]:
    return [
        LetteredPoint(letter(at), replace(samples.BRICKS[0], name=f"b{at}", flops=x, bytes=1.0, gflops=y))
        for at, (x, y) in enumerate(values)
    ]


def drawn(roofline: RooflineView, points: Sequence[LetteredPoint], size: tuple[int, int]) -> tuple[list[str], str]:
    """Return the rows of the plot without its axes, and the text below it."""
    lines = [plain(line) for line in roofline_lines(roofline, points, "a", *size)]
    assert len(lines) <= size[1]
    axis = next((at for at, line in enumerate(lines) if "└" in line), len(lines))
    return [line[BEFORE_THE_PLOT:] for line in lines[:axis]], "\n".join(lines[axis + 2 :])


def cell_of(
    point: LetteredPoint, roofline: RooflineView, points: Sequence[LetteredPoint], rows: list[str]
) -> tuple[int, int]:
    """Return the expected cell (column, row) of a point. The cell is computed only from the ends of the axes.

    A cell has two columns and four rows of dots. The point is drawn at the nearest dot.
    """
    x, y = axes(roofline, points)
    right = math.log(point.flop_per_byte / x.low) / math.log(x.high / x.low)
    up = math.log(point.gflops / y.low) / math.log(y.high / y.low)
    return round(right * (2 * len(rows[0]) - 1)) // 2, round((1 - up) * (4 * len(rows) - 1)) // 4


def inside_of(points: Sequence[LetteredPoint], roofline: RooflineView) -> list[LetteredPoint]:
    x, y = axes(roofline, points)
    return [one for one in points if x.low <= one.flop_per_byte <= x.high and y.low <= one.gflops <= y.high]


@pytest.mark.parametrize("roofline", [BARE, ROOFED], ids=["without roofs", "under roofs"])
@given(places, sizes)
def test_a_mark_stands_in_the_cell_of_its_values_or_in_one_that_counts_them(
    roofline: RooflineView, values: list[tuple[float, float]], size: tuple[int, int]
) -> None:
    points = lettered(values)
    inside = inside_of(points, roofline)
    rows, below = drawn(roofline, points, size)
    cells: dict[tuple[int, int], list[str]] = defaultdict(list)
    for point in inside:
        cells[cell_of(point, roofline, points, rows)].append(point.letter)
    for (column, row), letters in cells.items():
        wanted = letters[0] if len(letters) == 1 else str(len(letters)) if len(letters) < 10 else "+"
        assert rows[row][column] == wanted
    if size[0] >= 40 and size[1] >= 20:  # Plots of this size have room for all names.
        named = re.findall(r"[2-9+]=([^=]*?)(?=\s+[2-9+]=|\s+outside|$)", below, re.DOTALL)
        together = [letters for _, letters in sorted(cells.items()) if len(letters) > 1]
        assert [re.sub(r"\s", "", one) for one in named] == ["".join(letters) for letters in together]
        assert re.findall(r"outside: (.)", below) == [one.letter for one in points if one not in inside]


@given(places, st.tuples(st.integers(8, 200), st.integers(4, 60)))
def test_only_the_marks_and_the_title_are_written_into_a_plot_without_roofs(
    values: list[tuple[float, float]], size: tuple[int, int]
) -> None:
    points = lettered(values)
    inside = inside_of(points, BARE)
    rows, _ = drawn(BARE, points, size)
    written = "".join(rows).replace("GFLOP/s", "")
    glyphs = [one for one in written if one != " " and not "⠀" <= one <= "⣿"]
    assert len(glyphs) == len({cell_of(point, BARE, points, rows) for point in inside})


@given(places, sizes)
def test_no_line_of_the_plot_is_wider_than_it_may_be(
    values: list[tuple[float, float]], size: tuple[int, int]
) -> None:
    for line in roofline_lines(ROOFED, lettered(values), "a", max(size[0], 16), size[1]):
        assert width_of(line) <= max(size[0], 16)


def test_one_brick_far_from_the_others_does_not_squeeze_them_and_is_listed() -> None:
    near = [(3.9 + at / 100, 5e3 + 500 * at) for at in range(7)]
    rows, below = drawn(BARE, lettered([(0.89, 1.94), *near]), (60, 24))
    assert "outside: a 0.89 FLOP/B, 1.94 GFLOP/s" in below
    assert not any("a" in row for row in rows)
    assert sum("1" <= one <= "9" or one.isalpha() for one in "".join(rows).replace("GFLOP/s", "")) >= 4


@given(st.lists(powers, min_size=1, max_size=40))
def test_half_of_all_values_or_more_and_those_within_a_decade_are_usual(
    values: list[float],
) -> None:
    span = usual(values)
    held = [one for one in values if span.holds(one)]
    assert 2 * len(held) >= len(values)
    middle = sorted(values)[len(values) // 2]
    assert all(span.holds(one) for one in values if middle / 9 <= one <= middle * 9)


def test_the_ridge_point_is_marked_with_its_intensity_if_memory_meets_a_peak() -> None:
    rows, _ = drawn(ROOFED, (), (60, 20))
    assert sum(row.count(roofline_plot.RIDGE) for row in rows) == 1
    assert any("ridge 10.00" in row for row in rows)


def test_of_two_compute_roofs_each_ridge_says_what_is_multiplied_right_of_it() -> None:
    peaks = replace(PEAK, dtype="float32"), replace(PEAK, name="dot", value=10_000.0, dtype="int8")
    rows, _ = drawn(RooflineView((MEMORY, *peaks), (), ()), (), (90, 30))
    assert any("ridge 10.00 float32" in row for row in rows)
    assert any("ridge 100.0 int8" in row for row in rows)


def test_a_roof_that_is_unsure_is_grey_and_says_so_without_colour() -> None:
    unsure = RooflineView((replace(MEMORY, median=80.0), PEAK), (), ())
    roles = {text: role for line in roofline_lines(unsure, (), "", 60, 20) for text, role in line}
    assert next(role for text, role in roles.items() if "read ~" in text) == "dim"
    assert "accent" not in roles.values()  # No line has the colour for the roof (peak rate) of the selected brick.
    assert next(role for text, role in roles.items() if "fma" in text) == "warn"


@pytest.mark.parametrize(("unsure", "role"), [(True, "dim"), (False, "strong"), (None, "strong")])
def test_an_unsure_roof_share_is_grey_and_approximate_in_both_places(unsure: bool | None, role: str) -> None:
    brick = replace(samples.BRICKS[0], roof=Distance(100.0, 44.1, "memory", unsure))
    cells = {
        column.title: column.cell(LetteredPoint("a", brick), 20)
        for column in POINT_COLUMNS
        if column.title in ("% roof", "bound")
    }
    about = "~" if unsure else ""
    assert cells["% roof"] == ((f"{about}44.1", role),)
    assert cells["bound"] == (("memory", "dim" if unsure else ""),)
    details = [span for line in detail_lines(brick, samples.LIVE, 60, 60) for span in line]
    for text in (f"{about}44.1 %", "memory"):
        found = next(span for span in details if span[0].strip() == text)
        assert found[1] == ("dim" if unsure else "")


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_what_limits_a_brick_is_whole_in_its_details(width: int) -> None:
    brick = replace(samples.BRICKS[0], roof=Distance(100.0, 4.1, "latency or overhead"))
    lines = detail_lines(brick, samples.LIVE, width, 80)
    assert any("latency or overhead" in plain(line) for line in lines)
    assert all(width_of(line) <= width for line in lines)


def cells_in(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Return all cells of the plot row by row: the sign in the cell, and its role (which decides its colour)."""
    return [(one, role) for line in lines for text, role in line for one in text]


def dots_in(one: str) -> int:
    return ord(one) - 0x2800 if "⠀" <= one <= "⣿" else 0


@pytest.mark.parametrize("roofline", [BARE, ROOFED], ids=["without roofs", "under roofs"])
@given(places, trails, sizes)
def test_a_trail_adds_faint_dots_and_hides_and_moves_nothing(
    roofline: RooflineView,
    values: list[tuple[float, float]],
    trail: list[tuple[float, float] | None],
    size: tuple[int, int],
) -> None:
    points = lettered(values)
    with_it, without = (
        cells_in(roofline_lines(roofline, points, "a", *size, known)) for known in (trail, [])
    )  # fmt: skip
    assert len(with_it) == len(without)
    for (one, role), (before, role_before) in zip(with_it, without, strict=True):
        if before == " " and one != " ":
            assert (dots_in(one) > 0, role) == (True, "faint")
        elif dots_in(before):
            assert (dots_in(one) & dots_in(before), role) == (dots_in(before), role_before)
        else:
            assert (one, role) == (before, role_before)


def drawn_trail(
    values: Sequence[tuple[float, float]], trail: Sequence[tuple[float, float] | None]
) -> set[tuple[int, int]]:
    """Return the cells of a plot (60 x 24) that have dots if this trail is drawn, and no dots if it is not."""
    rows, bare = (
        [plain(line) for line in roofline_lines(BARE, lettered(values), "", 60, 24, known)] for known in (trail, ())
    )
    return {
        (column - BEFORE_THE_PLOT, row)
        for row, (line, before) in enumerate(zip(rows, bare, strict=True))
        for column, (one, other) in enumerate(zip(line, before, strict=True))
        if one != other
    }


CORNERS = [(0.1, 1.0), (10.0, 100.0)]  # For these two points, the axes go from 0.05 to 20 and from 0.4 to 250.


def test_a_trail_leads_from_each_second_to_the_next_that_is_known() -> None:
    found = drawn_trail(CORNERS, [(0.1, 10.0), None, (1.0, 10.0), (1.0, 100.0)])
    corner = cell_of(lettered([(1.0, 10.0)])[0], BARE, lettered(CORNERS), [" " * 53] * 22)
    assert {row for column, row in found if column < corner[0]} == {corner[1]}
    assert {column for column, row in found if row < corner[1]} == {corner[0]}
    assert not any(column > corner[0] or row > corner[1] for column, row in found)
    assert len([cell for cell in found if cell[0] < corner[0]]) > 10
    assert len([cell for cell in found if cell[1] < corner[1]]) > 5


def test_what_of_a_trail_lies_outside_of_the_axes_is_cut_off_and_not_moved() -> None:
    inside = drawn_trail(CORNERS, [(1e-9, 10.0), (1.0, 10.0), (1e9, 10.0)])
    assert len({row for _, row in inside}) == 1
    assert {column for column, _ in inside} >= {0, 52}  # The trail crosses the plot from its left to its right edge.
    assert not drawn_trail(CORNERS, [(1e-9, 1e5), (1e9, 1e5), (1e9, 1e7), (1.0, 1e7)])
    assert not drawn_trail(CORNERS, [(1e-9, 1e-9), (1e-9, 1e9), (1e9, 1e9)])


def test_a_brick_that_stays_in_one_place_or_two_has_no_trail() -> None:
    still = [(1.0, 10.0), (1.001, 10.01), (1.0, 10.0)]
    assert not drawn_trail(CORNERS, still)
    assert not drawn_trail(CORNERS, [(1.0, 10.0), (2.0, 40.0)] * 9)
    assert drawn_trail(CORNERS, [*still, (1.4, 10.0), (2.0, 10.0)])


def test_the_trail_is_of_the_brick_under_the_cursor_even_if_letters_ran_out() -> None:
    points = [
        replace(one, point=replace(one.point, trail=((0.1, 5.0), (0.2, 5.0), (2.0, 5.0)) if at == 57 else ()))
        for at, one in enumerate(lettered([(10 ** (at / 30 - 1), 10.0) for at in range(60)]))
    ]
    plot = RooflinePlot()
    drawings = {}
    for selected in (None, points[0], points[55], points[57]):
        plot.show_points(ROOFED, points, selected, {})
        drawings[selected and selected.point.name] = [plain(line) for line in plot.draw(60, 24)]
    assert points[55].letter == points[57].letter
    assert drawings[None] == drawings["b0"] == drawings["b55"] != drawings["b57"]
