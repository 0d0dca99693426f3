"""Parts of a drawing from top to bottom, each with a minimum and maximum of useful lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbtop.tui.widgets.lines import BLANK, Line, fit_line, width_of

GAP = "  "  # between panes


@dataclass(frozen=True, eq=False)
class ScreenPart:
    """A function that draws a part in a width and height, with its minimum and maximum height."""

    draw: Callable[[int, int], list[Line]]
    least: int
    most: int


def parts_lines(order: Sequence[ScreenPart], by_rank: Sequence[ScreenPart], width: int, height: int) -> list[Line]:
    """Return the parts from top to bottom. The first of `by_rank` get their minimum first, then all grow in turn."""
    lines = dict.fromkeys(order, 0)
    free = height
    for part in by_rank:
        if part.least <= min(free, part.most):
            lines[part] = part.least
            free -= part.least
    while free and (growing := [part for part in by_rank if part.least <= lines[part] < part.most]):
        for part in growing[:free]:
            lines[part] += 1
        free -= min(free, len(growing))
    drawn = [line for part in order if lines[part] for line in part.draw(width, lines[part])[: lines[part]]]
    return [line if width_of(line) <= width else fit_line(line, width) for line in drawn]


def beside(panes: Sequence[Sequence[Line]], widths: Sequence[int]) -> list[Line]:
    """Return panes from left to right in their widths, two cells apart, as high as the highest."""
    lines: list[Line] = []
    for row in range(max(map(len, panes), default=0)):
        line: Line = BLANK
        for at, (pane, width) in enumerate(zip(panes, widths, strict=True), 1):
            part = pane[row] if row < len(pane) else BLANK
            is_last = at == len(panes)
            line += part if is_last and width_of(part) <= width else fit_line(part, width)
            line += BLANK if is_last else ((GAP, ""),)
        lines.append(line)
    return lines


def even_widths(width: int, panes: int) -> list[int]:
    """Return the widths of `panes` panes that fill `width`."""
    each = (width - (panes - 1) * len(GAP)) // panes
    return [each] * (panes - 1) + [width - (panes - 1) * (each + len(GAP))]
