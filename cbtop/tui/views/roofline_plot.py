"""Draw the plot of the roofline: roofs, ridge points, a mark for each brick, and the trail of one brick."""

# Rules
# - A mark is in the cell of its values. If several marks share a cell, the cell shows the number of marks, and a line
#   below the plot lists their letters.
# - Roofs, marks and names cover the trail of the brick under the cursor. The trail is clipped at the axes.
# - A hollow mark shows the brick under the cursor at the baseline. This mark is drawn only inside of the axes, and
#   only in a cell without another mark.
# - A brick far from all other bricks is not drawn, because the axes would have to be much longer. A line below the
#   plot lists such bricks.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters

from cbtop import units
from cbtop.comparison.comparison import WorkChange
from cbtop.comparison.items import Brick
from cbtop.protocol.vocabulary import Provenance
from cbtop.text import time_text
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import BLANK, Line, clean, fit_line, join, width_of, wrap_line
from cbtop.tui.widgets.loglog import LogLogPlot, Span1D, Spot, span_around, usual
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.roofline import CeilingRow, RooflineView, missing_ceilings

RIDGE = "◆"
BEFORE = "○"  # the mark of a brick's position at the baseline
MANY = "+"  # the mark of a cell that contains ten or more bricks
# The names of roofs are tried at these positions, the best first. They are shares of the plot's width or height.
_ALONG_PEAK = (1.0, 0.85, 0.7, 0.55)
_UP_BANDWIDTH = (0.62, 0.5, 0.38, 0.74, 0.26, 0.86, 0.14)
ROOM_FOR_WORDS = 50  # If the plot has at least this width in cells, the lines below the plot contain words.
# Minimum height of the plot in lines, including axis and ticks. To keep this height, lines below the plot are
# dropped.
_LEAST_PLOT = 4

Cells = dict[tuple[int, int], list["LetteredPoint"]]


def letter(number: int) -> str:
    """Return the letter that marks the brick with this number (from 0). After 52 letters, return `*`."""
    return ascii_letters[number] if number < len(ascii_letters) else "*"


@dataclass(frozen=True, slots=True)
class LetteredPoint:
    """A brick's point in the plot, and the letter at this point."""

    letter: str
    point: BrickRow

    @property
    def flop_per_byte(self) -> float:
        """The intensity in FLOP per byte. It must be above 0, because the axis is logarithmic."""
        return self.point.intensity or 0.0

    @property
    def gflops(self) -> float:
        return self.point.gflops or 0.0

    def role(self, selected: str) -> str:
        return "strong lit" if self.letter == selected else f"strong {CATEGORY_LOOKS[self.point.category].role}"


