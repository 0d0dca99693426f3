"""A row of tabs on one line, with an optional note at its right end."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from textual.events import Click
from textual.message import Message

from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import Line, Span, both_ends


class TabBar(Drawing):
    """Numbered tabs at the top of the screen. A click on a tab requests its view."""

    class Chosen(Message):
        """Sent when the user wants the tab with this index."""

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
        """Set the note at the right end of the tabs. It is cut if the tabs leave too little room."""
        self.note = note
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        left: list[Span] = []
        for index, label in enumerate(self._labels(width)):
            left.append((label, "tab-on" if index == self.active else "tab-off"))
        return [both_ends(tuple(left), (*self.note, (" ", "")), width)]

    def _labels(self, width: int) -> list[str]:
        """Return the labels of the tabs in at most `width` cells.

        If there is too little room, all labels except the active one are shortened.
        """
        wide = [f" {number} {title} " for number, title in enumerate(self.titles, 1)]
        found, letters = wide, max(map(len, self.titles))
        while sum(map(cell_len, found)) > width and letters >= 0:
            names = [title if at == self.active else title[:letters] for at, title in enumerate(self.titles)]
            found, letters = (
                [f"{number} {name} ".replace("  ", " ") for number, name in enumerate(names, 1)],
                letters - 1,
            )
        return found

    def on_click(self, event: Click) -> None:
        start = 0
        for index, label in enumerate(self._labels(self.size.width)):
            end = start + cell_len(label)
            if start <= event.x < end:
                self.post_message(self.Chosen(index))
            start = end
