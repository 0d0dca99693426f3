"""Tests of all themes: each is readable and distinguishes categories, also in 16 colours and without colours."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from rich._palettes import STANDARD_PALETTE
from rich.color import Color, ColorSystem
from textual.theme import Theme

from cbtop.protocol.vocabulary import BrickCategory
from cbtop.tui import app
from cbtop.tui.background import luminance
from cbtop.tui.views.looks import CATEGORY_LOOKS
from cbtop.tui.widgets.bars import BarSegment, stacked
from cbtop.tui.widgets.lines import ROLES, plain, width_of
from cbtop.tui.widgets.themes import DARK, DARK_16, LIGHT, LIGHT_16, THEMES, theme_for

STYLES = Path(app.__file__).with_name("cbtop.tcss").read_text(encoding="utf-8")
READABLE = 3.0  # the contrast that WCAG 2 requires for large text and graphics
SIXTEEN = (DARK_16, LIGHT_16)


def colours(theme: Theme) -> dict[str, str]:
    """Return the colours of a theme by the names that cbtop.tcss uses."""
    named = {name: getattr(theme, name) for name in ("background", "panel", "foreground", "accent")}
    named |= {name: getattr(theme, name) for name in ("success", "warning", "error")}
    return {**named, **theme.variables}


def contrast(one: str, other: str) -> float:
    def of(colour: str) -> float:
        return luminance(*(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)))

    dark, light = sorted((of(one), of(other)))
    return (light + 0.05) / (dark + 0.05)


def looks() -> list[tuple[str, str | None, str | None]]:
    """Return all styles: the name of the style, of its colour, and of its background colour."""
    found = []
    for role in sorted(ROLES):
        (style,) = re.findall(rf"^\.{role} {{ (.*) }}$", STYLES, re.MULTILINE)
        said = dict(re.findall(r"(?<![\w-])(color|background): \$(\w+);", style))
        found.append((role, said.get("color"), said.get("background")))
    return found


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_every_role_has_three_to_one_contrast_with_what_is_behind_it(theme: Theme) -> None:
    named = colours(theme)
    poor = {
        (role, behind): round(found, 2)
        for role, colour, own in looks()
        if colour
        for behind in ([own] if own else ["background", "panel"])
        if (found := contrast(named[colour], named[behind])) < READABLE
    }
    assert poor == {}


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
@pytest.mark.parametrize("text", ["foreground", "dim", "faint", "bright", "unknown"])
def test_also_under_the_cursor_text_can_be_read(theme: Theme, text: str) -> None:
    named = colours(theme)
    assert contrast(named[text], named["cursor"]) >= READABLE


@pytest.mark.parametrize("theme", SIXTEEN, ids=lambda theme: theme.name)
def test_in_16_colours_every_colour_is_one_of_them_and_no_category_is_red(theme: Theme) -> None:
    named = colours(theme)
    numbers = {name: Color.parse(colour).downgrade(ColorSystem.STANDARD) for name, colour in named.items()}
    for name, shown in numbers.items():
        assert STANDARD_PALETTE[shown.number or 0].hex == named[name], name
    roles = [look.role for look in CATEGORY_LOOKS.values()]
    assert not {numbers[role].number for role in roles} & {1, 9}
    assert len({numbers[role].number for role in roles}) == len(BrickCategory)
    assert not {numbers[role].number for role in roles} & {numbers["error"].number, numbers["background"].number}


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
@pytest.mark.parametrize("system", [ColorSystem.TRUECOLOR, ColorSystem.EIGHT_BIT])
def test_neighbours_in_a_bar_have_colours_of_their_own(theme: Theme, system: ColorSystem) -> None:
    named = colours(theme)
    order = [*(CATEGORY_LOOKS[category].role for category in BrickCategory), "gap"]
    shown = [Color.parse(named[role]).downgrade(system).get_truecolor() for role in order]
    assert all(one != other for one, other in pairwise(shown))


@pytest.mark.parametrize("size", [4, 9, 40, 120])
def test_without_colour_a_line_separates_a_part_of_a_bar_from_the_one_before(size: int) -> None:
    parts = [
        BarSegment(40.0, "a", "one"),
        BarSegment(30.0, "b", "two"),
        BarSegment(20.0, "c", "gap", "▒"),
        BarSegment(10.0, "d", "x"),
    ]
    line = stacked(parts, size)
    assert width_of(line) == size
    assert all(text[0] in "▏▒" for text, _ in line[1:])
    assert line[0][0][0] == " "
    assert plain(stacked(parts, 40)).startswith(" one ")


def test_a_terminal_of_16_colours_gets_a_theme_of_them() -> None:
    assert [theme_for("standard", is_light=light) for light in (False, True)] == [DARK_16, LIGHT_16]
    for other in ("truecolor", "256", None):
        assert [theme_for(other, is_light=light) for light in (False, True)] == [DARK, LIGHT]
