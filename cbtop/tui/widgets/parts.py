"""Draw the parts of a view from top to bottom. Each part has a minimum and a maximum number of lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbtop.tui.widgets.lines import BLANK, Line, fit_line, width_of

GAP = "  "


@dataclass(frozen=True, eq=False)
class ScreenPart:
    """A part of a view: a function that draws it in (width, height), and its minimum and maximum height."""

    draw: Callable[[int, int], list[Line]]
    least: int
    most: int


def parts_lines(order: Sequence[ScreenPart], by_rank: Sequence[ScreenPart], width: int, height: int) -> list[Line]:
    """Draw the parts of a view from top to bottom in at most `height` lines.

    Each part first gets its minimum height, in the order of `by_rank`. Then the remaining lines are distributed in
    the same order.
    """
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
    """Return the lines of several panes next to each other, two cells apart. The result has the height of the highest
    pane.
    """
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
    """Return the widths of `panes` panes that together fill `width`. The last pane gets the remainder."""
    each = (width - (panes - 1) * len(GAP)) // panes
    return [each] * (panes - 1) + [width - (panes - 1) * (each + len(GAP))]
