"""Draw a curve over time with its scale. Each value covers one second. The shown moment is at the right end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor, log10
from sys import float_info

from cbtop.tui.widgets.braille import DOTS_ACROSS, DOTS_DOWN, BrailleCanvas
from cbtop.tui.widgets.lines import BLANK, Line, fit, join_fitting, rule, width_of
from cbtop.tui.widgets.parts import beside, even_widths

_STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 10.0)
NO_CURVE = "no curve: not one full second was watched or read back"
# Number of drawn curves that are cached. Most redraws happen within the same second and draw the same curves.
KEPT = 32
MIN_HEIGHT = 3  # Minimum height of a curve in lines: two for the curve, and one for the time axis.
LEAST_CHART, USUAL_CHART, MOST_CHART = 6, 14, 24  # minimum, usual and maximum height of a chart in lines
LEAST_CHART_WIDTH = 40
_INDENT = "  "
_NEWEST = "0 s"
_RULE_ENDS = 7  # The rule above a chart has this many cells that the title and the note cannot use.


def nice_top(value: float) -> float:
    """Return a round number that is at least `value`, as the end of a scale from 0.

    Return 1 if `value` is (nearly) 0.
    """
    if value < float_info.min:  # For such a small value, `10.0 ** floor(…)` would be 0.
        return 1.0
    power: float = 10.0 ** floor(log10(value))
    return next((step * power for step in _STEPS if step * power >= value), 10.0 * power)


def curve(
    values: Sequence[float | None],
    width: int,
    height: int,
    role: str,
    label: Callable[[float], str],
    top: float | None = None,
) -> list[Line]:
    """Return `height` lines with the newest of `values` (one per second) above a time axis.

    The scale runs from 0 to `top`, or to a round number above all values if `top` is None. Unknown seconds are
    blank. `label` formats the numbers of the scale.
    """
    return list(_curve(tuple(values), width, height, role, label, top))


@lru_cache(maxsize=KEPT)
def _curve(
    values: tuple[float | None, ...],
    width: int,
    height: int,
    role: str,
    label: Callable[[float], str],
    top: float | None,
) -> tuple[Line, ...]:
    rows = height - 1
    known = [value for value in values if value is not None]
    top = top or nice_top(max(known, default=0.0))
    labels = {0: label(top), rows - 1: label(0.0)}
    if rows >= 5 and rows % 2:
        labels[rows // 2] = label(top / 2)
    margin = max(map(len, labels.values()))
    inner = max(1, width - margin - 1)
    each = max(1, inner * DOTS_ACROSS // max(1, len(values))) if values else 1
    shown = list(values[-(inner * DOTS_ACROSS // each) :])
    canvas = BrailleCanvas(inner, rows)
    start = inner * DOTS_ACROSS - len(shown) * each
    for at, value in enumerate(shown):
        dots = 0 if value is None else max(1 if value > 0 else 0, round(min(1.0, value / top) * rows * DOTS_DOWN))
        for across in range(each):
            canvas.bar(start + at * each + across, dots, role)
    lines: list[Line] = [
        ((fit(labels.get(row, ""), margin, "right"), "dim"), ("┤" if row in labels else "│", "faint"), *line)
        for row, line in enumerate(canvas.lines())
    ]
    return (*lines, _times(len(shown), start // DOTS_ACROSS, inner, margin))


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: a curve below a rule.

    The rule has the title on the left, and as many of the `figures` as fit on the right.
    """

    title: str
    figures: Sequence[Line]
    values: Sequence[float | None]
    role: str
    label: Callable[[float], str]
    top: float | None = None

    def draw(self, width: int, height: int) -> list[Line]:
        """Return the chart in `height` lines: the rule, the curve and the time axis."""
        drawn: list[Line] = [((NO_CURVE, "dim"),)]
        if any(value is not None for value in self.values):
            drawn = curve(self.values, width - len(_INDENT), height - 1, self.role, self.label, self.top)
        said = join_fitting(self.figures, width - len(self.title) - _RULE_ENDS, " · ")
        return [rule(((self.title, "dim"),), width, said), *(((_INDENT, ""), *line) for line in drawn)]


def charts(wanted: Sequence[Chart], width: int, height: int) -> list[Line]:
    """Return charts in a grid that fills `height` lines.

    If there is too little room, the last charts are left out.
    """
    widest = max(1, width // LEAST_CHART_WIDTH)
    wanted = wanted[: widest * (max(0, height) // LEAST_CHART)]
    down = max(-(-len(wanted) // widest), min(len(wanted), height // USUAL_CHART))
    across = -(-len(wanted) // max(1, down))
    rows = [wanted[at : at + across] for at in range(0, len(wanted), max(1, across))]
    lines: list[Line] = []
    for at, row in enumerate(rows):
        tall = min(MOST_CHART, (height - len(lines)) // (len(rows) - at))
        widths = even_widths(width, across)[: len(row)]
        lines += beside([chart.draw(each, tall) for chart, each in zip(row, widths, strict=True)], widths)
    return lines


def _times(seconds: int, begin: int, inner: int, margin: int) -> Line:
    """Return the time axis of a curve, `-60 s … 0 s`. 0 s is the shown moment."""
    if not seconds:
        return BLANK
    oldest = f"-{seconds} s"
    if begin + len(oldest) > inner:
        return BLANK
    before: Line = ((" " * (margin + 1 + begin), ""), (oldest, "dim"))
    free = margin + 1 + inner - width_of(before) - len(_NEWEST)
    return (*before, (" " * free, ""), (_NEWEST, "dim")) if free > 0 else before
