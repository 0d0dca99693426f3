"""Keeps a step that has ended until the device has reported the times of the step's parts (layers and bricks).

Also finds the scopes of the parts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from cbtop.profiler.scopes import Scopes
from cbtop.protocol.ring import NO_NODE

if TYPE_CHECKING:
    from cbtop.profiler.hot_path import Scope


class AlikeParts:
    """Parts (layers and bricks) that are the same in many steps.

    The keys of a part lead from the step down to the part.

    The scopes of the parts are looked up once for each name of a step.
    """

    __slots__ = ("_known", "keys")

    def __init__(self, keys: Sequence[tuple[Hashable, ...]]) -> None:
        self.keys = keys
        self._known: dict[int, tuple[Scope, list[Scope]]] = {}

    def scopes_in(self, step: Scope, scopes: Scopes) -> list[Scope]:
        """Return the scope of each part inside `step`. If a scope does not exist yet, define it."""
        known = self._known.get(id(step))
        if known is not None and known[0] is step:
            return known[1]
        found = [scope_of(step, keys, scopes) for keys in self.keys]
        # Do not store the scopes of a step without a node, because it gets a new scope each time.
        if step.node != NO_NODE:
            self._known[id(step)] = step, found
        return found


def scope_of(scope: Scope, keys: tuple[Hashable, ...], scopes: Scopes) -> Scope:
    """Follow `keys` down from `scope` and return the last scope. Defines scopes that do not exist yet."""
    for key in keys:
        scope = scope.children.get(key) or scopes.define(scope, key)
    return scope


# If a step runs inside a call, this has three entries: the scope around the step, the position, and the lane of the
# position.
Inside = tuple[Any, Any, int]


class Ended:
    """The known data of a step that has ended and waits for its parts (layers and bricks)."""

    __slots__ = ("end", "flags", "inside", "outside", "scope", "start")

    def __init__(self, scope: Scope, start: Any, end: Any, flags: int, inside: Inside | None) -> None:
        self.scope = scope
        self.outside: Any = scope.parent  # this scope is the root of the graph
        self.start = start
        self.end = end
        self.flags = flags
        self.inside = inside
