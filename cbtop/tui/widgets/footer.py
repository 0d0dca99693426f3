"""The keys that do something here and now, taken from the bindings themselves."""

# Ours, not Textual's Footer: that one makes a widget of each key, anew whenever the focus moves; ours is one line and
# takes 0.16x of its CPU time (8 ms a change, 2 shared cores, Textual 8.2.8; `python -m benchmarks widgets`). On a
# narrow terminal it gives up the keys of this place before those that work everywhere; Textual's are scrolled away.

from __future__ import annotations

from collections.abc import Iterable

from textual.binding import ActiveBinding, Binding
from textual.screen import Screen

from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import Line, both_ends, join, join_fitting, width_of

_KEY_NAMES = {
    "space": "␣",
    "question_mark": "?",
    "slash": "/",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "plus": "+",
    "minus": "-",
    "equals_sign": "=",
    "enter": "⏎",
    "escape": "esc",
    "pagedown": "pgdn",
    "pageup": "pgup",
    "up": "↑",
    "down": "↓",
    "left": "←",
    "right": "→",
}


def key_name(key: str) -> str:
    """A key as a keyboard shows it: `ctrl+c` is `^c`."""
    if key in _KEY_NAMES:
        return _KEY_NAMES[key]
    return key.replace("ctrl+", "^").replace("shift+", "⇧")


def shown_key(binding: Binding) -> str:
    return binding.key_display or key_name(binding.key)


def footer_line(here: Iterable[Binding], everywhere: Iterable[Binding], width: int) -> Line:
    """The keys of this place on the left as far as they fit, those that work everywhere on the right."""
    right = join(([_item(binding) for binding in everywhere]), "  ", "")
    free = max(0, width - width_of(right) - 3)
    left = join_fitting([_item(binding) for binding in here], free, "  ")
    return both_ends(((" ", ""), *left), (*right, (" ", "")), width)


def _item(binding: Binding) -> Line:
    return ((shown_key(binding), "key"), (f" {binding.description}", "dim"))


class KeyFooter(Drawing):
    """One line of keys; it follows the focus."""

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._bindings_changed)

    def _bindings_changed(self, _screen: Screen[object]) -> None:
        self.call_after_refresh(self.redraw)

    def draw(self, width: int, height: int) -> list[Line]:
        here: dict[str, Binding] = {}
        everywhere: dict[str, Binding] = {}
        for active in self.screen.active_bindings.values():
            if active.binding.show and active.enabled:
                group = everywhere if _is_global(active) else here
                group.setdefault(active.binding.action, active.binding)
        return [footer_line(here.values(), everywhere.values(), width)]


def _is_global(active: ActiveBinding) -> bool:
    return active.node is active.node.app
