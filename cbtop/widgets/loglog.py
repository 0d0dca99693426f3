"""A plot with two logarithmic axes, in braille dots, with tick labels and lettered points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cbtop.widgets.braille import DOTS_ACROSS, DOTS_DOWN, BrailleCanvas
from cbtop.widgets.lines import Line, clip, fit

_TICK_WIDTH = 6
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


class LogLogPlot:
    """Lines and points on `width` x `height` cells, axes included."""

    def __init__(self, width: int, height: int, x: Span1D, y: Span1D) -> None:
        self.x = x
        self.y = y
        self._canvas = BrailleCanvas(max(1, width - _TICK_WIDTH - 1), max(1, height - 2))
        self._width = width
        self._marks: set[tuple[int, int]] = set()

    def grid(self, role: str) -> None:
        """Faint dots where the decades cross."""
        for x in self.x.decades():
            for y in self.y.decades():
                self._canvas.dot(round(self._dot_x(x)), round(self._dot_y(y)), role)

    def segment(self, x0: float, y0: float, x1: float, y1: float, role: str, dash: int = 0) -> None:
        """A line straight on the two logarithmic axes."""
        self._canvas.line(self._dot_x(x0), self._dot_y(y0), self._dot_x(x1), self._dot_y(y1), role, dash)

    def label(self, x: float, y: float, text: str, role: str, *, rows_up: int = 0, align: str = "left") -> None:
        """`text` beginning (or with `right` ending) at a point, `rows_up` rows above it."""
        column, row = self._cell(x, y)
        if align == "right":
            column -= len(text) - 1
        column = max(0, min(column, self._canvas.width - len(text)))
        self._canvas.write(column, max(0, row - rows_up), clip(text, self._canvas.width), role)

    def mark(self, x: float, y: float, letter: str, role: str) -> None:
        """A lettered point; where another stands already it takes a cell beside it, or they become `+`."""
        column, row = self._cell(x, y)
        for across, down in _NEIGHBOURS:
            cell = (column + across, row + down)
            if cell not in self._marks and self._canvas.holds(*cell):
                self._marks.add(cell)
                self._canvas.write(*cell, letter, role)
                return
        self._canvas.write(column, row, "+", role)

    def lines(self, y_title: str, x_title: str) -> list[Line]:
        """The plot with its axes: ticks at the decades, the y title on top, the x title lower right."""
        self._canvas.write(1, 0, y_title, "dim")
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
