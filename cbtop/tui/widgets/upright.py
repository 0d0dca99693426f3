"""Upright bars next to each other, drawn to an eighth of a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from cbtop.tui.widgets.lines import Line

_EIGHTHS = " ▁▂▃▄▅▆▇█"
MAX_BAR_WIDTH = 12
_GAP_FROM = 3  # cells per bar: from this width on, the last cell is a gap
MISSING = "·"
_LEAST_TOP, _GREATEST_TOP = 2.0, 4.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar with this value; None if there is nothing to draw."""

    value: float | None
    role: str


@dataclass(frozen=True, slots=True)
class Spacing:
    """The layout of bars: each `cells` wide or, if there are more bars than cells, `group` in one cell."""

    bars: int
    cells: int
    group: int

    @classmethod
    def of(cls, bars: int, width: int) -> Spacing:
        if bars > width:
            return cls(bars, 1, -(-bars // max(1, width)))
        return cls(bars, min(MAX_BAR_WIDTH, width // max(1, bars)), 1)

    @property
    def width(self) -> int:
        return -(-self.bars // self.group) * self.cells

    def column(self, bar: int) -> int:
        """Return the first cell of `bar`."""
        return bar // self.group * self.cells

    def groups(self) -> list[range]:
        """Return the bars of each place, one or several."""
        return [range(at, min(at + self.group, self.bars)) for at in range(0, self.bars, self.group)]


def usual_top(values: Sequence[float], usual: float) -> float:
    """Return the end of a scale from 0: the highest of `values`, within limits.

    With these limits, usual values are at most half, and at least a quarter, as high as the chart.
    """
    return max(_LEAST_TOP * usual, min(_GREATEST_TOP * usual, max(values, default=0.0)))


def upright(bars: Sequence[Bar], spacing: Spacing, height: int, top: float) -> list[Line]:
    """Return the bars in `height` lines; `top` is the value of full height. For a group, the highest is drawn."""
    if spacing.group > 1:
        groups = ([bars[at] for at in group] for group in spacing.groups())
        bars = [max(group, key=lambda bar: -1.0 if bar.value is None else bar.value) for group in groups]
    solid = spacing.cells - 1 if spacing.cells >= _GAP_FROM else spacing.cells
    blank = " " * (spacing.cells - solid)
    columns = [([glyph * solid + blank for glyph in _glyphs(bar, height, top)], bar.role) for bar in bars]
    return [_line(columns, height - 1 - row) for row in range(height)]


def _line(columns: Sequence[tuple[Sequence[str], str]], above: int) -> Line:
    """Return the line with `above` lines below it; bars are drawn from the lowest line up."""
    parts = [(texts[above], role) for texts, role in columns]
    return tuple(("".join([text for text, _ in same]), role) for role, same in groupby(parts, key=itemgetter(1)))


def _glyphs(bar: Bar, height: int, top: float) -> list[str]:
    """Return a cell of it for each line, from the lowest up."""
    if bar.value is None:
        return [MISSING] + [" "] * (height - 1)
    eighths = round(min(1.0, max(0.0, bar.value / top if top > 0 else 0.0)) * height * 8)
    if bar.value > 0 and eighths == 0:
        eighths = 1  # a small value is not zero
    full, part = divmod(eighths, 8)
    return ([_EIGHTHS[8]] * full + [_EIGHTHS[part]] + [_EIGHTHS[0]] * height)[:height]
