"""Draw vertical bars next to each other, with a resolution of an eighth of a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from cbtop.tui.widgets.lines import Line

_EIGHTHS = " ▁▂▃▄▅▆▇█"
MAX_BAR_WIDTH = 12
_GAP_FROM = 3  # If each bar has at least this many cells, the last of its cells is a gap.
MISSING = "·"
_LEAST_TOP, _GREATEST_TOP = 2.0, 4.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A vertical bar with its value and colour role. If the value is None, only a dot is drawn."""

    value: float | None
    role: str


@dataclass(frozen=True, slots=True)
class Spacing:
    """The layout of bars. Each bar is `cells` wide.

    If there are more bars than cells, each cell shows `group` bars.
    """

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
        """Return the first cell of the bar with this index."""
        return bar // self.group * self.cells

    def groups(self) -> list[range]:
        """Return a range of value indices for each drawn bar. A range has several indices if values share a cell."""
        return [range(at, min(at + self.group, self.bars)) for at in range(0, self.bars, self.group)]


def usual_top(values: Sequence[float], usual: float) -> float:
    """Return the end of a scale from 0 for vertical bars: the highest of `values`, within limits.

    The limits ensure that a bar of the value `usual` takes between a quarter and a half of the chart's height.
    """
    return max(_LEAST_TOP * usual, min(_GREATEST_TOP * usual, max(values, default=0.0)))


def upright(bars: Sequence[Bar], spacing: Spacing, height: int, top: float) -> list[Line]:
    """Return the bars in `height` lines. A bar with the value `top` has full height.

    If several values share a bar, the bar shows the highest of them.
    """
    if spacing.group > 1:
        groups = ([bars[at] for at in group] for group in spacing.groups())
        bars = [max(group, key=lambda bar: -1.0 if bar.value is None else bar.value) for group in groups]
    solid = spacing.cells - 1 if spacing.cells >= _GAP_FROM else spacing.cells
    blank = " " * (spacing.cells - solid)
    columns = [([glyph * solid + blank for glyph in _glyphs(bar, height, top)], bar.role) for bar in bars]
    return [_line(columns, height - 1 - row) for row in range(height)]


def _line(columns: Sequence[tuple[Sequence[str], str]], above: int) -> Line:
    """Return one line of a bar chart. `above` is the number of lines below this line.

    Bars are drawn from the lowest line up.
    """
    parts = [(texts[above], role) for texts, role in columns]
    return tuple(("".join([text for text, _ in same]), role) for role, same in groupby(parts, key=itemgetter(1)))


def _glyphs(bar: Bar, height: int, top: float) -> list[str]:
    """Return the characters of a vertical bar, one for each line, from the lowest line up."""
    if bar.value is None:
        return [MISSING] + [" "] * (height - 1)
    eighths = round(min(1.0, max(0.0, bar.value / top if top > 0 else 0.0)) * height * 8)
    if bar.value > 0 and eighths == 0:
        eighths = 1  # A value above zero must be visible. So draw at least one eighth of a cell.
    full, part = divmod(eighths, 8)
    return ([_EIGHTHS[8]] * full + [_EIGHTHS[part]] + [_EIGHTHS[0]] * height)[:height]
