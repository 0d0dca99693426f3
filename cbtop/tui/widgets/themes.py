"""The two themes, dark and light: every colour that cbtop.tcss names."""

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
        "faint": "#3b4552",
        "bright": "#eef2f6",
        "ink": "#0e1217",
        "cursor": "#1f2935",
        "track": "#1a212a",
        # After Okabe and Ito: told apart with any kind of colour vision.
        "norm": "#d38fb8",
        "attention": "#5fb4ea",
        "ffn": "#e8a33a",
        "other": "#3dbd95",
        "communication": "#e5dc5a",
        "gap": "#8793a3",
        "unknown": "#5a6675",
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
        "faint": "#c3cad3",
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
        "unknown": "#9aa4b0",
    },
)
