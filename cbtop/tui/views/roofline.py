"""The roofline: what the bricks reach, against ceilings measured on this machine."""

# No roof is ever invented: without measured ceilings the plot shows the points alone and says so.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase

from textual.app import ComposeResult
from textual.widget import Widget

from cbtop import formatting, statistics
from cbtop.protocol.vocabulary import Provenance
from cbtop.tui.views.base import View
from cbtop.tui.views.figures import figure_columns
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.columns import Column
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import Line, clean, clip, fit_line
from cbtop.tui.widgets.loglog import LogLogPlot, Span1D, Spot, span_around
from cbtop.tui.widgets.sorted_table import SortedTable
from cbtop.tui.widgets.table import Table
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.model import CeilingRow, RooflineView, SourceView
from cbtop.viewmodels.roofline import missing_ceilings

LETTERS = ascii_lowercase + ascii_uppercase
# Where names of roofs are tried, best first: parts of the plot's width and height.
_ALONG_PEAK = (1.0, 0.85, 0.7, 0.55)
_UP_BANDWIDTH = (0.62, 0.5, 0.38, 0.74, 0.26, 0.86, 0.14)


@dataclass(frozen=True, slots=True)
class LetteredPoint:
    """A point with the letter that marks it in the plot."""

    letter: str
    point: BrickRow

    @property
    def flop_per_byte(self) -> float:
        """0 has no place on a logarithmic axis."""
        return self.point.intensity or 0.0

    @property
    def gflops(self) -> float:
        return self.point.gflops or 0.0


def _brick(row: LetteredPoint, width: int) -> Line:
    look = CATEGORY_LOOKS[row.point.category]
    return ((f"{row.letter} ", f"strong {look.role}"), (clip(clean(row.point.name), width - 2), ""))


def _of_roof(row: LetteredPoint) -> Line:
    text = formatting.percent_number(row.point.percent_of_roof)
    return ((f"⚠ {text}", "warn"),) if row.point.above_roof else ((text, "strong"),)


POINT_COLUMNS: tuple[Column[LetteredPoint], ...] = (
    Column(
        "brick",
        16,
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
        cells={"percent_of_roof": _of_roof},
        roles={"bound": "dim", "percent": "dim"},
    ),
)


class Roofline(View):
    """How far each brick is from what this machine can do."""

    title = "Roofline"
    doc = (
        "Each letter is a brick: to the right more arithmetic for each byte, upwards more of it in a second. "
        "The slanted lines are memory bandwidths, the flat ones compute ceilings, measured on this machine "
        "before the run, by the process itself or by `cbtop calibrate`. A letter that would cover another stands "
        "beside it; the row under the cursor is lit."
    )
    columns_doc = tuple((column.title, column.doc) for column in POINT_COLUMNS)

    def compose(self) -> ComposeResult:
        self._letters: dict[object, str] = {}
        self._letters_of = ""
        self._plot = RooflinePlot(id="roofline-plot")
        self._table: SortedTable[LetteredPoint] = SortedTable(
            POINT_COLUMNS,
            lambda row: row.point.key,
            sort_by="wall %",
            empty="n/a: no brick with declared flops and bytes has run yet",
            id="roofline-table",
        )
        self._notes = Notes(id="roofline-notes")
        yield self._plot
        yield self._table
        yield self._notes

    @property
    def focus_target(self) -> Widget:
        return self._table

    def show_source(self, source: SourceView) -> None:
        if self._letters_of != source.key:
            self._letters, self._letters_of = {}, source.key
        points = source.roofline.points
        for point in points:
            self._letters.setdefault(point.key, LETTERS[min(len(self._letters), len(LETTERS) - 1)])
        rows = [LetteredPoint(self._letters[point.key], point) for point in points]
        self._table.show_rows(rows)
        self._plot.show_points(source.roofline, rows, self._table.current)
        self._notes.show_roofline(source.roofline)

    def on_table_moved(self, event: Table.Moved) -> None:
        self._plot.select(self._table.current)


