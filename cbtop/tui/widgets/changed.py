"""A screen that sends only changed cells to the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import Console
from textual._compositor import Compositor, CompositorUpdate
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget


class ChangedCells(CompositorUpdate):
    """An update for the terminal: strips of cells, each with its line and its first column."""

    def __init__(self, strips: Sequence[tuple[int, int, Strip]]) -> None:
        self._strips = strips

    def render_segments(self, console: Console) -> str:
        return "".join([f"\x1b[{y + 1};{x + 1}H{strip.render(console)}" for y, x, strip in self._strips])


class ChangedCellsScreen(Screen[None]):
    """A screen that paints and sends only the cells that have changed."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._compositor = _Compositor()


class _Compositor(Compositor):
    """A compositor that finds the changed cells.

    Textual's own compositor paints all lines from the first change to the last change. In each painted line, Textual
    sends everything from the start of the widget to the change.
    """

    def __init__(self) -> None:
        super().__init__()
        # The columns at which a widget begins (cuts), as a list for each line. They are from the last update, and
        # change when widgets move.
        self._cuts_known: list[list[int]] = []
        # Maps (first column after a cut, line) to the widget that is visible there, and its region.
        self._in_front: dict[tuple[int, int], tuple[Widget, Region]] = {}

    def render_partial_update(self) -> ChangedCells | None:  # type: ignore[override]
        spans = list(self._regions_to_spans(self._dirty_regions))
        self._dirty_regions.clear()
        strips = list(self._strips(spans))
        return ChangedCells(strips) if strips else None

    def _strips(self, spans: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, Strip]]:
        """Yield (line, column, strip) for each changed span. The widget in front paints the strip.

        Between two `cuts`, the same widget is in front.
        """
        cuts = self.cuts
        if cuts is not self._cuts_known:
            self._cuts_known = cuts
            self._in_front.clear()
        for y, begin, end in spans:
            for start, stop in pairwise(cuts[y]) if 0 <= y < len(cuts) else ():
                first, last = max(start, begin), min(stop, end)
                if first < last:
                    found = self._in_front.get((start, y))
                    if found is None:
                        found = self._in_front[start, y] = self.get_widget_at(start, y)
                    widget, region = found
                    there = Region(first - region.x, y - region.y, last - first, 1)
                    yield y, first, widget.render_lines(there)[0]