class RooflinePlot(Drawing):
    """The lines of the plot, and a list of the marks that share a cell."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._roofline = RooflineView((), (), ())
        self._points: Sequence[LetteredPoint] = ()
        self._selected: LetteredPoint | None = None
        self._before: Mapping[Brick, WorkChange] = {}

    def show_points(
        self,
        roofline: RooflineView,
        points: Sequence[LetteredPoint],
        selected: LetteredPoint | None,
        before: Mapping[Brick, WorkChange],
    ) -> None:
        self._roofline, self._points, self._selected, self._before = roofline, points, selected, before
        self.redraw()

    def select(self, point: LetteredPoint | None) -> None:
        self._selected = point
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if not self._roofline.has_roofs:
            return nothing_to_draw(self._roofline, width, height)
        selected, trail = (self._selected.letter, self._selected.point.trail) if self._selected else ("", ())
        found = self._before.get(self._selected.point.key) if self._selected else None
        before = (found.intensity, found.gflops) if found else None
        return roofline_lines(self._roofline, self._points, selected, width, height, trail, before)


def nothing_to_draw(roofline: RooflineView, width: int, height: int) -> list[Line]:
    """Return a text about the missing measurement and how to make it, in the middle of `height` lines."""
    text: Line = ((clean(missing_ceilings(roofline)), "warn"),)
    lines = [((" no plot without roofs", "dim"),), *wrap_line(((" ", ""),), text, width)][:height]
    above = (height - len(lines)) // 2
    return [*[BLANK] * above, *(fit_line(line, width) for line in lines), *[BLANK] * (height - above - len(lines))]


def roofline_lines(
    roofline: RooflineView,
    points: Sequence[LetteredPoint],
    selected: str,
    width: int,
    height: int,
    trail: Sequence[tuple[float, float] | None] = (),
    before: tuple[float, float] | None = None,
) -> list[Line]:
    """Return the plot and, below it, the lists of its marks, in `width` x `height` cells.

    `trail` is `BrickRow.trail` of the brick `selected`. `before` is (FLOP/B, GFLOP/s) of this brick at the baseline.
    """
    drawable = [row for row in points if row.flop_per_byte > 0 and row.gflops > 0]
    x, y = axes(roofline, drawable)
    inside = [row for row in drawable if x.holds(row.flop_per_byte) and y.holds(row.gflops)]
    outside = [row for row in drawable if not (x.holds(row.flop_per_byte) and y.holds(row.gflops))]
    named: list[Line] = []
    # Draw again with less height, because each line below the plot makes the plot smaller. Marks may then move to
    # other cells.
    while True:
        plot = LogLogPlot(width, height - len(named), x, y)
        cells = _cells(plot, inside)
        wanted = _wrapped([*_clusters(cells, selected, width), *_outliers(outside, selected)], width)
        if len(wanted) <= len(named) or height - len(wanted) < _LEAST_PLOT:
            break
        named = wanted
    return [*_drawn(plot, roofline, cells, selected, trail, before), *wanted][:height]


def axes(roofline: RooflineView, points: Sequence[LetteredPoint]) -> tuple[Span1D, Span1D]:
    """Return the x axis and the y axis of the plot. They cover all roofs, and all points except outliers."""
    across, up = usual([row.flop_per_byte for row in points]), usual([row.gflops for row in points])
    rows = [row for row in points if across.holds(row.flop_per_byte) and up.holds(row.gflops)]
    ridges, peaks = roofline.ridges, _of_kind(roofline, "compute")
    x = span_around([*(row.flop_per_byte for row in rows), *(ridge.flop_per_byte for ridge in ridges)], margin=2.0)
    return x, span_around([*(row.gflops for row in rows), *(peak.value for peak in peaks)], margin=2.5)


def _of_kind(roofline: RooflineView, kind: str) -> list[CeilingRow]:
    return [ceiling for ceiling in roofline.ceilings if ceiling.kind == kind and ceiling.value > 0]


def _cells(plot: LogLogPlot, points: Sequence[LetteredPoint]) -> Cells:
    """Return the points of the plot by the cell that contains them."""
    cells: Cells = {}
    for row in points:
        cells.setdefault(plot.cell(row.flop_per_byte, row.gflops), []).append(row)
    return cells


def _mark(rows: Sequence[LetteredPoint]) -> str:
    return rows[0].letter if len(rows) == 1 else str(len(rows)) if len(rows) < 10 else MANY


def _clusters(cells: Cells, selected: str, width: int) -> Iterator[Line]:
    """Yield texts about cells with several marks, from left to right: `in one cell: 2=cd`, `4=efgh`, … A long list is
    split.
    """
    said: Line = (("in one cell: ", "dim"),) if width >= ROOM_FOR_WORDS else BLANK
    for _, rows in sorted(cells.items()):
        if len(rows) > 1:
            room = max(width - 5 - width_of(said), 1)
            parts = [rows[start : start + room] for start in range(0, len(rows), room)]
            for part in parts:
                head: Line = ((f"{_mark(rows)}=", "dim"),) if part is parts[0] else BLANK
                yield (*said, *head, *((row.letter, row.role(selected)) for row in part))
                said = BLANK


def _outliers(points: Sequence[LetteredPoint], selected: str) -> Iterator[Line]:
    for row in points:
        where = f"{units.number(row.flop_per_byte)} FLOP/B, {units.number(row.gflops)} GFLOP/s"
        yield (("outside: ", "dim"), (row.letter, row.role(selected)), (f" {where}", "dim"))


def _wrapped(parts: Sequence[Line], width: int) -> list[Line]:
    """Join the texts `parts` to lines of at most `width` cells. Only a text that is wider than a line is cut."""
    lines: list[Line] = []
    for part in parts:
        longer = join((lines[-1], part)) if lines else BLANK
        if lines and width_of(longer) < width:
            lines[-1] = longer
        else:
            lines.append(((" ", ""), *part))
    return [fit_line(line, min(width_of(line), width)) for line in lines]


def _drawn(
    plot: LogLogPlot,
    roofline: RooflineView,
    cells: Cells,
    selected: str,
    trail: Sequence[tuple[float, float] | None],
    before: tuple[float, float] | None,
) -> list[Line]:
    """Draw decades, the trail, roofs, marks, and then names. Mention the number of names that do not fit."""
    bandwidths, peaks = _of_kind(roofline, "bandwidth"), _of_kind(roofline, "compute")
    x, y = plot.x, plot.y
    plot.grid()
    plot.path([point for point in trail if point], "faint")
    roof = max((peak.value for peak in peaks), default=None)
    for bandwidth in bandwidths:
        top = min(y.high, roof or y.high)
        x0 = max(x.low, y.low / bandwidth.value)
        x1 = min(x.high, top / bandwidth.value)
        if x0 < x1:
            plot.segment(x0, bandwidth.value * x0, x1, bandwidth.value * x1, _role(bandwidth))
    # Draw the lines of caches faintly, because caches do not limit a brick. A brick above its roof may have read its
    # data from a cache.
    for level in _of_kind(roofline, "cache"):
        x0, x1 = max(x.low, y.low / level.value), min(x.high, min(y.high, roof or y.high) / level.value)
        if x0 < x1:
            plot.segment(x0, level.value * x0, x1, level.value * x1, "faint")
    for peak in peaks:
        plot.segment(_begin(peak, bandwidths, x), peak.value, x.high, peak.value, _role(peak))
    for cell, rows in cells.items():
        lit = next((row for row in rows if row.letter == selected), rows[0])
        plot.mark(cell, _mark(rows), lit.role(selected))
    if before is not None and x.holds(before[0]) and y.holds(before[1]):
        plot.mark_if_free(plot.cell(*before), BEFORE, "lit")
    for ridge in roofline.ridges:
        plot.mark_if_free(plot.cell(ridge.flop_per_byte, ridge.gflops), RIDGE, "dim")
    titles = [] if plot.title("GFLOP/s") else ["GFLOP/s over"]
    unnamed = 0
    for peak in peaks:
        spots = [Spot(x.value(along), peak.value, up, right=True) for up in (1, 2) for along in _ALONG_PEAK]
        # If the name fits nowhere else, write it to the left of the roof's line.
        spots.append(Spot(_begin(peak, bandwidths, x), peak.value, columns_right=-3, right=True))
        unnamed += not _name_roof(plot, peak, spots)
    # Write the name of the highest bandwidth above its line, and all other names below their lines. Then no name
    # crosses a roof.
    for index, bandwidth in enumerate(sorted(bandwidths, key=lambda ceiling: -ceiling.value)):
        heights = [at for at in map(y.value, _UP_BANDWIDTH) if at <= (roof or y.high)]
        points_on_it = [(at / bandwidth.value, at) for at in heights if x.low <= at / bandwidth.value <= x.high]
        above = [Spot(*point, columns_right=-3, right=True) for point in points_on_it]
        below = [Spot(*point, columns_right=3) for point in points_on_it]
        spots = below if index else above if len(bandwidths) > 1 else above + below
        unnamed += not _name_roof(plot, bandwidth, spots)
    for ridge in roofline.ridges:
        spots = [Spot(ridge.flop_per_byte, ridge.gflops, up, columns_right=2) for up in (-2, -3, -1, -4)]
        spots += [Spot(ridge.flop_per_byte, ridge.gflops, up, right=True) for up in (1, 2)]
        of = f" {ridge.dtype}" if len(peaks) > 1 and ridge.dtype else ""
        plot.label(f"ridge {units.number(ridge.flop_per_byte)}{of}", "dim", spots)
    if unnamed:
        titles.insert(0, f"{unnamed} roof{'s' if unnamed > 1 else ''} unnamed ·")
    return plot.lines(" ".join([*titles, "FLOP/B"]))


def _role(ceiling: CeilingRow) -> str:
    """Return the colour role of a roof. An uncertain roof is grey."""
    return "dim" if ceiling.is_unsure else "accent" if ceiling.kind == "bandwidth" else "warn"


def _begin(peak: CeilingRow, bandwidths: Sequence[CeilingRow], x: Span1D) -> float:
    """Return the lowest intensity (FLOP/B) at which memory is fast enough to reach a compute roof."""
    return max(x.low, min((peak.value / bandwidth.value for bandwidth in bandwidths), default=x.low))


def _name_roof(plot: LogLogPlot, ceiling: CeilingRow, spots: Sequence[Spot]) -> bool:
    """Write the name of a roof in the longest form that fits. Return False if no form fits."""
    unsure = "~" if ceiling.is_unsure else ""
    short = f"{clean(ceiling.name)} {unsure}{units.number(ceiling.value)} {clean(ceiling.unit)}"
    texts = [f"{short} ({ceiling.provenance.value})"]
    if ceiling.measured_on:
        day = f"{ceiling.provenance.value} {clean(time_text.day(ceiling.measured_on))}"
        texts.insert(0, f"{short} ({day})")
        if ceiling.age_s is not None:
            texts.insert(0, f"{short} ({day}, age {time_text.age(ceiling.age_s)})")
    if ceiling.provenance is Provenance.MEASURED:
        texts.append(short)
    return any(plot.label(text, _role(ceiling), spots) for text in texts)
