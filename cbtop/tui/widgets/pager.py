"""A long text one can scroll through."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import MouseScrollDown, MouseScrollUp

from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import Line

_WHEEL_LINES = 3


class Pager(Drawing, can_focus=True):
    """Lines that need no more than their own width; `text` is asked for them whenever the width changes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "scroll(1)", "scroll"),
        Binding("k,up", "scroll(-1)", "up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("g,home", "to_top", "top", show=False),
        Binding("G,end", "to_end", "end", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.top = 0
        self._length = 0

    @abstractmethod
    def text(self, width: int) -> Sequence[Line]:
        """All lines, for `width` cells."""

    def draw(self, width: int, height: int) -> list[Line]:
        lines = self.text(width)
        self._length = len(lines)
        self.top = max(0, min(self.top, self._length - height))
        return list(lines[self.top : self.top + height])

    def action_scroll(self, lines: int) -> None:
        self.top += lines
        self.redraw()

    def action_page(self, pages: int) -> None:
        self.action_scroll(pages * max(1, self.size.height - 1))

    def action_to_top(self) -> None:
        self.action_scroll(-self.top)

    def action_to_end(self) -> None:
        self.action_scroll(self._length)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        self.action_scroll(_WHEEL_LINES)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        self.action_scroll(-_WHEEL_LINES)
