"""The command palette. It lists the keys that work in the current view, by their descriptions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from textual.binding import Binding
from textual.command import DiscoveryHit, Hit, Hits, Provider

from cbtop.tui.widgets.footer import shown_key


class KeysByName(Provider):
    """Provides the entries of the palette. Choosing an entry has the effect of pressing its key."""

    async def discover(self) -> Hits:
        for binding in self._bindings():
            yield DiscoveryHit(_text(binding), partial(self.app.simulate_key, binding.key))

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for binding in self._bindings():
            if (score := matcher.match(_text(binding))) > 0:
                press = partial(self.app.simulate_key, binding.key)
                yield Hit(score, matcher.highlight(_text(binding)), press)

    def _bindings(self) -> Iterator[Binding]:
        """Yield one key binding for each action, those of the focused widget first.

        Actions that only the open palette disables are included. Textual's own are left out.
        """
        told: set[str] = set()
        for active in self.screen.active_bindings.values():
            if active.node is not self.screen and active.binding.action not in (*told, "command_palette"):
                told.add(active.binding.action)
                yield active.binding


def _text(binding: Binding) -> str:
    return f"{binding.description}  {shown_key(binding)}"
