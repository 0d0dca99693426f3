"""The parts of a step that were timed elsewhere, and the data of a step that waits for such parts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from cbtop.profiler.scopes import Scopes
from cbtop.protocol.ring import NO_NODE

if TYPE_CHECKING:
    from cbtop.profiler.hot_path import Scope


class AlikeParts:
    """The keys of the parts of similar steps. `keys` holds, for each part, its keys from the step down.

    The scopes of the parts are looked up once per name of a step.
    """

    __slots__ = ("_known", "keys")

    def __init__(self, keys: Sequence[tuple[Hashable, ...]]) -> None:
        self.keys = keys
        self._known: dict[int, tuple[Scope, list[Scope]]] = {}

    def scopes_in(self, step: Scope, scopes: Scopes) -> list[Scope]:
        """Return the scope of each part inside `step`. Scopes that do not exist are defined."""
        known = self._known.get(id(step))
        if known is not None and known[0] is step:
            return known[1]
        found = [scope_of(step, keys, scopes) for keys in self.keys]
        if step.node != NO_NODE:  # without a node each step has a new scope, and the number of scopes has no bound
            self._known[id(step)] = step, found
        return found


def scope_of(scope: Scope, keys: tuple[Hashable, ...], scopes: Scopes) -> Scope:
    """Return the scope at `keys` below `scope`. Scopes that do not exist are defined."""
    for key in keys:
        scope = scope.children.get(key) or scopes.define(scope, key)
    return scope


Inside = tuple[Any, Any, int]  # the scope around a step, its position, and that position's lane


class Ended:
    """The data of a step that has ended and waits for its parts."""

    __slots__ = ("end", "flags", "inside", "outside", "scope", "start")

    def __init__(self, scope: Scope, start: Any, end: Any, flags: int, inside: Inside | None) -> None:
        self.scope = scope
        self.outside: Any = scope.parent  # the scope around the step, outside all steps
        self.start = start
        self.end = end
        self.flags = flags
        self.inside = inside
