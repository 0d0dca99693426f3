"""Parts of a drawing from top to bottom, each with the fewest lines that are of use and the most that it can use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cbtop.tui.widgets.lines import Line, fit_line, width_of


@dataclass(frozen=True, eq=False)
class Part:
    """What draws it in a width and so many lines, the fewest that are of use, and the most."""

    draw: Callable[[int, int], list[Line]]
    least: int
    most: int


def parts_lines(order: Sequence[Part], by_rank: Sequence[Part], width: int, height: int) -> list[Line]:
    """The parts from top to bottom: the first of `by_rank` get their fewest lines first, then all grow in turn."""
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
