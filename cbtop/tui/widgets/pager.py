"""A page of text that the user can scroll, with Textual's scrolling and the keys of lists."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.geometry import Size

from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import Line


class Pager(VerticalScroll, can_focus=True, inherit_bindings=False):
    """The container that scrolls a page of text."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "scroll_down", "scroll"),
        Binding("k,up", "scroll_up", "up", show=False),
        Binding("pagedown", "page_down", "page down", show=False),
        Binding("pageup", "page_up", "page up", show=False),
        Binding("g,home", "scroll_home", "top", show=False),
        Binding("G,end", "scroll_end", "end", show=False),
    ]


class Page(Drawing):
    """A page of text lines. No line is wider than the page."""

    @abstractmethod
    def text(self, width: int) -> Sequence[Line]:
        """Return all lines of a page with `width` cells."""

    def draw(self, width: int, height: int) -> list[Line]:
        return list(self.text(width))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.text(width))
