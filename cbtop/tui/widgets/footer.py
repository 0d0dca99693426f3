"""The footer of the screen. It shows the keys that work in the current view, taken from the key bindings."""

# Differences from Textual's Footer
# - Textual's Footer makes a widget for each key whenever the focus moves. This one is a single line, and takes 0.16x
#   of its CPU time (8 ms a change, 2 shared cores, Textual 8.2.8; `python -m benchmarks widgets`).
# - On a narrow terminal, this one drops keys: first the general ones except help and quit, then the view's last ones.
#   Textual's Footer scrolls.
# - With room left, it also shows hidden bindings with a tooltip. A click on a key is like pressing it.

from __future__ import annotations

from collections.abc import Sequence

from textual.binding import ActiveBinding, Binding
from textual.events import Click
from textual.screen import Screen

from cbtop.tui.widgets.drawing import Drawing
from cbtop.tui.widgets.lines import Line, both_ends, join, width_of

_KEY_NAMES = {
    "space": "␣",
    "question_mark": "?",
    "slash": "/",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "left_curly_bracket": "{",
    "right_curly_bracket": "}",
    "left_parenthesis": "(",
    "right_parenthesis": ")",
    "plus": "+",
    "minus": "-",
    "equals_sign": "=",
    "comma": ",",
    "full_stop": ".",
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
    """Return the short name of a key. For example, `ctrl+c` becomes `^c`."""
    if key in _KEY_NAMES:
        return _KEY_NAMES[key]
    return key.replace("ctrl+", "^").replace("shift+", "⇧")


def shown_key(binding: Binding) -> str:
    return binding.key_display or key_name(binding.key)


ALWAYS = 2  # The last two general keys, help and quit, are never dropped.
_GAP = 2


def fitting(
    here: Sequence[Binding], everywhere: Sequence[Binding], width: int
) -> tuple[Sequence[Binding], Sequence[Binding]]:
    """Return as many of the view's keys and of the general keys as fit into `width`."""

    def size(bindings: Sequence[Binding]) -> int:
        return sum(width_of(_item(binding)) + _GAP for binding in bindings)

    blanks = 1 if here else _GAP  # number of blanks at both ends of the footer and between the two groups of keys
    while len(everywhere) > ALWAYS and size(here) + size(everywhere) + blanks > width:
        everywhere = everywhere[1:]
    while here and size(here) + size(everywhere) + blanks > width:
        here = here[:-1]
    return here, everywhere


def footer_line(here: Sequence[Binding], everywhere: Sequence[Binding], width: int) -> Line:
    """Return a line with the view's keys on the left and the general keys on the right."""
    here, everywhere = fitting(here, everywhere, width)
    left, right = (join([_item(binding) for binding in bindings], " " * _GAP, "") for bindings in (here, everywhere))
    return both_ends(((" ", ""), *left), (*right, (" ", "")), width)


def key_at(here: Sequence[Binding], everywhere: Sequence[Binding], width: int, x: int) -> Binding | None:
    """Return the key at the cell `x` of a footer with `width` cells, or None."""
    here, everywhere = fitting(here, everywhere, width)
    right = width - 1 - width_of(join([_item(binding) for binding in everywhere], " " * _GAP, ""))
    for bindings, begin in ((here, 1), (everywhere, right)):
        for binding in bindings:
            end = begin + width_of(_item(binding))
            if begin <= x < end:
                return binding
            begin = end + _GAP
    return None


def _item(binding: Binding) -> Line:
    return ((shown_key(binding), "key"), (f" {binding.tooltip or binding.description}", "dim"))


class KeyFooter(Drawing):
    """One line with the keys of the current view. It is updated when the focus moves."""

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._bindings_changed)

    def _bindings_changed(self, _screen: Screen[object]) -> None:
        self.call_after_refresh(self.redraw)

    def draw(self, width: int, height: int) -> list[Line]:
        return [footer_line(*self._shown(), width)]

    def _shown(self) -> tuple[Sequence[Binding], Sequence[Binding]]:
        """Return the view's keys and the general keys for the footer.

        The first of the general keys are shown only if the footer has room for these keys.
        """
        here: dict[str, Binding] = {}
        everywhere: dict[str, Binding] = {}
        with_room: dict[str, Binding] = {}
        # While the help is open, keys of the app do not work, so leave them out.
        on_top = self.screen is not self.app.screen_stack[0]
        for active in self.screen.active_bindings.values():
            is_shown = active.binding.show or (active.binding.tooltip and _is_global(active))
            if is_shown and active.enabled and not (on_top and _is_global(active)):
                group = here if not _is_global(active) else everywhere if active.binding.show else with_room
                group.setdefault(active.binding.action, active.binding)
        return tuple(here.values()), (*with_room.values(), *everywhere.values())

    def on_click(self, event: Click) -> None:
        if (binding := key_at(*self._shown(), self.size.width, event.x)) is not None:
            self.app.simulate_key(binding.key)


def _is_global(active: ActiveBinding) -> bool:
    return active.node is active.node.app
