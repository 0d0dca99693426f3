"""A row of tabs on one line, with room for a note at its right end."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from textual.events import Click
from textual.message import Message

from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import Line, Span, both_ends, width_of

NOTE_GAP = 3  # cells between the tabs and the note, and behind it


class TabBar(Drawing):
    """Numbered tabs; a click on one asks for it."""

    class Chosen(Message):
        """Somebody wants the tab `index`."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self, titles: Sequence[str], *, active: int = 0, id: str | None = None) -> None:
        super().__init__(id=id)
        self.titles = tuple(titles)
        self.active = active
        self.note: Line = ()

    def set_active(self, index: int) -> None:
        self.active = index
        self.redraw()

    def set_note(self, note: Line) -> None:
        """What stands at the right end."""
        self.note = note
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        left: list[Span] = []
        for index, label in enumerate(self._labels(width)):
            left.append((label, "tab-on" if index == self.active else "tab-off"))
        return [both_ends(tuple(left), (*self.note, (" ", "")), width)]

    def _labels(self, width: int) -> list[str]:
        """Close together where the note needs the room."""
        labels = [f" {number} {title} " for number, title in enumerate(self.titles, 1)]
        is_roomy = sum(map(cell_len, labels)) + width_of(self.note) + NOTE_GAP <= width
        return labels if is_roomy else [label[:-1] for label in labels]

    def on_click(self, event: Click) -> None:
        start = 0
        for index, label in enumerate(self._labels(self.size.width)):
            end = start + cell_len(label)
            if start <= event.x < end:
                self.post_message(self.Chosen(index))
            start = end
