"""A few screens as SVG, colours and all; the text goldens beside this file say the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cbtop.tui.app import CbtopApp
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed


@pytest.mark.parametrize("key", ["1", "2", "3", "5"], ids=["overview", "bricks", "layers", "roofline"])
def test_a_screen_is_drawn_as_its_picture(key: str, snap_compare: Callable[..., bool]) -> None:
    app = CbtopApp(ScriptedFeed(samples.LIVE), interval_s=60)
    assert snap_compare(app, press=[key], terminal_size=(120, 34))
