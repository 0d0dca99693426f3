"""The command palette. It lists the keys of the current view, then those of other views, each with a description."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from textual.binding import Binding
from textual.command import DiscoveryHit, Hit, Hits, Provider

from cbtop.tui.widgets.footer import shown_key

if TYPE_CHECKING:
    from cbtop.tui.views.base import View


class HasViews(Protocol):
    """The part of the app that the palette needs. The app imports this module, so it is described here."""

    SHOWN: tuple[type[View], ...]

    def press_in_view(self, index: int, key: str) -> None: ...


class KeysByName(Provider):
    """Provides the entries of the palette. Choosing an entry has the effect of pressing its keys."""

    async def discover(self) -> Hits:
        for text, press in self._entries():
            yield DiscoveryHit(text, press)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for text, press in self._entries():
            if (score := matcher.match(text)) > 0:
                yield Hit(score, matcher.highlight(text), press)

    def _entries(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield the text and the effect of each entry: the keys that work here, then the keys of the other views."""
        here = list(self._bindings())
        for binding in here:
            yield f"{binding.description}  {shown_key(binding)}", partial(self.app.simulate_key, binding.key)
        app = cast("HasViews", self.app)
        told = {binding.action for binding in here}
        for index, view in enumerate(app.SHOWN):
            for binding in Binding.make_bindings(view.BINDINGS):
                if binding.action not in told:
                    told.add(binding.action)
                    text = f"{binding.description}, in {view.title}  {index + 1} {shown_key(binding)}"
                    yield text, partial(app.press_in_view, index, binding.key)

    def _bindings(self) -> Iterator[Binding]:
        """Yield one key binding for each action, first for the focused widget.

        Actions that only the open palette disables are included. Textual's own are left out.
        """
        told: set[str] = set()
        for active in self.screen.active_bindings.values():
            if active.node is not self.screen and active.binding.action not in (*told, "command_palette"):
                told.add(active.binding.action)
                yield active.binding
