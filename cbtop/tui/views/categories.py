"""The categories, what is in each, and the steps of every phase."""

from __future__ import annotations

from dataclasses import replace

from textual.app import ComposeResult

from cbtop import formatting, statistics
from cbtop.tui.views.base import SourceDrawing, View
from cbtop.tui.views.books import beside_books, books_equation, books_parts, books_rule, recorded_steps
from cbtop.tui.views.figures import figure_columns
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.bars import bar, stacked
from cbtop.tui.widgets.columns import Cells, Column, head_line, place, row_line
from cbtop.tui.widgets.lines import BLANK, Line, clean, join_fitting, rule
from cbtop.viewmodels.categories import CategoryRow
from cbtop.viewmodels.model import SourceView, StepsView

CATEGORY_COLUMNS: tuple[Column[CategoryRow], ...] = (
    Column(
        "category",
        12,
        0,
        lambda row, _: (
            (f"{CATEGORY_LOOKS[row.category].glyph} ", CATEGORY_LOOKS[row.category].role),
            (clean(row.name), "strong"),
        ),
        "the group, as in every other view",
        align="left",
    ),
    Column(
        "share of the step",
        12,
        3,
        lambda row, width: bar(
            None if row.percent is None else row.percent / 100, width, CATEGORY_LOOKS[row.category].role
        ),
        "wall %, drawn; a full column is the whole step",
        align="left",
        stretch=1,
        is_drawn=True,
    ),
    *figure_columns(statistics.CATEGORY_COLUMNS, roles={"percent": "strong"}),
)

STEP_COLUMNS: tuple[Column[StepsView], ...] = (
    Column(
        "phase",
        12,
        0,
        lambda row, _: ((clean(row.phase), "strong"),),
        "",
        align="left",
        stretch=1,
        max_width=24,
    ),
    Column("steps", 10, 2, lambda row, _: ((formatting.count(row.count), ""),), ""),
    Column("tokens", 10, 4, lambda row, _: ((formatting.count(row.tokens), ""),), ""),
    Column("tok/s", 9, 1, lambda row, _: ((formatting.number(row.tokens_per_sec), "strong"),), ""),
    Column("in steps", 9, 6, lambda row, _: ((formatting.number(row.tokens_per_sec_in_steps), ""),), ""),
    Column("mean ms", 9, 8, lambda row, _: ((formatting.milliseconds(row.mean_us), ""),), ""),
    Column("p50 ms", 9, 3, lambda row, _: ((formatting.milliseconds(row.p50_us), ""),), ""),
    Column("p95 ms", 9, 9, lambda row, _: ((formatting.milliseconds(row.p95_us), ""),), ""),
    Column("p99 ms", 9, 5, lambda row, _: ((formatting.milliseconds(row.p99_us), ""),), ""),
    Column("max ms", 9, 7, lambda row, _: ((formatting.milliseconds(row.max_us), ""),), ""),
    Column("min ms", 9, 10, lambda row, _: ((formatting.milliseconds(row.min_us), ""),), ""),
)


class Categories(View, can_focus=True):
    """A step by its categories."""

    title = "Categories"
    section = "categories"
    doc = (
        "The bricks rolled up into Norm, Attention, FFN, Other and Communication, then the whole step as one bar: "
        "categories, named gaps (▒), and what is unattributed (░). Below, the steps of every phase."
    )
    columns_doc = tuple((column.title, column.doc) for column in CATEGORY_COLUMNS)

    def compose(self) -> ComposeResult:
        self._drawing = CategoryDrawing(id="categories-drawing")
        yield self._drawing

    def show_source(self, source: SourceView) -> None:
        self._drawing.show_source(source)

    def cells(self) -> Cells | None:
        return Cells.of(CATEGORY_COLUMNS, self.source.categories) if self.source is not None else None


class CategoryDrawing(SourceDrawing):
    """The whole view in one drawing."""

    def draw(self, width: int, height: int) -> list[Line]:
        if self._source is None:
            return []
        forms = (_lines(self._source, width, details=details, air=air) for details, air in _FORMS)
        return next((lines for lines in forms if len(lines) <= height), _bare(self._source, width))


_FORMS = ((True, True), (True, False), (False, False))  # the fullest that fits is drawn


def _lines(source: SourceView, width: int, *, details: bool, air: bool) -> list[Line]:
    """The whole view: `details` names the bricks of each category, `air` sets the categories apart."""
    gap = [BLANK] if details else []
    return [
        *_category_lines(source, width, details=details, air=air),
        *gap,
        books_rule(source, "one step", width),
        *_step_lines(source, width, bar_rows=3 if air else 1),
        *gap,
        rule((("steps by phase", "dim"),), width),
        *_phase_lines(source, width),
    ]


def _bare(source: SourceView, width: int) -> list[Line]:
    """For a terminal with few lines: no headings."""
    categories = _category_lines(source, width, details=False, air=False)
    beside = [books_rule(source, "one step", width)] if beside_books(source) else []
    return [*categories, *beside, *_step_lines(source, width, bar_rows=1), *_phase_lines(source, width)]


def _category_lines(source: SourceView, width: int, *, details: bool, air: bool) -> list[Line]:
    name, *figures = CATEGORY_COLUMNS
    longest = max((len(row.name) for row in source.categories), default=0)
    placed = place((replace(name, width=max(name.width, 2 + longest)), *figures), width - 2)
    lines: list[Line] = [((" ", ""), *head_line(placed, "", descending=True))]
    if not source.categories:
        return [*lines, (("  no brick of this phase was recorded in this time", "dim"),)]
    for row in source.categories:
        lines.append(((" ", ""), *row_line(placed, row)))
        if details:
            lines.append(((" " * 3, ""), *_bricks_of(row, source, width - 5)))
        if air:
            lines.append(BLANK)
    return lines[:-1] if air else lines


def _bricks_of(row: CategoryRow, source: SourceView, width: int) -> Line:
    bricks = sorted(
        (brick for brick in source.bricks if brick.category == row.category),
        key=lambda brick: brick.total_exclusive_us,
        reverse=True,
    )
    parts: list[Line] = [
        ((clean(brick.name), "dim"), (f" {formatting.percent_number(brick.percent)}", "")) for brick in bricks
    ]
    return join_fitting(parts, width, " · ")


def _step_lines(source: SourceView, width: int, *, bar_rows: int) -> list[Line]:
    if source.books is None:
        return [(("  n/a: no step has ended yet", "dim"),)]
    parts = books_parts(source)
    labelled: Line = (("  ", ""), *stacked(parts, width - 4))
    bare: Line = tuple((text if set(text) <= set("▒░") else " " * len(text), role) for text, role in labelled)
    lines = [labelled if index == bar_rows // 2 else bare for index in range(bar_rows)]
    return [*lines, (("  ", ""), *books_equation(source.books, recorded_steps(source), width - 2))]


def _phase_lines(source: SourceView, width: int) -> list[Line]:
    if not source.phases:
        return [(("  n/a: no step has ended yet", "dim"),)]
    placed = place(STEP_COLUMNS, width - 2)
    lines: list[Line] = [((" ", ""), *head_line(placed, "", descending=True))]
    for phase in source.phases:
        mark = "▸" if phase.phase == source.phase else " "
        lines.append(((mark, "accent"), *row_line(placed, phase)))
    return lines
