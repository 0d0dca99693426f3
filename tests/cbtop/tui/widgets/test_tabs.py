"""Tests of the line of tabs: all tabs fit, and a note fits, too, if space is reserved for it."""

from __future__ import annotations

import pytest

from cbtop.tui.widgets.lines import plain
from cbtop.tui.widgets.tabs import TabBar

TITLES = ("Overview", "Bricks", "Layers", "Roofline", "Graph", "Sources", "Devices", "Output")
NOTE = "python has ended with exit code 3"


@pytest.mark.parametrize("width", [80, 90, 100, 110, 120, 130, 200])
def test_a_note_that_is_kept_is_whole_and_every_tab_has_its_number(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bar = TabBar(TITLES, active=2)
    monkeypatch.setattr(TabBar, "redraw", lambda _: None)
    bar.set_note(((NOTE, "dim"),), keep=True)
    (line,) = bar.draw(width, 1)
    assert plain(line).rstrip().endswith(NOTE)
    assert len(plain(line)) == width
    assert all(str(number) in plain(line) for number in range(1, 9))
