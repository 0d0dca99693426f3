"""A plot with two logarithmic axes. It has braille dots, tick labels and marks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len

from cbtop.tui.widgets.braille import DOTS_ACROSS, DOTS_DOWN, BrailleCanvas
from cbtop.tui.widgets.lines import Line, fit

_TICK_WIDTH = 6
_GRID_ROLE = "faint"
# Outliers are values beyond a fence, which is this many interquartile ranges away from the quartile (Tukey,
# "Exploratory Data Analysis", 1977).
_FENCE = 1.5


@dataclass(frozen=True, slots=True)
class Span1D:
    """The range of a logarithmic axis. Both ends are above zero."""

    low: float
    high: float

    def position(self, value: float) -> float:
        """Return the position of `value` on the axis: 0 at `low`, 1 at `high`."""
        return math.log(value / self.low) / math.log(self.high / self.low)

    def value(self, position: float) -> float:
        return float(self.low * (self.high / self.low) ** position)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def decades(self) -> Iterator[float]:
        """Yield the powers of ten inside the range of the axis."""
        exponent = math.ceil(math.log10(self.low) - 1e-9)
        while 10.0**exponent <= self.high * (1 + 1e-9):
            yield 10.0**exponent
            exponent += 1


def span_around(values: Iterable[float], margin: float = 1.6) -> Span1D:
    """Return an axis around all positive `values`, with a margin. It covers at least one decade."""
    positive = [value for value in values if value > 0 and math.isfinite(value)]
    low = min(positive, default=0.1) / margin
    high = max(positive, default=10.0) * margin
    if high / low < 10:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(10), middle * math.sqrt(10)
    return Span1D(low, high)


def usual(values: Sequence[float]) -> Span1D:
    """Return a range of the positive `values` without outliers, which would make the axis much longer.

    It ends at Tukey's fences of the logarithms, at least a decade away from the quartiles.
    """
    ordered = sorted(map(math.log10, values))
    if not ordered:
        return Span1D(0.1, 10.0)
    low, high = (_quantile(ordered, part) for part in (0.25, 0.75))
    room = max(_FENCE * (high - low), 1.0)
    return Span1D(10 ** (low - room), 10 ** (high + room))


def _quantile(ordered: Sequence[float], part: float) -> float:
    at = part * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, slots=True)
class Spot:
    """A possible position of a label: it begins at a point or, with `right`, ends there. From there it may move by
    some cells.
    """

    x: float
    y: float
    rows_up: int = 0
    columns_right: int = 0
    right: bool = False


class LogLogPlot:
    """A canvas of `width` x `height` cells for lines and marks, with axes.

    A mark is exactly in the cell of its values. Nothing is written into a cell with a mark, title or label. So draw
    first the lines, then the marks, the title and the labels.
    """

    def __init__(self, width: int, height: int, x: Span1D, y: Span1D) -> None:
        self.x = x
        self.y = y
        self._canvas = BrailleCanvas(max(1, width - _TICK_WIDTH - 1), max(1, height - 2))
        self._width = width
        self._taken: set[tuple[int, int]] = set()

    def grid(self) -> None:
        """Draw faint dots at the points where powers of ten of both axes cross."""
        for x in self.x.decades():
            for y in self.y.decades():
                self._canvas.dot(round(self._dot_x(x)), round(self._dot_y(y)), _GRID_ROLE)

    def segment(self, x0: float, y0: float, x1: float, y1: float, role: str, dash: int = 0) -> None:
        """Draw a line that is straight on the logarithmic axes."""
        self._canvas.line(self._dot_x(x0), self._dot_y(y0), self._dot_x(x1), self._dot_y(y1), role, dash)

    def path(self, points: Sequence[tuple[float, float]], role: str) -> None:
        """Draw a line through `points`. Do nothing if all points are in one or two cells."""
        if len({self.cell(*point) for point in points}) > 2:
            for begin, end in pairwise(points):
                self.segment(*begin, *end, role)

    def label(self, text: str, role: str, spots: Sequence[Spot]) -> bool:
        """Write `text` at the first of `spots` without any drawing.

        If all spots have drawings, write it at the first spot without marks and text. Returns False if the text fits
        at no spot.
        """
        size = cell_len(text)
        places = []
        for spot in spots:
            column, row = self.cell(spot.x, spot.y)
            start, row = column + spot.columns_right - (size - 1 if spot.right else 0), row - spot.rows_up
            # Keep one free cell on either side, so that the text does not touch other text.
            around = {(at, row) for at in range(start - 1, start + size + 1)}
            inside = self._canvas.holds(start, row) and self._canvas.holds(start + size - 1, row)
            if inside and not around & self._taken:
                places.append((start, row))
        if not places:
            return False
        column, row = next((place for place in places if self._is_clear(*place, size)), places[0])
        self._canvas.write(column, row, text, role)
        self._taken |= {(at, row) for at in range(column, column + size)}
        return True

    def _is_clear(self, column: int, row: int, size: int) -> bool:
        return all(self._canvas.role(at, row) in ("", _GRID_ROLE) for at in range(column, column + size))

    def mark(self, cell: tuple[int, int], glyph: str, role: str) -> None:
        """Write one character into a cell of the plot. The position is a result of the method `cell`."""
        self._taken.add(cell)
        self._canvas.write(*cell, glyph, role)

    def mark_if_free(self, cell: tuple[int, int], glyph: str, role: str) -> None:
        """Write a mark into the cell of its values, unless the cell already has a mark or text."""
        if cell not in self._taken:
            self.mark(cell, glyph, role)

    def title(self, text: str) -> bool:
        """Write the title of the y axis on the top line, as far to the left as possible.

        Return False if it does not fit.
        """
        for start in range(1, self._canvas.width - len(text)):
            cells = {(column, 0) for column in range(start - 1, start + len(text) + 1)}
            if not cells & self._taken:
                self._canvas.write(start, 0, text, "dim")
                self._taken |= cells
                return True
        return False

    def cell(self, x: float, y: float) -> tuple[int, int]:
        """Return (column, row) of the cell that is nearest to a pair of values.

        Values outside of the plot get a cell at its border.
        """
        column = round(self._dot_x(x)) // DOTS_ACROSS
        row = round(self._dot_y(y)) // DOTS_DOWN
        return max(0, min(column, self._canvas.width - 1)), max(0, min(row, self._canvas.height - 1))

    def lines(self, x_title: str) -> list[Line]:
        """Return the lines of the plot with its axes. The axes have ticks at the powers of ten, and the x title is at
        the lower right.
        """
        rows = self._canvas.lines()
        ticks = {self.cell(self.x.low, value)[1]: _tick(value) for value in self.y.decades()}
        body: list[Line] = [
            (
                (fit(ticks.get(index, ""), _TICK_WIDTH, "right"), "dim"),
                ("┤" if index in ticks else "│", "faint"),
                *row,
            )
            for index, row in enumerate(rows)
        ]
        body.append(((" " * _TICK_WIDTH + "└" + self._axis(), "faint"),))
        body.append(((fit(self._x_ticks(x_title), self._width), "dim"),))
        return body

    def _axis(self) -> str:
        cells = ["─"] * self._canvas.width
        for value in self.x.decades():
            cells[self.cell(value, self.y.low)[0]] = "┬"
        return "".join(cells)

    def _x_ticks(self, title: str) -> str:
        text = [" "] * self._width
        reserved = self._width - len(title) - 1
        for value in self.x.decades():
            tick = _tick(value)
            start = _TICK_WIDTH + 1 + self.cell(value, self.y.low)[0] - len(tick) // 2
            if start >= 0 and start + len(tick) < reserved:
                text[start : start + len(tick)] = tick
        text[reserved + 1 :] = title
        return "".join(text)

    def _dot_x(self, value: float) -> float:
        return self.x.position(value) * (self._canvas.width * DOTS_ACROSS - 1)

    def _dot_y(self, value: float) -> float:
        return (1 - self.y.position(value)) * (self._canvas.height * DOTS_DOWN - 1)


def _tick(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:g}"
