"""Compares a dozen screens with stored pictures, as SVG with colours. All other screens are tested as text only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from textual.pilot import Pilot

from cbtop.tui.app import CbtopApp
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed
from tests.cbtop.seen_states import states
from tests.cbtop.tui.views.test_states import Seen
from tests.representatives import first_by_default

pytestmark = pytest.mark.usefixtures("utc")


@first_by_default("key", ["1", "2", "3", "5"], ids=["overview", "bricks", "layers", "roofline"])
def test_a_screen_is_drawn_as_its_picture(key: str, snap_compare: Callable[..., bool]) -> None:
    app = CbtopApp(ScriptedFeed(samples.LIVE), interval_s=60)
    assert snap_compare(app, press=[key], terminal_size=(120, 34))


async def in_theme(name: str, pilot: Pilot[int]) -> None:
    pilot.app.theme = name
    await pilot.pause()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "key", "theme"),
    [
        ("live", "4", "cbtop-dark"),
        ("live", "6", "cbtop-dark"),
        ("live", "7", "cbtop-dark"),
        ("live", "8", "cbtop-dark"),
        ("stalled", "1", "cbtop-dark"),
        ("live", "1", "cbtop-light"),
        ("live", "2", "cbtop-dark-16"),
        ("live", "3", "cbtop-light-16"),
    ],
    ids=["timeline", "graph", "sources", "devices", "stalled", "light", "16-colours", "light-in-16-colours"],
)
def test_a_process_that_is_not_well_is_drawn_as_its_picture(
    state: str, key: str, theme: str, snap_compare: Callable[..., bool]
) -> None:
    source = states()[state]
    assert source is not None
    app = CbtopApp(Seen(source), interval_s=60)
    assert snap_compare(app, press=[key], terminal_size=(120, 34), run_before=partial(in_theme, theme))
