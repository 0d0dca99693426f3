"""Tests that a screen computes only the parts of a view that it shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from functools import partial
from typing import Any

import pytest

from cbtop.tui.app import CbtopApp
from cbtop.tui.views import VIEWS
from cbtop.viewmodels.on_demand import Lazy, LazyValue, with_parts
from cbtop.viewmodels.source import SourceView
from tests.cbtop import samples
from tests.cbtop.conftest import ScriptedFeed

PARTS = sorted(name for name, part in vars(SourceView).items() if isinstance(part, Lazy))
# For each view, the parts of a process that it reads. The header of the screen reads some more.
READ = {
    "Overview": {
        "baseline",
        "bricks",
        "categories",
        "layer_times",
        "listed",
        "outside",
        "sampled",
        "serving",
        "step_us_history",
        "training",
        "verdicts",
        "withheld",
    },
    "Bricks": {"baseline", "bricks", "categories", "counters", "kernels", "layer_times", "outside", "training"},
    "Layers": {"baseline", "layer_times"},
    "Timeline": {"timeline"},
    "Roofline": {"baseline", "roofline"},
    "Graph": {"baseline", "bricks", "critical_path", "graph", "layer_times"},
    "Sources": {"listed"},
    "Devices": set(),
}


class CountedFeed(ScriptedFeed):
    """A feed that counts which parts of a view are computed."""

    def __init__(self) -> None:
        super().__init__(samples.LIVE)
        self.made: Counter[str] = Counter()

    def view(self, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        view = super().view(key, phase, window=window)
        assert view is not None

        def make(name: str, value: Any) -> Any:
            self.made[name] += 1
            return value

        return with_parts(view, **{name: LazyValue(partial(make, name, getattr(view, name))) for name in PARTS})


async def test_a_part_that_the_shown_view_does_not_show_is_not_made() -> None:
    feed = CountedFeed()
    app = CbtopApp(feed, interval_s=3600)
    async with app.run_test(size=(120, 40)) as pilot:
        for number, view in enumerate(VIEWS, 1):
            await pilot.press(str(number))
            await pilot.pause()
            feed.made.clear()
            app.tick()
            await pilot.pause()
            assert dict(feed.made) == dict.fromkeys(READ[view.title], 1), view.title


@pytest.mark.slow
async def test_a_screen_that_is_paused_holds_all_of_its_moment() -> None:
    feed = CountedFeed()
    app = CbtopApp(feed, interval_s=3600)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("space")
        await pilot.pause()
        assert set(feed.made) == set(PARTS)
        feed.made.clear()
        for key in "12345678":
            await pilot.press(key)
        assert not feed.made


def test_every_view_is_in_the_table_and_every_part_of_a_source_is_a_field() -> None:
    assert set(READ) == {view.title for view in VIEWS}
    assert set(PARTS) <= {field.name for field in fields(SourceView)}
