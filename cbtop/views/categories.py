"""The four categories, what is in each, and the steps of every phase."""

from __future__ import annotations

from textual.app import ComposeResult

from cbtop import formatting
from cbtop.viewmodels.model import CategoryRow, SourceView, StepsView
from cbtop.views.base import SourceDrawing, View
from cbtop.views.books import books_equation, books_parts
from cbtop.views.looks import CATEGORY_LOOKS
from cbtop.widgets.bars import bar, stacked
from cbtop.widgets.columns import Column, head_line, place, row_line
from cbtop.widgets.lines import BLANK, Line, clean, join_fitting, rule

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
    ),
    Column(
        "wall %",
        7,
        1,
        lambda row, _: ((formatting.percent_number(row.percent), "strong"),),
        "exclusive time as a part of the step's wall time",
    ),
    Column(
        "µs/tok",
        8,
        2,
        lambda row, _: ((formatting.number(row.us_per_token), ""),),
        "exclusive µs for one token",
    ),
    Column("avg µs", 8, 4, lambda row, _: ((formatting.number(row.avg_us), ""),), "mean time of one call"),
    Column("count", 10, 5, lambda row, _: ((formatting.count(row.count), ""),), "calls recorded"),
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
    Column("mean ms", 9, 6, lambda row, _: ((formatting.milliseconds(row.mean_us), ""),), ""),
    Column("p50 ms", 9, 3, lambda row, _: ((formatting.milliseconds(row.p50_us), ""),), ""),
    Column("p95 ms", 9, 7, lambda row, _: ((formatting.milliseconds(row.p95_us), ""),), ""),
    Column("p99 ms", 9, 5, lambda row, _: ((formatting.milliseconds(row.p99_us), ""),), ""),
)

_ROOMY_HEIGHT = 18


class Categories(View, can_focus=True):
    """A step in four parts."""

    title = "Categories"
    doc = (
        "The bricks rolled up into Norm, Attention, FFN and Other, then the whole step as one bar: "
        "categories, named gaps (▒), and what is unattributed (░). Below, the steps of every phase."
    )
    columns_doc = tuple((column.title, column.doc) for column in CATEGORY_COLUMNS)

    def compose(self) -> ComposeResult:
        self._drawing = CategoryDrawing(id="categories-drawing")
        yield self._drawing

    def show_source(self, source: SourceView) -> None:
        self._drawing.show_source(source)


class CategoryDrawing(SourceDrawing):
    """The whole view in one drawing."""

    def draw(self, width: int, height: int) -> list[Line]:
        if self._source is None:
            return []
        roomy = height >= _ROOMY_HEIGHT
        blocks = [
            _category_lines(self._source, width, roomy=roomy),
            _step_lines(self._source, width, bar_rows=3 if roomy else 1),
            _phase_lines(self._source, width),
        ]
        gap = [BLANK] if roomy else []
        return [line for index, block in enumerate(blocks) for line in (gap if index else []) + block]


def _category_lines(source: SourceView, width: int, *, roomy: bool) -> list[Line]:
    placed = place(CATEGORY_COLUMNS, width - 2)
    lines: list[Line] = [((" ", ""), *head_line(placed, "", descending=True))]
    if not source.categories:
        return [*lines, (("  no brick of this phase has been recorded yet", "dim"),)]
    for row in source.categories:
        lines.append(((" ", ""), *row_line(placed, row)))
        if roomy:
            lines += [((" " * 3, ""), *_bricks_of(row, source, width - 5)), BLANK]
    return lines[:-1] if roomy else lines


def _bricks_of(row: CategoryRow, source: SourceView, width: int) -> Line:
    bricks = sorted(
        (brick for brick in source.bricks if brick.category == row.category),
        key=lambda brick: brick.exclusive_us,
        reverse=True,
    )
    parts: list[Line] = [
        ((clean(brick.name), "dim"), (f" {formatting.percent_number(brick.percent)}", "")) for brick in bricks
    ]
    return join_fitting(parts, width, " · ")


def _step_lines(source: SourceView, width: int, *, bar_rows: int) -> list[Line]:
    lines = [rule((("one step", "dim"),), width)]
    if source.books is None:
        return [*lines, (("  n/a: no step has ended yet", "dim"),)]
    parts = books_parts(source)
    labelled: Line = (("  ", ""), *stacked(parts, width - 4))
    bare: Line = tuple((text if set(text) <= set("▒░") else " " * len(text), role) for text, role in labelled)
    lines += [labelled if index == bar_rows // 2 else bare for index in range(bar_rows)]
    steps = max(1, source.steps.count if source.steps else 1)
    return [*lines, (("  ", ""), *books_equation(source.books, steps, width - 2))]


def _phase_lines(source: SourceView, width: int) -> list[Line]:
    lines = [rule((("steps by phase", "dim"),), width)]
    if not source.phases:
        return [*lines, (("  n/a: no step has ended yet", "dim"),)]
    placed = place(STEP_COLUMNS, width - 2)
    lines.append(((" ", ""), *head_line(placed, "", descending=True)))
    for phase in source.phases:
        mark = "▸" if phase.phase == source.phase else " "
        lines.append(((mark, "accent"), *row_line(placed, phase)))
    return lines
