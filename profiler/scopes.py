"""Makes the nodes of the graph from the calls of the hot path. Each is made and announced once. Their number is
bounded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from cbtop.profiler.analysis.graph.node_table import MAX_DEPTH, MAX_NODES
from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.hot_path import Scope
from cbtop.profiler.node_of import nodes_of
from cbtop.protocol import codec
from cbtop.protocol.codec import EncodedNode
from cbtop.protocol.ring import HELD, NO_NODE
from cbtop.protocol.signals import reraise_host_error
from cbtop.protocol.vocabulary import NodeKind

UNNAMED = (NodeKind.STEP,)  # the key of a step without a name; its records wait for the name
# How many levels deep a brick may be nested in itself. Recursive models of balanced trees need less. Deeper calls are
# not recorded, so their time belongs to the call around them.
MAX_RECURSION = 24
# Bricks that call each other in any order have a node for each order. So there are at most MAX_DEEP_NODES nodes in
# bricks that are inside themselves more than SURE_RECURSION times.
SURE_RECURSION, MAX_DEEP_NODES = 4, 4096
# Python cannot recurse deeper. If a key is nested deeper, calls of `stop_brick` are missing.
MAX_LOST = 1000

_log = logging.getLogger("cbtop")


class Scopes:
    """Makes the scopes of one profiler, and announces their nodes by `announce`.

    A scope beyond the limits of nodes, depth and recursion has no node. Its calls are only counted, and their time
    belongs to the brick around them.
    """

    def __init__(self, announce: Callable[[Sequence[EncodedNode]], None]) -> None:
        self.dropped = 0
        self._announce = announce
        self._nodes = 0
        self._unsaid: list[EncodedNode] = []  # nodes that were not announced yet
        self._held = 0
        self._deep = 0  # number of nodes in recursive bricks, nested more than SURE_RECURSION times
        self._loses_stops = False
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child, create a new lock, because the parent may have held the old one."""
        self._defining = threading.RLock()

    def define(self, outer: Any, key: object) -> Any:
        """Return the scope for `key` in `outer`, and make it if it is new. Raises only an interrupt."""
        with self._defining:
            if key in outer.children:
                return outer.children[key]
            running = _running(outer, key)
            if len(running) >= (MAX_RECURSION if self._loses_stops else MAX_LOST):
                # Exceptions have skipped calls of `stop_brick`, so the host's bricks were not stopped. Return the
                # outermost scope of this key, to limit the depth.
                self._loses_stops = True
                outer.children[key] = running[-1]
                return running[-1]
            node = NO_NODE
            is_too_deep = len(running) >= MAX_RECURSION or (self._deep >= MAX_DEEP_NODES and _is_deep(outer, key))
            if is_too_deep and not self.dropped:
                what = "a brick runs inside itself more than %d times: such calls are counted, not recorded"
                _log.warning(f"cbtop: {what}", max(SURE_RECURSION, len(running)))
            if not is_too_deep and not _is_unrecorded(outer):
                self._deep += _is_deep(outer, key)
                held = key == UNNAMED or outer.node == HELD
                node = self._hold_node() if held else self._define_node(key, outer)
            scope = type(outer)(key, node, outer, _work_of(key))
            if node == NO_NODE:
                self.dropped += 1
                return scope  # not stored, because a host may use any number of scopes without a node
            outer.children[key] = scope
            return scope

    def _hold_node(self) -> int:
        self._held += 1
        return HELD if self._held <= MAX_NODES else NO_NODE

    def _define_node(self, key: object, outer: Scope) -> int:
        depth = _depth(outer) + 2  # the kernels of a brick are one level deeper than the brick
        try:
            nodes = nodes_of(key, self._nodes + 1, outer.node or None, outer.key)
            # Encode nodes before they are counted. If a counted node could not be announced, the ids would have a
            # gap.
            said = [codec.encode_node(node) for node in nodes]
            count = len(said)
        except Exception as error:  # noqa: BLE001 - for example, the __str__ of a name raises; the host goes on
            reraise_host_error(error)
            if not self.dropped:
                _log.warning("cbtop records no %s: %s: %s", type(key).__name__, type(error).__name__, error)
            return NO_NODE
        if self._nodes + count > MAX_NODES or depth > MAX_DEPTH:
            if not self.dropped:
                what = "more than %d nodes, or more than %d deep: what comes after is counted, not recorded"
                _log.warning(f"cbtop: {what}", MAX_NODES, MAX_DEPTH)
            return NO_NODE
        if nodes[0].id != self._nodes + 1:  # a signal handler has defined other nodes meanwhile
            return self._define_node(key, outer)
        self._nodes += count
        self._unsaid += said
        # Include nodes of an interrupted call, because ids must have no gaps.
        while self._unsaid:
            first = self._unsaid[:]
            self._announce(first)
            # Otherwise, a signal handler has announced these nodes.
            if self._unsaid[: len(first)] == first:
                del self._unsaid[: len(first)]
        return nodes[0].id


class NamedScopes:
    """Finds the scopes for the calls of a step that had no name while it ran.

    `of` gets a scope inside the unnamed step, and returns the scope of the same key inside the named one, which has
    the key `key`. `label` gets a scope of the unnamed step, and returns a different key to use.
    """

    def __init__(
        self, scopes: Scopes, unnamed: Scope, key: object, label: Callable[[Scope], object] = lambda scope: scope.key
    ) -> None:
        self._scopes = scopes
        self._label = label
        outer: Any = unnamed.parent
        self.named: Scope = outer.children.get(key) or scopes.define(outer, key)
        self._places = {id(unnamed): self.named}

    def of(self, scope: Any) -> Scope:
        """Return the scope of the named step that replaces `scope`, a scope of the unnamed step."""
        found = self._places.get(id(scope))
        if found is None:
            outer, key = self.of(scope.parent), self._label(scope)
            found = self._places[id(scope)] = outer.children.get(key) or self._scopes.define(outer, key)
        return found


def _work_of(key: object) -> object:
    """Return the function for the work of a call in this scope. None if the work is linear or not declared."""
    work = key.work if isinstance(key, BrickDefinition) else None
    return work if callable(work) else None


def _running(outer: Scope, key: object) -> list[Scope]:
    """Return the scopes with this `key` among `outer` and the scopes around it, innermost first."""
    running = []
    scope: Scope | None = outer
    while scope is not None and scope.parent is not None:
        if scope.key == key:
            running.append(scope)
        scope = scope.parent
    return running


def _is_deep(outer: Scope, key: object) -> bool:
    """Return whether a scope for `key` in `outer` would repeat a key: on the path to the root, more than
    SURE_RECURSION times.
    """
    keys, scope = [key], outer
    while scope.parent is not None:
        keys.append(scope.key)
        scope = scope.parent
    return len(keys) > SURE_RECURSION and max(map(keys.count, keys)) > SURE_RECURSION


def _is_unrecorded(scope: Scope) -> bool:
    """Return whether calls inside `scope` cannot be recorded, because it has no node."""
    return scope.node == NO_NODE and scope.parent is not None


def _depth(scope: Scope) -> int:
    depth = 0
    while scope.parent is not None:
        depth, scope = depth + 1, scope.parent
    return depth
