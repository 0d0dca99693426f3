"""Tests of updates of the terminal: the terminal receives only the changed cells, at the right positions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Console
from textual.app import App, ComposeResult
from textual.geometry import Region
from textual.screen import Screen

from cbtop.tui.widgets.changed import ChangedCellsScreen
from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import Line

SHOWN = ("abcdefghij", "ABCDEFGHIJKLMN")  # text of two widgets, which are next to each other and two lines high
FRONT = "xyz"  # text of a third widget, which covers a part of both other widgets on the second line
FRONT_AT = 8
WIDTH = sum(map(len, SHOWN))
ON_SCREEN = ("".join(SHOWN), "".join(SHOWN)[:FRONT_AT] + FRONT + "".join(SHOWN)[FRONT_AT + len(FRONT) :])


class Letters(Drawing):
    def __init__(self, text: str, id: str) -> None:
        super().__init__(id=id)
        self._text = text

    def draw(self, width: int, height: int) -> list[Line]:
        return [((self._text, ""),)] * height


class ShowsLetters(App[None]):
    CSS = f"""
    Screen {{ layers: below front; layout: horizontal; }}
    Letters {{ layer: below; height: 2; }}
    #left {{ width: {len(SHOWN[0])}; }}
    #right {{ width: {len(SHOWN[1])}; }}
    #front {{ layer: front; width: {len(FRONT)}; height: 1; offset: {FRONT_AT} 1; }}
    """

    def get_default_screen(self) -> Screen[None]:
        return ChangedCellsScreen(id="_default")

    def compose(self) -> ComposeResult:
        yield Letters(SHOWN[0], "left")
        yield Letters(SHOWN[1], "right")
        yield Letters(FRONT, "front")

    def sent(self, *changed: Region) -> str:
        """Return the terminal output for a repaint of these regions, without colours."""
        compositor = self.screen._compositor
        compositor._dirty_regions = set(changed)
        update = compositor.render_partial_update()
        return re.sub(r"\x1b\[[\d;]*m", "", update.render_segments(Console())) if update else ""


def changes() -> Iterator[tuple[Region, ...]]:
    """Yield all pairs of a changed span in line 1 and a changed span in line 2. Some spans end outside the screen."""
    for begin in range(WIDTH):
        for end in range(begin + 1, WIDTH + 3):
            yield Region(begin, 0, end - begin, 1), Region(WIDTH - begin - 1, 1, end - begin, 2)


async def test_what_has_changed_is_sent_to_its_place_and_no_more() -> None:
    app = ShowsLetters()
    async with app.run_test(size=(WIDTH, 2)):
        for changed in changes():
            screen = [["."] * WIDTH for _ in ON_SCREEN]
            for line, column, text in re.findall(r"\x1b\[(\d+);(\d+)H([A-Za-z]*)", app.sent(*changed)):
                begin = int(column) - 1
                screen[int(line) - 1][begin : begin + len(text)] = text
            for got, whole, region in zip(screen, ON_SCREEN, changed, strict=True):
                wanted = [one if region.x <= at < region.right else "." for at, one in enumerate(whole)]
                assert got == wanted, changed


async def test_one_figure_in_a_row_takes_its_own_bytes_alone() -> None:
    app = ShowsLetters()
    async with app.run_test(size=(WIDTH, 2)):
        assert app.sent(Region(4, 0, 2, 1), Region(11, 1, 1, 1)) == "\x1b[1;5Hef\x1b[2;12HB"
        assert app.sent(Region(8, 1, 2, 1)) == "\x1b[2;9Hxy"
        assert app.sent() == ""
