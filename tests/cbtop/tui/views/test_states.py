"""Compares each view in each state of a process, at each size, with stored text of the screen (goldens)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cbtop.tui.app import CbtopApp
from cbtop.tui.views import VIEWS
from cbtop.viewmodels.source import SourceView
from tests.cbtop.conftest import ScriptedFeed, screen_text
from tests.cbtop.seen_states import states

SIZES = [(80, 24), *(pytest.param(size, marks=pytest.mark.slow) for size in ((120, 40), (200, 60)))]
KEYS = {"paused": ("space",)}


pytestmark = pytest.mark.usefixtures("utc")


class Seen(ScriptedFeed):
    """A feed with a single view, which never changes."""

    def view(self, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        return self.seen[0] if self.seen else None

    def merged(self, mode: object, key: str | None, phase: str | None, *, window: bool) -> SourceView | None:
        return self.view(key, phase, window=window)


async def of_each_view(source: SourceView | None, size: tuple[int, int], keys: tuple[str, ...]) -> list[str]:
    app = CbtopApp(Seen(*([source] if source else [])), interval_s=60)
    async with app.run_test(size=size) as pilot:
        await pilot.press(*keys)
        texts = []
        for number in range(1, len(VIEWS) + 1):
            await pilot.press(str(number))
            await pilot.pause()
            texts.append(screen_text(app))
        return texts


def unlike(text: str, other: str) -> str:
    """Return the lines of `text` that differ from `other`. A count replaces each group of equal lines."""
    lines, others = text.splitlines(), other.splitlines()
    if lines == others:
        return "as before\n"
    shown: list[str] = []
    for at, line in enumerate(lines):
        if at < len(others) and line == others[at] and line:
            if shown and shown[-1].startswith("as before: "):
                first = shown[-1].split()[2].partition("-")[0]
                shown[-1] = f"as before: {first}-{at + 1}"
            else:
                shown.append(f"as before: {at + 1}")
        else:
            shown.append(line)
    return "\n".join(shown) + "\n"


@pytest.mark.parametrize("size", SIZES, ids="{0[0]}x{0[1]}".format)
async def test_every_view_looks_like_its_golden_in_every_state(
    size: tuple[int, int], golden: Callable[[str, str], None]
) -> None:
    drawn = {name: await of_each_view(source, size, KEYS.get(name, ())) for name, source in states().items()}
    for index, view in enumerate(VIEWS):
        first = drawn["live"][index]
        parts = [
            f"== {name}\n{text if name == 'live' else unlike(text, first)}"
            for name, texts in drawn.items()
            for text in [texts[index]]
        ]
        golden(f"states-{view.title.lower()}-{size[0]}x{size[1]}", "\n".join(parts))
