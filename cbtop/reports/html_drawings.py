"""Inline SVG drawings: one step as a flame chart, the roofline, and the changes of bricks between two runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cbtop import units
from cbtop.profiler.analysis.markup import COLORS, GRAY, plain
from cbtop.viewmodels.lanes import Gap, TimelineSpan
from cbtop.viewmodels.roofline import CeilingRow, RooflineView
from cbtop.viewmodels.timeline import TimelineView

WIDTH, ROW, CHARACTER = 1000, 18, 6.4  # in pixels; the drawing is scaled to the page
MAX_BLOCKS = 4_000  # maximum number of blocks of a step; smaller ones are left out first
HEIGHT, LEFT, BOTTOM = 420, 70, 40  # of the roofline
LINE = 12
POINT_LABEL = 14  # in pixels; from the middle of a point to its label
CHANGE_LABEL = 20  # in pixels; room at both ends of the bars of changes
LONGER, SHORTER = "#d1242f", "#2da44e"


def step_drawing(timeline: TimelineView | None) -> str:
    """Return the newest step: a row of blocks for the step, its layers, and its bricks. Return "" without one."""
    if timeline is None or timeline.newest is None:
        return ""
    step = timeline.newest
    rows: list[Sequence[TimelineSpan | Gap]] = []
    for lane in timeline.lanes:
        rows += [found for row in lane.rows if (found := _inside(row.spans, step))]
    least_ns = _least_ns(rows)
    left_out = sum(1 for row in rows for one in row if one.duration_ns < least_ns)
    drawn = [
        _block(one, step, number) for number, row in enumerate(rows) for one in row if one.duration_ns >= least_ns
    ]
    note = f"<p>{units.count(left_out)} blocks too short to see are left out.</p>" if left_out else ""
    return (
        f'<svg viewBox="0 0 {WIDTH} {ROW * len(rows)}" role="img" class="step">{"".join(drawn)}</svg>'
        f"<p>The newest {plain(step.name)} step, of {units.duration(step.duration_ns / 1e3)}. One step can differ "
        f"much from the mean. Point at a block for its name and its time.</p>{note}"
    )


def _inside(row: Sequence[TimelineSpan | Gap], step: TimelineSpan) -> list[TimelineSpan | Gap]:
    return [one for one in row if one.start_ns >= step.start_ns and one.end_ns <= step.end_ns]


def _least_ns(rows: Sequence[Sequence[TimelineSpan | Gap]]) -> int:
    """Return the minimum duration of a drawn block. It is chosen so that about MAX_BLOCKS blocks are drawn."""
    durations = sorted((one.duration_ns for row in rows for one in row), reverse=True)
    return durations[MAX_BLOCKS - 1] if len(durations) > MAX_BLOCKS else 0


def _block(one: TimelineSpan | Gap, step: TimelineSpan, row: int) -> str:
    scale = WIDTH / max(1, step.duration_ns)
    x, width = (one.start_ns - step.start_ns) * scale, max(0.3, one.duration_ns * scale - 0.4)
    category = one.category if isinstance(one, TimelineSpan) else None
    color = GRAY if category is None else COLORS.get(category.display_name, GRAY)
    name = plain(one.name)
    letters = int(width / CHARACTER)
    words = f'<text x="{x + 3:.1f}" y="{ROW * row + 13}">{plain(one.name[:letters])}</text>' if letters > 3 else ""
    where = plain(" · ".join(one.where))
    return (
        f"<g><title>{name}: {units.exact(one.duration_ns)}{f', in {where}' if where else ''}</title>"
        f'<rect x="{x:.2f}" y="{ROW * row}" width="{width:.2f}" height="{ROW - 1}" fill="{color}"/>{words}</g>'
    )


def change_drawing(changes: Sequence[tuple[str, float, bool]], unit: str) -> str:
    """Return the changes of times as bars, longer times to the right. Return "" if nothing has changed.

    A change has a name and a time, and says whether it is beyond noise. The bar of another change is gray.
    """
    largest = max((abs(delta) for _, delta, _ in changes), default=0.0)
    if not largest:
        return ""
    middle, room = WIDTH / 2, WIDTH / 2 - CHANGE_LABEL
    rows = []
    for row, (name, delta, is_beyond_noise) in enumerate(changes):
        width = room * abs(delta) / largest
        x, color = (middle, LONGER) if delta > 0 else (middle - width, SHORTER)
        color = color if is_beyond_noise else GRAY
        at, anchor = (middle - 6, "end") if delta > 0 else (middle + 6, "start")
        label = plain(f"{name} {'+' if delta > 0 else '-'}{units.number(abs(delta))} {unit}")
        rows.append(
            f'<rect x="{x:.1f}" y="{ROW * row}" width="{width:.1f}" height="{ROW - 1}" fill="{color}"/>'
            f'<text x="{at:.1f}" y="{ROW * row + 13}" text-anchor="{anchor}">{label}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {ROW * len(changes)}" role="img">{"".join(rows)}</svg>'


def roofline_drawing(roofs: RooflineView) -> str:
    """Return the roofline with logarithmic axes. Return "" unless a bandwidth and a compute roof are known."""
    bandwidths = [one for one in roofs.ceilings if one.kind in ("bandwidth", "cache") and one.value > 0]
    peaks = [one for one in roofs.ceilings if one.kind == "compute" and one.value > 0]
    points = [one for one in roofs.points if one.intensity and one.gflops]
    if not bandwidths or not peaks or not points:
        return ""
    ridges = [peak.value / one.value for peak in peaks for one in bandwidths]
    xs = [*ridges, *(one.intensity or 1.0 for one in points)]
    ys = [*(one.value for one in peaks), *(one.gflops or 1.0 for one in points)]
    axes = _Axes(min(xs) / 4, max(xs) * 4, min(ys) / 4, max(ys) * 2)
    highest = max(one.value for one in peaks)
    parts = [*axes.ticks(), *(axes.slope(one, highest) for one in bandwidths), *(axes.peak(one) for one in peaks)]
    for one in sorted(points, key=lambda one: -(one.gflops or 0.0)):
        x, y = axes.at(one.intensity or 1.0, one.gflops or 1.0)
        about = f"{one.name}: {units.number(one.intensity)} FLOP/byte, {units.number(one.gflops)} GFLOP/s"
        color = COLORS.get(one.category.display_name, GRAY)
        parts.append(
            f'<g><title>{plain(about)}</title><circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"/>'
            f"{axes.label_of_point(one.name, x, y)}</g>"
        )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" class="roofline">{"".join(parts)}</svg>'


class _Axes:
    """The logarithmic axes of a roofline: FLOP/byte to the right, GFLOP/s upwards."""

    def __init__(self, least_x: float, most_x: float, least_y: float, most_y: float) -> None:
        self.x, self.y = (math.log10(least_x), math.log10(most_x)), (math.log10(least_y), math.log10(most_y))
        self._labels: list[tuple[float, float, float]] = []  # left, right and lower pixel of each label

    def label(self, text: str, x: float, y: float, anchor: str = "start") -> str:
        """Return a label at the pixel (`x`, `y`).

        If other labels already cover this place, the label is below them.
        """
        width = CHARACTER * len(text)
        left = x - width if anchor == "end" else x
        while any(
            left < right_ and left_ < left + width and abs(y - y_) < LINE for left_, right_, y_ in self._labels
        ):
            y += LINE
        self._labels.append((left, left + width, y))
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{plain(text)}</text>'

    def label_of_point(self, text: str, x: float, y: float) -> str:
        """Return the label of the point at the pixel (`x`, `y`). If it moves, a line leads to it."""
        label = self.label(text, x + POINT_LABEL, y + 4)
        _, _, low = self._labels[-1]
        return (_line(x, y, x + POINT_LABEL - 2, low - 4, "leader") if low > y + 4 else "") + label

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixels of a point."""
        right = (math.log10(x) - self.x[0]) / (self.x[1] - self.x[0])
        up = (math.log10(y) - self.y[0]) / (self.y[1] - self.y[0])
        return LEFT + right * (WIDTH - LEFT - 10), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - 10)

    def slope(self, roof: CeilingRow, highest: float) -> str:
        """Return the line of a bandwidth, from the left edge to the highest compute roof."""
        least = 10 ** self.x[0]
        begin = max(least, 10 ** self.y[0] / roof.value)
        x1, y1 = self.at(begin, begin * roof.value)
        x2, y2 = self.at(highest / roof.value, highest)
        label = f"{roof.name} {units.number(roof.value)} {roof.unit}"
        return _line(x1, y1, x2, y2, "roof") + self.label(label, x1 + 6, y1 - 4)

    def peak(self, roof: CeilingRow) -> str:
        """Return the line of a compute roof, over the whole width."""
        x1, y = self.at(10 ** self.x[0], roof.value)
        label = f"{roof.name} {units.number(roof.value)} {roof.unit}"
        return _line(x1, y, WIDTH - 10, y, "roof") + self.label(label, WIDTH - 14, y - 4, "end")

    def ticks(self) -> list[str]:
        """Return the two axes with a number at each power of ten."""
        x0, y0 = LEFT, HEIGHT - BOTTOM
        found = [_line(x0, y0, WIDTH - 10, y0, "axis"), _line(x0, 10, x0, y0, "axis")]
        for power in range(math.ceil(self.x[0]), math.floor(self.x[1]) + 1):
            x, _ = self.at(10.0**power, 10 ** self.y[0])
            found.append(f'<text x="{x:.1f}" y="{y0 + 16}" text-anchor="middle">{units.number(10.0**power)}</text>')
        for power in range(math.ceil(self.y[0]), math.floor(self.y[1]) + 1):
            _, y = self.at(10 ** self.x[0], 10.0**power)
            found.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{units.number(10.0**power)}</text>')
        middle = (WIDTH + LEFT) / 2
        found.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">FLOP/byte</text>')
        found.append(self.label("GFLOP/s", LEFT + 6, HEIGHT - BOTTOM - 6))
        return found


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'
