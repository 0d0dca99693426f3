"""The look of categories and states: a colour role, and a glyph with the same meaning for screens without colour."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.protocol.vocabulary import BrickCategory
from cbtop.tui.widgets.lines import Line


@dataclass(frozen=True, slots=True)
class CategoryLook:
    """The look of a category. `role` colours text, `fill` colours bars, and `glyph` precedes the name."""

    role: str
    fill: str
    glyph: str


CATEGORY_LOOKS = {
    BrickCategory.NORM: CategoryLook("norm", "fill-norm", "◆"),
    BrickCategory.ATTENTION: CategoryLook("attention", "fill-attention", "●"),
    BrickCategory.FFN: CategoryLook("ffn", "fill-ffn", "■"),
    BrickCategory.OTHER: CategoryLook("other", "fill-other", "▲"),
    BrickCategory.COMMUNICATION: CategoryLook("communication", "fill-communication", "⇄"),
}

_BADGES = {
    "waiting": ("◌ WAITING", "badge-calm"),
    "live": ("● LIVE", "badge-live"),
    "idle": ("○ IDLE", "badge-calm"),
    "quiet": ("◌ QUIET", "badge-warn"),
    "suspended": ("‖ SUSPENDED", "badge-warn"),
    "stalled": ("✗ STALLED", "badge-bad"),
    "stale": ("◌ STALE", "badge-warn"),
    "replay": ("▶ REPLAY", "badge-calm"),
    "past": ("◂ PAST", "badge-warn"),
    "paused": ("‖ PAUSED", "badge-warn"),
    "ended": ("■ ENDED", "badge-calm"),
    "gone": ("✗ GONE", "badge-bad"),
    "faulty": ("! FAULTY", "badge-bad"),
}


def state_badge(state: str, age: str = "") -> Line:
    """Return a badge with the state of a process and the text `age`.

    A state that has no badge is written in capitals.
    """
    text, role = _BADGES.get(state, (state.upper(), "badge-warn"))
    return ((f" {text} {age} " if age else f" {text} ", role),)
