"""The roofline view. It compares the speed of the bricks with the roofs that were measured on this machine."""

# Only measured roofs are drawn. If none was measured, a text that explains it replaces the plot.

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Resize
from textual.widget import Widget

from cbtop import units
from cbtop.comparison.comparison import WorkChange
from cbtop.comparison.items import Brick
from cbtop.comparison.noise import Change
from cbtop.text import roof_text, statistics
from cbtop.text.row_filter import words_of
from cbtop.tui.views.base import View
from cbtop.tui.views.baseline import change_role, change_text
from cbtop.tui.views.figures import figure, figure_columns
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.views.roof_detail import LEAST_LINES, RoofDetail
from cbtop.tui.views.roofline_plot import LetteredPoint, RooflinePlot, letter
from cbtop.tui.widgets.columns import Column
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import BLANK, Line, clean, clip, fit_line, join, wrap_line
from cbtop.tui.widgets.sorted_table import SortedTable
from cbtop.tui.widgets.table import Table
from cbtop.viewmodels.roofline import RooflineView, missing_ceilings
from cbtop.viewmodels.source import SourceView

# In a view of at least this width in cells, the table is to the right of the plot. The same number is in cbtop.tcss.
BESIDE = 100


def _brick(row: LetteredPoint, width: int) -> Line:
    look = CATEGORY_LOOKS[row.point.category]
    return ((f"{row.letter} ", f"strong {look.role}"), (clip(clean(row.point.name), width - 2), ""))


def _of_roof(row: LetteredPoint) -> Line:
    text = units.percent_number(row.point.percent_of_roof)
    if row.point.roof_unsure:
        return ((f"~{text}", "dim"),)
    return ((f"⚠ {text}", "warn"),) if row.point.above_roof else figure(text, "strong")


def _bound(row: LetteredPoint) -> Line:
    text = statistics.statistic("bound").bare(row.point)
    return figure(text, "dim" if row.point.roof_unsure else "")


POINT_COLUMNS: tuple[Column[LetteredPoint], ...] = (
    Column(
        "brick",
        14,
        0,
        _brick,
        "with the letter that marks it in the plot",
        align="left",
        stretch=1,
        max_width=26,
        sort_key=lambda row: row.point.name,
    ),
    *figure_columns(
        statistics.POINT_COLUMNS,
        row_of=lambda row: row.point,
        cells={"percent_of_roof": _of_roof, "bound": _bound},
        roles={"percent": "dim"},
    ),
)


def change_column(changes: Mapping[Brick, WorkChange]) -> Column[LetteredPoint]:
    """Return the column for the change of each brick's GFLOP/s since the baseline."""

    def change_of(row: LetteredPoint) -> Change | None:
        found = changes.get(row.point.key)
        return found.change if found else None

    def cell(row: LetteredPoint, width: int) -> Line:
        change = change_of(row)
        return figure(change_text(change).removesuffix(" %"), change_role(change, of_rate=True))

    def sort_value(row: LetteredPoint) -> float:
        change = change_of(row)
        return -1e9 if change is None or change.percent is None else change.percent

    doc = (
        "GFLOP/s beside the baseline's (`b`), by what each call typically takes, where chance alone does not explain "
        "it: `noise` where it may; n/a where they do not compare, and of a brick that holds others (derived)"
    )
    return Column("Δ %", 6, 2, cell, doc, sort_key=sort_value)


