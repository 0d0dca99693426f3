"""The colour themes: dark and light, each with many and with 16 colours.

A theme defines every colour in cbtop.tcss. The contrast of text with its background is at least 3:1 (WCAG 2).
Categories of bricks are never red, because red means bad.
"""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="cbtop-dark",
    primary="#7fb7e8",
    background="#0e1217",
    surface="#0e1217",
    panel="#171d25",
    foreground="#c8d0da",
    success="#7fc98f",
    warning="#e3b95a",
    error="#ff6b6b",
    accent="#6cc5d0",
    dark=True,
    variables={
        "dim": "#7d8896",
        "faint": "#6a7584",
        "bright": "#eef2f6",
        "ink": "#0e1217",
        "cursor": "#1f2935",
        "track": "#1a212a",
        # These colours follow Okabe and Ito. People with any kind of colour vision can distinguish them.
        "norm": "#d38fb8",
        "attention": "#5fb4ea",
        "ffn": "#e8a33a",
        "other": "#3dbd95",
        "communication": "#e5dc5a",
        "gap": "#8793a3",
        "unknown": "#6f7a89",
    },
)

LIGHT = Theme(
    name="cbtop-light",
    primary="#1f5f99",
    background="#fafafa",
    surface="#fafafa",
    panel="#eceff2",
    foreground="#2a323c",
    success="#1d7a3a",
    warning="#9a6700",
    error="#c62828",
    accent="#0b7285",
    dark=False,
    variables={
        "dim": "#66717f",
        "faint": "#77818d",
        "bright": "#0b0f14",
        "ink": "#ffffff",
        "cursor": "#dde5ee",
        "track": "#e8ecf0",
        "norm": "#a3457d",
        "attention": "#0072b2",
        "ffn": "#b35c00",
        "other": "#00795a",
        "communication": "#6b6400",
        "gap": "#75808d",
        "unknown": "#77818d",
    },
)

# The 16 colours of a terminal. Rich maps each colour to the nearest of these, so a theme of exactly these does not
# change. Only one grey is readable on black, and one on white, so the roles faint and dim look the same.
_BLACK, _BROWN, _BLUE, _MAGENTA, _GREEN, _RED = "#000000", "#aa5500", "#0000aa", "#aa00aa", "#00aa00", "#aa0000"
_GREY, _DARK_GREY, _WHITE = "#aaaaaa", "#555555", "#ffffff"
_LIGHT_RED, _LIGHT_GREEN, _YELLOW = "#ff5555", "#55ff55", "#ffff55"
_LIGHT_MAGENTA, _LIGHT_CYAN = "#ff55ff", "#55ffff"

DARK_16 = Theme(
    name="cbtop-dark-16",
    primary=_LIGHT_CYAN,
    background=_BLACK,
    surface=_BLACK,
    panel=_BLACK,
    foreground=_WHITE,
    success=_LIGHT_GREEN,
    warning=_YELLOW,
    error=_LIGHT_RED,
    accent=_LIGHT_CYAN,
    dark=True,
    variables={
        "dim": _GREY,
        "faint": _GREY,
        "bright": _WHITE,
        "ink": _BLACK,
        "cursor": _BLUE,
        "track": _BLACK,
        "norm": _LIGHT_MAGENTA,
        "attention": _LIGHT_CYAN,
        "ffn": _YELLOW,
        "other": _LIGHT_GREEN,
        "communication": _WHITE,
        "gap": _GREY,
        "unknown": _GREY,
    },
)

LIGHT_16 = Theme(
    name="cbtop-light-16",
    primary=_BLUE,
    background=_WHITE,
    surface=_WHITE,
    panel=_WHITE,
    foreground=_BLACK,
    success=_GREEN,
    warning=_BROWN,
    error=_RED,
    accent=_BLUE,
    dark=False,
    variables={
        "dim": _DARK_GREY,
        "faint": _DARK_GREY,
        "bright": _BLACK,
        "ink": _WHITE,
        "cursor": _YELLOW,
        "track": _WHITE,
        "norm": _MAGENTA,
        "attention": _BLUE,
        "ffn": _BROWN,
        "other": _BLACK,
        "communication": _GREEN,
        "gap": _DARK_GREY,
        "unknown": _DARK_GREY,
    },
)

THEMES = (DARK, LIGHT, DARK_16, LIGHT_16)


def theme_for(color_system: str | None, *, is_light: bool) -> Theme:
    """Return the theme for Rich's `color_system`. The system `standard` has 16 colours."""
    if color_system == "standard":
        return LIGHT_16 if is_light else DARK_16
    return LIGHT if is_light else DARK
