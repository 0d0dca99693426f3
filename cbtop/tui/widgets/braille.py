"""A canvas of braille dots for curves. A terminal cell has two columns and four rows of dots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

from rich.cells import cell_len

from cbtop.tui.widgets.lines import Line, Span

DOTS_ACROSS = 2
DOTS_DOWN = 4
_STEADY = 0.8
KEPT = 8  # Number of drawn areas that are cached. Most redraws happen within the same second and draw the same areas.
_BASE = 0x2800
_BITS = (
    (0x01, 0x08),
    (0x02, 0x10),
    (0x04, 0x20),
    (0x40, 0x80),
)  # For each row and column of dots: its bit in a character of the Unicode block Braille Patterns.
# For each column of dots in a cell: the bits of its lowest 0, 1, … 4 dots.
_LOWEST = tuple(
    tuple(sum(row[across] for row in _BITS[DOTS_DOWN - dots :]) for dots in range(DOTS_DOWN + 1))
    for across in range(DOTS_ACROSS)
)


class BrailleCanvas:
    """A grid of terminal cells with dots.

    A cell has one colour role. If a character is written into a cell, the cell's dots are hidden.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self._bits = [[0] * width for _ in range(height)]
        self._roles = [[""] * width for _ in range(height)]
        self._glyphs: list[list[str]] = [[""] * width for _ in range(height)]

    def dot(self, x: int, y: int, role: str) -> None:
        """Set the dot at column `x` and row `y`, counted in dots from the top left.

        Dots outside of the canvas are ignored.
        """
        column, row = x // DOTS_ACROSS, y // DOTS_DOWN
        if 0 <= column < self.width and 0 <= row < self.height and x >= 0 and y >= 0:
            self._bits[row][column] |= _BITS[y % DOTS_DOWN][x % DOTS_ACROSS]
            self._roles[row][column] = role

    def bar(self, x: int, dots: int, role: str) -> None:
        """Set the lowest `dots` dots of column `x`. A column outside of the canvas is ignored."""
        column, lowest = x // DOTS_ACROSS, _LOWEST[x % DOTS_ACROSS]
        if not 0 <= column < self.width:
            return
        for above in range(min(self.height, -(-dots // DOTS_DOWN))):
            row = self.height - 1 - above
            self._bits[row][column] |= lowest[min(DOTS_DOWN, dots - DOTS_DOWN * above)]
            self._roles[row][column] = role

    def line(self, x0: float, y0: float, x1: float, y1: float, role: str, dash: int = 0) -> None:
        """Draw a straight line, clipped to the canvas.

        If `dash` is not 0, the line is dashed: `dash` dots are drawn, then `dash` dots are left out.
        """
        steps = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
        # The part of the line that may be on the canvas, as (begin, end). Both are shares of the line's length.
        first, last = 0.0, 1.0
        for begin, end, size in ((x0, x1, self.width * DOTS_ACROSS), (y0, y1, self.height * DOTS_DOWN)):
            if begin != end:
                low, high = sorted(((-1 - begin) / (end - begin), (size - begin) / (end - begin)))
                first, last = max(first, low), min(last, high)
        for step in range(math.floor(first * steps), math.ceil(last * steps) + 1):
            if dash and step % (2 * dash) >= dash:
                continue
            part = step / steps
            self.dot(round(x0 + (x1 - x0) * part), round(y0 + (y1 - y0) * part), role)

    def write(self, column: int, row: int, text: str, role: str) -> None:
        """Write `text` from cell (`column`, `row`) on, clipped to the canvas.

        A double-width character is replaced by `�`.
        """
        if not 0 <= row < self.height:
            return
        for offset, character in enumerate(text):
            if 0 <= column + offset < self.width:
                self._glyphs[row][column + offset] = character if cell_len(character) == 1 else "�"
                self._roles[row][column + offset] = role

    def role(self, column: int, row: int) -> str:
        """Return the colour role of a cell. Return "" if nothing was drawn there."""
        return self._roles[row][column]

    def holds(self, column: int, row: int) -> bool:
        """Whether the cell (`column`, `row`) is on the canvas."""
        return 0 <= row < self.height and 0 <= column < self.width

    def lines(self) -> list[Line]:
        """Return the rows of the canvas as lines. Adjacent cells with the same role are joined."""
        return [self._row(row) for row in range(self.height)]

    def _row(self, row: int) -> Line:
        spans: list[Span] = []
        run, run_role = "", ""
        for bits, glyph, role in zip(self._bits[row], self._glyphs[row], self._roles[row], strict=True):
            character = glyph or (chr(_BASE + bits) if bits else " ")
            if role != run_role and run:
                spans.append((run, run_role))
                run = ""
            run_role = role
            run += character
        spans.append((run, run_role))
        return tuple(spans)


def sparkline(values: Sequence[float | None], width: int, top: float, role: str) -> Line:
    """Return the newest `values` as a line on a scale from 0 to `top`. The newest value is at the right end.

    Values above `top` are cut. A known value has at least one dot, and an unknown value is blank.
    """
    shown = values[-width * DOTS_ACROSS :]
    dots = [0] * (width * DOTS_ACROSS - len(shown))
    for value in shown:
        part = 0.0 if value is None or top <= 0 else min(1.0, value / top)
        dots.append(0 if value is None else max(1, math.ceil(part * DOTS_DOWN)))
    left, right = _LOWEST
    bits = [left[one] | right[other] for one, other in zip(dots[::2], dots[1::2], strict=True)]
    drawn = [(chr(_BASE + each), role) if each else (" ", "") for each in bits]
    return tuple(("".join([text for text, _ in same]), its) for its, same in groupby(drawn, key=itemgetter(1)))


def area(values: Sequence[float], width: int, height: int, role: str) -> list[Line]:
    """Return the newest `values` as a filled curve. The newest value is at the right end.

    The scale begins at the minimum, or at 0.8 of the maximum if this is lower. Otherwise the noise of a steady rate
    would fill the full height. The scale ends at the maximum.
    """
    return list(_area(tuple(values[-width * DOTS_ACROSS :]), width, height, role))


@lru_cache(maxsize=KEPT)
def _area(shown: tuple[float, ...], width: int, height: int, role: str) -> tuple[Line, ...]:
    canvas = BrailleCanvas(width, height)
    top = max(shown, default=0.0)
    bottom = min(min(shown, default=0.0), _STEADY * top)
    if top > 0:
        rows = height * DOTS_DOWN
        start = width * DOTS_ACROSS - len(shown)
        for index, value in enumerate(shown):
            filled = max(1, round((value - bottom) / (top - bottom) * rows)) if value > 0 else 0
            canvas.bar(start + index, filled, role)
    return tuple(canvas.lines())