class RooflinePlot(Drawing):
    """The plot itself."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._roofline = RooflineView((), (), ())
        self._points: Sequence[LetteredPoint] = ()
        self._selected: LetteredPoint | None = None

    def show_points(
        self, roofline: RooflineView, points: Sequence[LetteredPoint], selected: LetteredPoint | None
    ) -> None:
        self._roofline, self._points, self._selected = roofline, points, selected
        self.redraw()

    def select(self, point: LetteredPoint | None) -> None:
        self._selected = point
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        letter = self._selected.letter if self._selected else ""
        return roofline_lines(self._roofline.ceilings, self._points, letter, width, height)


def roofline_lines(
    ceilings: Sequence[CeilingRow], points: Sequence[LetteredPoint], selected: str, width: int, height: int
) -> list[Line]:
    """The plot in `width` x `height` cells: decades, roofs, the points, the selected one first, then the names.

    A name that finds no room is left out, and how many are is said at the axis.
    """
    bandwidths = [ceiling for ceiling in ceilings if ceiling.kind == "bandwidth" and ceiling.value > 0]
    peaks = [ceiling for ceiling in ceilings if ceiling.kind == "compute" and ceiling.value > 0]
    drawable = [row for row in points if row.flop_per_byte > 0 and row.gflops > 0]
    ridges = [peak.value / bandwidth.value for peak in peaks for bandwidth in bandwidths]
    x = span_around([*(row.flop_per_byte for row in drawable), *ridges], margin=2.0)
    y = span_around([*(row.gflops for row in drawable), *(peak.value for peak in peaks)], margin=2.5)
    plot = LogLogPlot(width, height, x, y, "GFLOP/s")
    plot.grid()
    roof = max((peak.value for peak in peaks), default=None)
    for bandwidth in bandwidths:
        top = min(y.high, roof or y.high)
        x0 = max(x.low, y.low / bandwidth.value)
        x1 = min(x.high, top / bandwidth.value)
        if x0 < x1:
            plot.segment(x0, bandwidth.value * x0, x1, bandwidth.value * x1, "accent")
    for peak in peaks:
        plot.segment(_begin(peak, bandwidths, x), peak.value, x.high, peak.value, "warn")
    for row in sorted(drawable, key=lambda row: row.letter == selected, reverse=True):
        role = CATEGORY_LOOKS[row.point.category].role
        chosen = row.letter == selected
        plot.mark(row.flop_per_byte, row.gflops, row.letter, "strong lit" if chosen else f"strong {role}")
    unnamed = 0
    for peak in peaks:
        spots = [Spot(x.value(along), peak.value, up, right=True) for up in (1, 2) for along in _ALONG_PEAK]
        spots.append(Spot(_begin(peak, bandwidths, x), peak.value, columns_right=-3, right=True))  # in front of it
        unnamed += not _name_roof(plot, peak, "warn", spots)
    # The highest bandwidth is named on its upper side, the others on their lower side: no name crosses a roof.
    for index, bandwidth in enumerate(sorted(bandwidths, key=lambda ceiling: -ceiling.value)):
        heights = [at for at in map(y.value, _UP_BANDWIDTH) if at <= (roof or y.high)]
        points_on_it = [(at / bandwidth.value, at) for at in heights if x.low <= at / bandwidth.value <= x.high]
        across = 3 if index else -3
        spots = [Spot(*point, columns_right=across, right=index == 0) for point in points_on_it]
        unnamed += not _name_roof(plot, bandwidth, "accent", spots)
    left_out = f"{unnamed} roof{'s' if unnamed > 1 else ''} unnamed · " if unnamed else ""
    return plot.lines(f"{left_out}FLOP/B")


def _begin(peak: CeilingRow, bandwidths: Sequence[CeilingRow], x: Span1D) -> float:
    """The intensity from which on memory could feed a compute roof."""
    return max(x.low, min((peak.value / bandwidth.value for bandwidth in bandwidths), default=x.low))


def _name_roof(plot: LogLogPlot, ceiling: CeilingRow, role: str, spots: Sequence[Spot]) -> bool:
    """Write what is known of a roof where there is room for it; a measured value can do without the word."""
    short = f"{clean(ceiling.name)} {formatting.number(ceiling.value)} {clean(ceiling.unit)}"
    texts = [f"{short} ({ceiling.provenance.value})"]
    if ceiling.measured_on:
        texts.insert(0, f"{short} ({ceiling.provenance.value} {clean(ceiling.measured_on)})")
    if ceiling.provenance is Provenance.MEASURED:
        texts.append(short)
    return any(plot.label(text, role, spots) for text in texts)


class Notes(Drawing):
    """What the plot cannot show, said in words."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._roofline = RooflineView((), (), ())

    def show_roofline(self, roofline: RooflineView) -> None:
        self._roofline = roofline
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        return [fit_line(roofline_note(self._roofline), width)]


def roofline_note(roofline: RooflineView) -> Line:
    """One line: missing ceilings, points above the roof, bricks without declared work."""
    spans: Line = ()
    said = missing_ceilings(roofline) or roofline.note
    if said:
        spans += ((f" {clean(said)} ", "warn"),)
    above = [clean(point.name) for point in roofline.points if point.above_roof]
    if above:
        spans += ((f" ⚠ above the roof: {', '.join(above)} ", "warn"),)
    if roofline.without_work:
        names = ", ".join(clean(name) for name in roofline.without_work)
        spans += ((f" not placed, no FLOP or no bytes declared: {names}", "dim"),)
    return spans or ((" every brick that ran is in the plot", "dim"),)