class Roofline(View):
    """The view of the roofline. The view shows how far each brick is from the limits of this machine."""

    title = "Roofline"
    section = "roofline"
    doc = (
        "Each letter is a brick: to the right more arithmetic for each byte, upwards more of it in a second. "
        "The slanted lines are memory bandwidths, the flat ones compute ceilings, measured on this machine, by the "
        "process itself or by `cbtop calibrate`, which C runs; ◆ is a ridge point, left of which memory is the "
        "lower roof. A letter stands where its values are. A digit is so many bricks in one place, + ten or more; "
        "below the plot, from left to right, their letters are named, and bricks so far away that they would squeeze "
        "the others. A roof with half its rounds more than 10 % below the best is unsure: grey, as what is made of "
        "it, behind a ?. Faint lines are levels of cache: no roof, but where what is faster than memory may come "
        "from. The row under the cursor is lit; a faint trail leads through where its brick was in each of the last "
        "60 s, if that is more than two places, and with a baseline ○ is where it stood then. Beside the plot stands "
        "how much of every roof it reaches, what it takes for a token as the cache and the batch grow, and what each "
        "brick would save at its own (derived)."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        # This key works in every view. It is listed here so that the footer of this view shows it.
        Binding("C", "app.measure_roofs", "measure roofs"),
    ]
    columns_doc = tuple((column.title, column.doc) for column in (*POINT_COLUMNS, change_column({})))

    def compose(self) -> ComposeResult:
        self._letters: dict[object, str] = {}
        self._letters_of = ""
        self._plot = RooflinePlot(id="roofline-plot")
        self._table: SortedTable[LetteredPoint] = SortedTable(
            POINT_COLUMNS,
            lambda row: row.point.key,
            words=lambda row: words_of(row.point),
            sort_by="wall %",
            empty="n/a: no brick with declared flops and bytes has run yet",
            id="roofline-table",
        )
        self._notes = Notes(id="roofline-notes")
        self._detail = RoofDetail(id="roofline-detail")
        yield self._plot
        self._side = Vertical(self._table, self._detail, id="roofline-side")
        yield self._side
        yield self._notes

    @property
    def focus_target(self) -> Widget:
        return self._table

    def show_source(self, source: SourceView) -> None:
        if self._letters_of != source.key:
            self._letters, self._letters_of = {}, source.key
        points = source.roofline.points
        compared = source.baseline if source.merged is None else None
        before = {} if compared is None else compared.work
        self._table.show_columns(POINT_COLUMNS if compared is None else (*POINT_COLUMNS, change_column(before)))
        for point in points:
            self._letters.setdefault(point.key, letter(len(self._letters)))
        rows = [LetteredPoint(self._letters[point.key], point) for point in points]
        self._table.show_rows(rows, of=source.rows_of)
        self._plot.show_points(source.roofline, rows, self._table.current, before)
        self._notes.show_roofline(source.roofline)
        self._lay_out()

    def on_resize(self, event: Resize) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        """Set the heights of plot, table, details and notes.

        Notes get the lines that they need, at most a sixth of the view. If the table is next to the plot, the details
        of the brick under the cursor fill the lines that the table leaves free. If the table is below the plot, the
        plot gets all free lines.
        """
        width, height = self.size
        notes = min(self._notes.lines_in(width), height // 6) if self.screen.has_class("-tall") else 1
        rows, left = 1 + max(1, len(self._table.rows)), height - notes
        is_beside = self.app.size.width >= BESIDE
        self._detail.display = is_beside and left - rows >= LEAST_LINES
        self._notes.styles.height = notes
        self._table.styles.height = rows if self._detail.display else "1fr"
        self._side.styles.height = "1fr" if is_beside else min(rows, left // 2)
        self.call_after_refresh(self._show_detail)

    def _show_detail(self) -> None:
        if self._detail.display and self.source is not None and self._table.current is not None:
            self._detail.show_brick(self._table.current.point, self.source)

    def on_table_moved(self, event: Table.Moved) -> None:
        self._plot.select(self._table.current)
        self._show_detail()


class Notes(Drawing):
    """Draws notes about facts that the plot cannot show."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._roofline = RooflineView((), (), ())

    def show_roofline(self, roofline: RooflineView) -> None:
        self._roofline = roofline
        self.redraw()

    def lines_in(self, width: int) -> int:
        """Return the number of lines that all notes together need."""
        return len(self._wrapped(width))

    def draw(self, width: int, height: int) -> list[Line]:
        lines = self._wrapped(width)
        if len(lines) > height:
            lines = [*lines[: height - 1], join(lines[height - 1 :], "")]
        return [*[BLANK] * (height - len(lines)), *(fit_line(line, width) for line in lines)]

    def _wrapped(self, width: int) -> list[Line]:
        return [line for note in roofline_notes(self._roofline) for line in wrap_line(((" ", ""),), note, width)]


def roofline_notes(roofline: RooflineView) -> list[Line]:
    """Return notes about missing or doubtful roofs, then about points above the roof and bricks without declared
    work.
    """
    # Without roofs, the plot itself shows this text.
    said = [(missing_ceilings(roofline) or roofline.note) if roofline.has_roofs else ""]
    said += (f"roofs {doubt}" for doubt in roof_text.ceiling_doubts(roofline.ceilings))
    doubts: Line = tuple((f"{clean(one)}  ", "warn") for one in said if one)
    spans: Line = ()
    above = [clean(point.name) for point in roofline.points if point.above_roof]
    if above:
        spans += ((f"⚠ above the roof: {', '.join(above)}  ", "warn"),)
    if roofline.without_work:
        spans += ((f"not placed, {clean(roof_text.without_work(roofline.without_work))}", "dim"),)
    lines = [line for line in (doubts, spans) if line]
    return lines or [(("every brick that ran is in the plot or named below it", "dim"),)]
