"""Tests of the line of tabs: all tabs have readable names, and a note is cut to what they leave."""

from __future__ import annotations

import pytest

from cbtop.tui.widgets.lines import plain
from cbtop.tui.widgets.tabs import TabBar

TITLES = ("Overview", "Bricks", "Layers", "Timeline", "Roofline", "Graph", "Sources", "Devices", "Output")
NOTE = "every 0.5 s · read here"


@pytest.mark.parametrize("width", [80, 90, 100, 110, 120, 130, 200])
def test_every_tab_has_a_readable_name_beside_a_note(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = TabBar(TITLES, active=2)
    monkeypatch.setattr(TabBar, "redraw", lambda _: None)
    bar.set_note(((NOTE, "dim"),))
    (line,) = bar.draw(width, 1)
    assert len(plain(line)) == width
    assert all(f"{number} {title[:5]}" in plain(line) for number, title in enumerate(TITLES, 1))
    assert (NOTE in plain(line)) == (width >= 130)
