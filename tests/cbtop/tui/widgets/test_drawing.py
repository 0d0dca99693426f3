"""Tests of widgets that draw cells: changed cells are repainted, and unchanged parts of a line are not."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from cbtop.tui.widgets.drawing import Drawing, changed_cells
from cbtop.tui.widgets.lines import ROLES, Line, width_of

WIDTH = 24
lines = st.lists(
    st.tuples(st.text("ab 世█", min_size=0, max_size=6), st.sampled_from(["", "dim", "good"])), max_size=6
).map(tuple)


def cells(line: Line, width: int) -> list[tuple[str, str]]:
    """Return the character and the role (style) of each cell. The second cell of a wide character is empty."""
    found: list[tuple[str, str]] = []
    for text, role in line:
        for character in text:
            found += [(character, role), ("", character)][: width_of(((character, ""),))]
    return (found + [(" ", "")] * width)[:width]


@given(lines, lines)
def test_repainting_what_has_changed_makes_the_new_line(before: Line, now: Line) -> None:
    screen, wanted = cells(before, WIDTH), cells(now, WIDTH)
    if changed := changed_cells(before, now, WIDTH):
        begin, end = changed
        assert 0 <= begin < end <= WIDTH
        screen[begin:end] = wanted[begin:end]
    assert screen == wanted


@given(lines)
def test_nothing_is_repainted_where_nothing_has_changed(line: Line) -> None:
    assert changed_cells(line, line, WIDTH) is None


def test_of_a_row_of_figures_the_digits_are_repainted_that_moved() -> None:
    before: Line = (("RmsNorm ", "strong"), ("12.3", ""), ("  ", ""), ("45 %", "dim"))
    now: Line = (("RmsNorm ", "strong"), ("12.4", ""), ("  ", ""), ("45 %", "dim"))
    assert changed_cells(before, now, WIDTH) == (11, 12)
    assert changed_cells(before, now[:2], WIDTH) == (11, 18)
    wider: Line = (("RmsNorm ", "strong"), ("112.3", ""), (" ", ""), ("45 %", "dim"))
    assert changed_cells(before, wider, WIDTH) == (9, 13)


class Spans(Drawing):
    """A widget with one line."""

    def __init__(self, line: Line) -> None:
        super().__init__(id="spans")
        self.line = line

    def draw(self, width: int, height: int) -> list[Line]:
        return [self.line]


class ShowsSpans(App[None]):
    COMPONENT_CLASSES: ClassVar[set[str]] = set(ROLES)
    CSS = """
    .good { color: green; } .bad { color: red; }
    .cursor { background: blue; } .strong { text-style: underline; }
    """

    def __init__(self, line: Line) -> None:
        super().__init__()
        self.line = line

    def compose(self) -> ComposeResult:
        yield Spans(self.line)


async def test_spans_that_look_alike_are_sent_as_one_and_each_cell_looks_as_it_did() -> None:
    line: Line = (
        ("norm ", "good"), ("   ", ""), ("12.3", "good"), ("", "bad"), ("  ", ""), ("4", "bad"),
        ("  ", "cursor"), (" ", ""), ("x", "strong"), (" ", ""), ("y", "good"),
    )  # fmt: skip
    app = ShowsSpans(line)
    async with app.run_test(size=(WIDTH + 8, 1)):
        spans = app.query_one(Spans)
        strip = spans.render_line(0)
        base = spans.rich_style
        wanted = [(c, base + app.get_component_styles(role).partial_rich_style) if role else (c, base)
                  for text, role in line for c in text]  # fmt: skip
    shown = [(c, segment.style) for segment in strip for c in segment.text][: len(wanted)]
    assert [c for c, _ in shown] == [c for c, _ in wanted]
    for (character, style), (_, as_it_was) in zip(shown, wanted, strict=True):
        assert style is not None
        assert (style.bgcolor, style.underline) == (as_it_was.bgcolor, as_it_was.underline)
        assert character == " " or style.color == as_it_was.color
    assert [segment.text for segment in strip][:2] == ["norm    12.3  ", "4"]


class Counter(Drawing):
    """A widget with a constant heading and a growing number."""

    def __init__(self) -> None:
        super().__init__(id="counter")
        self.count = 0
        self.repainted: list[Region] = []

    def draw(self, width: int, height: int) -> list[Line]:
        return [(("calls", "dim"),), (("  n ", ""), (str(self.count), "strong"), (" a step", "dim"))]

    def refresh(self, *regions: Region, **how: bool) -> Counter:
        self.repainted += regions
        super().refresh(*regions, **how)
        return self


class OneCounter(App[None]):
    COMPONENT_CLASSES = set(ROLES)  # noqa: RUF012 - as CbtopApp has it

    def compose(self) -> ComposeResult:
        yield Counter()


async def test_a_drawing_asks_for_the_changed_cells_alone() -> None:
    app = OneCounter()
    async with app.run_test(size=(40, 5)) as pilot:
        counter = app.query_one(Counter)
        counter.redraw()
        await pilot.pause()
        counter.repainted.clear()
        counter.redraw()
        assert counter.repainted == []
        counter.count = 1
        counter.redraw()
        assert counter.repainted == [Region(4, 1, 1, 1)]


class Numbers(Drawing):
    """A widget with several rows. The test changes only some of them."""

    def __init__(self) -> None:
        super().__init__(id="numbers")
        self.count = 0
        self.painted: list[int] = []

    def draw(self, width: int, height: int) -> list[Line]:
        return [(("stays", "good"),), ((f"{self.count}", "bad"), (" of", "")), *[(("x", ""),)] * (self.count % 3)]

    def render_line(self, y: int) -> Strip:
        self.painted.append(y)
        return super().render_line(y)


class ShowsNumbers(ShowsSpans):
    def compose(self) -> ComposeResult:
        yield Numbers()


async def test_rows_are_as_textual_would_paint_them_and_each_is_painted_once() -> None:
    app = ShowsNumbers(())
    async with app.run_test(size=(WIDTH, 6)) as pilot:
        numbers = app.query_one(Numbers)
        for turn in range(12):
            numbers.count = turn
            if turn == 5:
                await pilot.resize_terminal(WIDTH - 4, 5)
            if turn == 8:
                app.theme = "textual-light"
            numbers.redraw()
            await pilot.pause()
            whole = numbers.size.region
            part = Region(3, 1, 5, 3)
            for crop in (whole, part):
                shown = numbers.render_lines(crop)
                numbers._styles_cache.clear()
                assert shown == Widget.render_lines(numbers, crop)
            numbers.painted.clear()
            numbers.render_lines(whole)
            numbers.redraw()
            numbers.render_lines(whole)
            assert not numbers.painted
            numbers.count += 3
            numbers.redraw()
            numbers.render_lines(whole)
            assert numbers.painted == [1]
