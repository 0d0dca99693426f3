"""A search line at the foot of a list. It shows the searched text and the number of matches."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Input

from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import Line, fit


class Filter(Horizontal):
    """A search line, such as `/ att 3 of 16`. Typed text arrives as messages of its Input."""

    def __init__(self, placeholder: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._input = Input(placeholder=placeholder, compact=True)
        self._found = Found()

    def compose(self) -> ComposeResult:
        yield self._input
        yield self._found

    @property
    def is_open(self) -> bool:
        """Whether the search line has the keyboard focus."""
        return self._input.has_focus

    def open(self) -> None:
        """Show the search line and focus it at once. From then on, typed keys go to the search line and not to the
        view.
        """
        self.display = True
        self.screen.set_focus(self._input)

    def hold(self, text: str) -> None:
        """Set the filter to `text`. The keyboard focus does not move."""
        self._input.value = text
        self.display = bool(text)

    def close(self) -> None:
        """Clear the filter."""
        self._input.value = ""
        self.display = False

    def show_found(self, found: str) -> None:
        """Show the text `found` at the end of the search line. It has the number of matches."""
        self._found.show(f"{found}  ⏎ keeps  n N  esc clears")


class Found(Drawing):
    """The end of the search line. It shows the number of matches."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def show(self, text: str) -> None:
        self._text = text
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        return [((fit(self._text, width, "right"), "accent"),)]
