"""One line to look for something: what is looked for, and how much of it there is."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Input

from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import Line, fit


class Filter(Horizontal):
    """`/ att  3 of 16`. What is typed comes as the messages of its Input."""

    def __init__(self, placeholder: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._input = Input(placeholder=placeholder, compact=True)
        self._found = Found()

    def compose(self) -> ComposeResult:
        yield self._input
        yield self._found

    @property
    def is_open(self) -> bool:
        """Whether it gets the keys."""
        return self._input.has_focus

    def open(self) -> None:
        """Show it, and give it the keys: now, or what is typed meanwhile would be keys of the view."""
        self.display = True
        self.screen.set_focus(self._input)

    def hold(self, text: str) -> None:
        """Look for `text` without being asked, and leave the keys where they are."""
        self._input.value = text
        self.display = bool(text)

    def close(self) -> None:
        """Let go of what was looked for."""
        self._input.value = ""
        self.display = False

    def show_found(self, found: str) -> None:
        """Say how much is found, behind what is looked for."""
        self._found.show(f"{found}  ⏎ keeps  n N  esc clears")


class Found(Drawing):
    """At the end of the line."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def show(self, text: str) -> None:
        self._text = text
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        return [((fit(self._text, width, "right"), "accent"),)]
