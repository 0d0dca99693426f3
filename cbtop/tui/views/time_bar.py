"""A bar that shows the position of the screen in a recording, with signs for notable events."""

from __future__ import annotations

from itertools import groupby

from textual.events import Click
from textual.message import Message

from cbtop.text import time_text
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import BLANK, Line, Span, width_of
from cbtop.viewmodels.time_travel import Mark, TimeView

_SIGNS: dict[Mark, Span] = {
    Mark.STALLED: ("✗", "bad strong"),
    Mark.VERDICT: ("▲", "warn strong"),
    Mark.ENDED: ("■", "dim"),
    Mark.STARTED: ("▸", "dim"),
    Mark.PHASE: ("│", "dim"),
}
_URGENCY = list(Mark)
_MIN_LEGEND = 60  # A bar of at least this width in cells has a legend.
_HOW = " [ looks back "


class TimeBar(Drawing):
    """A line that represents a recording from its beginning to its end. Each known event has a sign."""

    class TimeChosen(Message):
        """Sent when the user wants to go to a position in the recording. `share` is 0 at the beginning and 1 at the
        end.
        """

        def __init__(self, share: float) -> None:
            super().__init__()
            self.share = share

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._time: TimeView | None = None

    def show_time(self, found: TimeView | None) -> None:
        """Show the position `found` of the screen in the recording.

        If `found` is None, the screen is live, so hide the bar.
        """
        self._time = found
        self.display = found is not None
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if self._time is None:
            return [BLANK]
        before, after = self._ends(self._time, width)
        inner = width - width_of(before) - width_of(after)
        return [(*before, *bar_of(self._time, inner), *after)] if inner > 0 else [BLANK]

    def _ends(self, found: TimeView, width: int) -> tuple[Line, Line]:
        """Return the texts at both ends of the time bar: the position on the left, and the length and a legend on the
        right.

        The legend has the most urgent signs. It takes at most half of the width.
        """
        length = time_text.position(found.duration_s)
        before: Line = ((f" {time_text.position(found.at_s):>{len(length)}} ", "strong"),)
        after: Line = ((f" {length} ", "dim"),)
        if width < _MIN_LEGEND:
            return before, after
        for mark in sorted(set(found.marks.values()), key=_URGENCY.index, reverse=True):
            more: Line = (_SIGNS[mark], (f" {mark} ", "dim"))
            if width_of(after) + width_of(more) <= width // 2:
                after += more
        if found.is_now and width_of(after) + len(_HOW) <= width // 2:
            after += ((_HOW, "dim"),)
        return before, after

    def on_click(self, event: Click) -> None:
        if self._time is None:
            return
        before, after = self._ends(self._time, self.size.width)
        first, last = width_of(before), self.size.width - width_of(after) - 1
        if first <= event.x <= last:
            self.post_message(self.TimeChosen((event.x - first) / max(1, last - first)))


def bar_of(found: TimeView, width: int) -> Line:
    """Return the time bar in `width` cells.

    A cell shows the most urgent sign of its events. A cell without events shows whether it is before or after the
    position. A double line marks the chosen time range.
    """

    def cell_of(at_s: float) -> int:
        return round(min(1.0, at_s / found.duration_s) * (width - 1)) if found.duration_s else 0

    here = cell_of(found.at_s)
    first, last = map(cell_of, found.chosen_s) if found.chosen_s else (width, width)
    mark_of_cell: dict[int, Mark] = {}
    for second, mark in found.marks.items():
        cell = cell_of(second)
        mark_of_cell[cell] = max(mark, mark_of_cell.get(cell, mark), key=_URGENCY.index)
    cells: list[Span] = [
        ("●", _SIGNS[mark_of_cell[cell]][1] if cell in mark_of_cell else "accent strong")
        if cell == here
        else _SIGNS[mark_of_cell[cell]]
        if cell in mark_of_cell
        else ("═", "accent strong")
        if first <= cell <= last
        else ("━", "accent")
        if cell < here
        else ("─", "faint")
        for cell in range(width)
    ]
    return tuple(("".join(text for text, _ in run), role) for role, run in groupby(cells, lambda cell: cell[1]))
