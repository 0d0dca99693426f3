"""A plot with two logarithmic axes, in braille dots, with tick labels and lettered points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from cbtop.tui.widgets.braille import DOTS_ACROSS, DOTS_DOWN, BrailleCanvas
from cbtop.tui.widgets.lines import Line, fit

_TICK_WIDTH = 6
_GRID_ROLE = "faint"
_NEIGHBOURS = ((0, 0), (1, 0), (-1, 0), (0, -1), (0, 1), (2, 0), (-2, 0), (1, -1), (-1, -1), (1, 1), (-1, 1))


@dataclass(frozen=True, slots=True)
class Span1D:
    """The values an axis shows, both above zero."""

    low: float
    high: float

    def position(self, value: float) -> float:
        """Where `value` lies: 0 at `low`, 1 at `high`."""
        return math.log(value / self.low) / math.log(self.high / self.low)

    def value(self, position: float) -> float:
        return float(self.low * (self.high / self.low) ** position)

    def decades(self) -> Iterator[float]:
        """The powers of ten inside."""
        exponent = math.ceil(math.log10(self.low) - 1e-9)
        while 10.0**exponent <= self.high * (1 + 1e-9):
            yield 10.0**exponent
            exponent += 1


def span_around(values: Iterable[float], margin: float = 1.6) -> Span1D:
    """An axis that holds every positive one of `values` with room to spare, at least one decade wide."""
    positive = [value for value in values if value > 0 and math.isfinite(value)]
    low = min(positive, default=0.1) / margin
    high = max(positive, default=10.0) * margin
    if high / low < 10:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(10), middle * math.sqrt(10)
    return Span1D(low, high)


@dataclass(frozen=True, slots=True)
class Spot:
    """A place for a label: it begins at a point (`right`: it ends there), or so many cells away from it."""

    x: float
    y: float
    rows_up: int = 0
    columns_right: int = 0
    right: bool = False


class LogLogPlot:
    """Lines and points on `width` x `height` cells, axes included.

    What is written stays readable: title, marks and labels take cells that nothing else is written into. So draw
    the lines first, then the marks, which are small, then the labels, which find no room sooner.
    """

    def __init__(self, width: int, height: int, x: Span1D, y: Span1D, y_title: str) -> None:
        self.x = x
        self.y = y
        self._canvas = BrailleCanvas(max(1, width - _TICK_WIDTH - 1), max(1, height - 2))
        self._width = width
        self._y_title = y_title
        self._taken = {(column, 0) for column in range(len(y_title) + 2)}

    def grid(self) -> None:
        """Faint dots where the decades cross."""
        for x in self.x.decades():
            for y in self.y.decades():
                self._canvas.dot(round(self._dot_x(x)), round(self._dot_y(y)), _GRID_ROLE)

    def segment(self, x0: float, y0: float, x1: float, y1: float, role: str, dash: int = 0) -> None:
        """A line straight on the two logarithmic axes."""
        self._canvas.line(self._dot_x(x0), self._dot_y(y0), self._dot_x(x1), self._dot_y(y1), role, dash)

    def label(self, text: str, role: str, spots: Sequence[Spot]) -> bool:
        """`text` at the first of `spots` where it crosses nothing, else where it hides only lines; False: nowhere."""
        size = cell_len(text)
        places = []
        for spot in spots:
            column, row = self._cell(spot.x, spot.y)
            start, row = column + spot.columns_right - (size - 1 if spot.right else 0), row - spot.rows_up
            # One free cell on either side keeps two texts apart.
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

    def mark(self, x: float, y: float, letter: str, role: str) -> None:
        """A lettered point; where another stands already it takes a cell beside it, or they become `+`."""
        column, row = self._cell(x, y)
        for across, down in _NEIGHBOURS:
            cell = (column + across, row + down)
            if cell not in self._taken and self._canvas.holds(*cell):
                self._taken.add(cell)
                self._canvas.write(*cell, letter, role)
                return
        self._canvas.write(column, row, "+", role)

    def lines(self, x_title: str) -> list[Line]:
        """The plot with its axes: ticks at the decades, the y title on top, the x title lower right."""
        self._canvas.write(1, 0, self._y_title, "dim")
        rows = self._canvas.lines()
        ticks = {self._cell(self.x.low, value)[1]: _tick(value) for value in self.y.decades()}
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
            cells[self._cell(value, self.y.low)[0]] = "┬"
        return "".join(cells)

    def _x_ticks(self, title: str) -> str:
        text = [" "] * self._width
        reserved = self._width - len(title) - 1
        for value in self.x.decades():
            tick = _tick(value)
            start = _TICK_WIDTH + 1 + self._cell(value, self.y.low)[0] - len(tick) // 2
            if start >= 0 and start + len(tick) < reserved:
                text[start : start + len(tick)] = tick
        text[reserved + 1 :] = title
        return "".join(text)

    def _dot_x(self, value: float) -> float:
        return self.x.position(value) * (self._canvas.width * DOTS_ACROSS - 1)

    def _dot_y(self, value: float) -> float:
        return (1 - self.y.position(value)) * (self._canvas.height * DOTS_DOWN - 1)

    def _cell(self, x: float, y: float) -> tuple[int, int]:
        column = round(self._dot_x(x)) // DOTS_ACROSS
        row = round(self._dot_y(y)) // DOTS_DOWN
        return max(0, min(column, self._canvas.width - 1)), max(0, min(row, self._canvas.height - 1))


def _tick(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    if value >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:g}"
