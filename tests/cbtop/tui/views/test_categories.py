"""The view of categories, beside what its pictures show."""

from __future__ import annotations

from dataclasses import replace

from cbtop.protocol.vocabulary import BrickCategory
from cbtop.tui.views.categories import _category_lines
from cbtop.tui.widgets.lines import plain
from tests.cbtop import samples


def test_the_longest_name_of_a_category_is_shown_whole() -> None:
    (first, *others) = samples.LIVE.categories
    waits = replace(first, name=BrickCategory.COMMUNICATION.display_name, category=BrickCategory.COMMUNICATION)
    view = replace(samples.LIVE, categories=(*others, waits))
    lines = [plain(line) for line in _category_lines(view, 80, details=False, air=False)]
    assert any(line.startswith(" ⇄ Communication ") for line in lines)
