"""Draw the parts of a view from top to bottom. Each part has a minimum and a maximum number of lines."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from cbtop.tui.widgets.lines import BLANK, Line, fit_line, width_of

GAP = "  "


@dataclass(frozen=True, eq=False)
class ScreenPart:
    """A part of a view: a function that draws it in (width, height), and its minimum and maximum height.

    `links` returns, for each line that `draw` returns for the same size, what the user can open there, or None.
    """

    draw: Callable[[int, int], list[Line]]
    least: int
    most: int
    links: Callable[[int, int], Sequence[Hashable]] | None = None


def parts_lines(order: Sequence[ScreenPart], by_rank: Sequence[ScreenPart], width: int, height: int) -> list[Line]:
    """Draw the parts of a view from top to bottom in at most `height` lines.

    Each part first gets its minimum height, in the order of `by_rank`. Then the remaining lines are distributed in
    the same order.
    """
    return [line for line, _ in linked_lines(order, by_rank, width, height)]


def linked_lines(
    order: Sequence[ScreenPart], by_rank: Sequence[ScreenPart], width: int, height: int
) -> list[tuple[Line, Hashable]]:
    """Draw the parts of a view like `parts_lines`. Each line comes with its link, or None."""
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
    drawn: list[tuple[Line, Hashable]] = []
    for part in order:
        if lines[part]:
            texts = part.draw(width, lines[part])[: lines[part]]
            links = part.links(width, lines[part])[: len(texts)] if part.links else ()
            drawn += zip_longest(texts, links)
    return [(line if width_of(line) <= width else fit_line(line, width), link) for line, link in drawn]


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
