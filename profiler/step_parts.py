"""Keeps an ended step until the device has reported the times of its parts (layers and bricks). Also finds their
scopes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from cbtop.profiler.scopes import Scopes
from cbtop.protocol.ring import NO_NODE

if TYPE_CHECKING:
    from cbtop.profiler.hot_path import Scope


class AlikeParts:
    """Parts (layers and bricks) that are the same in many steps. Their scopes are looked up once for each name of a
    step.

    The keys of a part lead from the step down to it.
    """

    __slots__ = ("_known", "keys")

    def __init__(self, keys: Sequence[tuple[Hashable, ...]]) -> None:
        self.keys = keys
        self._known: dict[int, tuple[Scope, list[Scope]]] = {}

    def scopes_in(self, step: Scope, scopes: Scopes) -> list[Scope]:
        """Return the scope of each part inside `step`. New scopes are defined."""
        known = self._known.get(id(step))
        if known is not None and known[0] is step:
            return known[1]
        found = [scope_of(step, keys, scopes) for keys in self.keys]
        # A step without a node gets a new scope each time, so do not store its scopes.
        if step.node != NO_NODE:
            self._known[id(step)] = step, found
        return found


def scope_of(scope: Scope, keys: tuple[Hashable, ...], scopes: Scopes) -> Scope:
    """Return the scope that is reached from `scope` by `keys`. New scopes are defined."""
    for key in keys:
        scope = scope.children.get(key) or scopes.define(scope, key)
    return scope


# For a step inside a call: the surrounding scope, the position in it, and its lane.
Inside = tuple[Any, Any, int]


class Ended:
    """A step that has ended and waits for its parts (layers and bricks)."""

    __slots__ = ("end", "flags", "inside", "outside", "scope", "start")

    def __init__(self, scope: Scope, start: Any, end: Any, flags: int, inside: Inside | None) -> None:
        self.scope = scope
        self.outside: Any = scope.parent  # this scope is the root of the graph
        self.start = start
        self.end = end
        self.flags = flags
        self.inside = inside
