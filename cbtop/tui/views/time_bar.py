"""Where in a recording the screen is, and what stands out there."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from textual.events import Click
from textual.message import Message

from cbtop import formatting
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import BLANK, Line, Span, width_of
from cbtop.viewmodels.model import Mark, ReplayView

_SIGNS: dict[Mark, Span] = {Mark.STALLED: ("✗", "bad strong"), Mark.ENDED: ("■", "dim")}
_MIN_LEGEND = 60  # cells: below it there is no room to say what the signs mean


class TimeBar(Drawing):
    """One line: from the beginning to the end, and the signs of what was found on the way so far."""

    class Chosen(Message):
        """Somebody wants to be at `share` of the whole: 0 is the beginning, 1 the end."""

        def __init__(self, share: float) -> None:
            super().__init__()
            self.share = share

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._replay: ReplayView | None = None
        self._marks: Mapping[int, Mark] = {}
        self._chosen_s: tuple[float, float] | None = None

    def show_replay(
        self, replay: ReplayView, marks: Mapping[int, Mark], chosen_s: tuple[float, float] | None = None
    ) -> None:
        """`marks`: by second what was found there; `chosen_s`: the ends of a range, in seconds from the beginning."""
        self._replay, self._marks, self._chosen_s = replay, marks, chosen_s
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if self._replay is None:
            return [BLANK]
        before, after = self._ends(self._replay, width)
        inner = width - width_of(before) - width_of(after)
        return (
            [(*before, *bar_of(self._replay, self._marks, inner, self._chosen_s), *after)] if inner > 0 else [BLANK]
        )

    def _ends(self, replay: ReplayView, width: int) -> tuple[Line, Line]:
        length = formatting.position(replay.duration_s)
        before: Line = ((f" {formatting.position(replay.at_s):>{len(length)}} ", "strong"),)
        after: Line = ((f" {length} ", "dim"),)
        if width >= _MIN_LEGEND:
            for mark in sorted(set(self._marks.values())):
                after += (_SIGNS[mark], (f" {mark} ", "dim"))
        return before, after

    def on_click(self, event: Click) -> None:
        if self._replay is None:
            return
        before, after = self._ends(self._replay, self.size.width)
        first, last = width_of(before), self.size.width - width_of(after) - 1
        if first <= event.x <= last:
            self.post_message(self.Chosen((event.x - first) / max(1, last - first)))


def bar_of(
    replay: ReplayView, marks: Mapping[int, Mark], width: int, chosen_s: tuple[float, float] | None = None
) -> Line:
    """The way in `width` cells: what is behind, where it is, and the signs, of several in a cell the most urgent.

    What lies in the range `chosen_s` is doubled.
    """

    def cell_of(at_s: float) -> int:
        return round(min(1.0, at_s / replay.duration_s) * (width - 1)) if replay.duration_s else 0

    here = cell_of(replay.at_s)
    first, last = map(cell_of, chosen_s) if chosen_s else (width, width)
    signs: dict[int, Mark] = {}
    for second, mark in marks.items():
        cell = cell_of(second)
        if signs.get(cell) is not Mark.STALLED:
            signs[cell] = mark
    cells: list[Span] = [
        ("●", _SIGNS[signs[cell]][1] if cell in signs else "accent strong")
        if cell == here
        else _SIGNS[signs[cell]]
        if cell in signs
        else ("═", "accent strong")
        if first <= cell <= last
        else ("━", "accent")
        if cell < here
        else ("─", "faint")
        for cell in range(width)
    ]
    return tuple(("".join(text for text, _ in run), role) for role, run in groupby(cells, lambda cell: cell[1]))
