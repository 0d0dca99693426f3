"""A curve over time with its scale: what it was, second by second, up to now at the right edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import floor, log10

from cbtop.tui.widgets.braille import DOTS_ACROSS, DOTS_DOWN, BrailleCanvas
from cbtop.tui.widgets.lines import BLANK, Line, fit, width_of

_STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 10.0)
KEPT = 8  # curves: most redraws come before there is another second
MIN_HEIGHT = 3  # a line for the time, and two for the curve


def nice_top(value: float) -> float:
    """The end of a scale from 0 on which `value` finds room, a round number; 1 for nothing."""
    if value <= 0:
        return 1.0
    power: float = 10.0 ** floor(log10(value))
    return next((step * power for step in _STEPS if step * power >= value), 10.0 * power)


def curve(
    values: Sequence[float | None], width: int, height: int, role: str, label: Callable[[float], str]
) -> list[Line]:
    """`height` lines: the newest of `values`, one a second, from 0 to a round number, and under them the time.

    A second of which nothing is known is left blank; `label` writes the numbers of the scale.
    """
    return list(_curve(tuple(values), width, height, role, label))


@lru_cache(maxsize=KEPT)
def _curve(
    values: tuple[float | None, ...], width: int, height: int, role: str, label: Callable[[float], str]
) -> tuple[Line, ...]:
    rows = height - 1
    known = [value for value in values if value is not None]
    top = nice_top(max(known, default=0.0))
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
        dots = 0 if value is None else max(1 if value > 0 else 0, round(value / top * rows * DOTS_DOWN))
        for across in range(each):
            canvas.bar(start + at * each + across, dots, role)
    lines: list[Line] = [
        ((fit(labels.get(row, ""), margin, "right"), "dim"), ("┤" if row in labels else "│", "faint"), *line)
        for row, line in enumerate(canvas.lines())
    ]
    return (*lines, _times(len(shown), start // DOTS_ACROSS, inner, margin))


def _times(seconds: int, begin: int, inner: int, margin: int) -> Line:
    """`-60 s … now`, each under its second."""
    if not seconds:
        return BLANK
    oldest = f"-{seconds} s"
    if begin + len(oldest) > inner:
        return BLANK
    before: Line = ((" " * (margin + 1 + begin), ""), (oldest, "dim"))
    free = margin + 1 + inner - width_of(before) - len("now")
    return (*before, (" " * free, ""), ("now", "dim")) if free > 0 else before
