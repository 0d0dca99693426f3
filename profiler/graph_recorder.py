"""Records work that the caller has timed (launches, copies, polls) and dependencies, in the same graph and ring."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, TypeVar

from cbtop.profiler.analysis.graph.nodes import AsyncTask, Function, Layer, Transfer
from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.profiler.path import emit_at_once
from cbtop.profiler.pending import HostTime
from cbtop.profiler.positions import finder
from cbtop.protocol.attributes import Grid
from cbtop.protocol.messages import Dependency
from cbtop.protocol.ring import NO_NODE
from cbtop.protocol.vocabulary import BrickId, NodeKind, TransferDirection

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbtop.profiler.hot_path import Callbacks, Scope
    from cbtop.profiler.path import Path
    from cbtop.profiler.scopes import Scopes

Brick = BrickId | BrickDefinition | str

MAX_DEPENDENCIES = 4096


class UsageError(ValueError):
    """Raised into the host for a wrong argument. No other error of the recorder reaches the host."""


Named = TypeVar("Named")


def checked(name: Named, what: str = "brick") -> Named:
    """Return `name` if it is hashable. Otherwise raise UsageError about the argument `what`."""
    try:
        hash(name)
    except TypeError as error:
        raise UsageError(f"a {type(name).__name__} names no {what}: {error}") from error
    return name


def checked_ns(what: str, time_ns: int) -> int:
    """Return `time_ns` as a Python int. Raises UsageError if it is not an integer or exceeds 146 years."""
    try:
        time_ns = operator.index(time_ns)
    except TypeError as error:
        raise UsageError(f"{what} of {time_ns!r}; whole nanoseconds are wanted") from error
    if abs(time_ns) >= 1 << 62:
        raise UsageError(f"{what} of {time_ns} ns, which is over 146 years")
    return time_ns


class _Pushed:
    """The scopes that one thread, task or greenlet has entered, and the last brick that it recorded in the innermost
    scope.
    """

    __slots__ = ("__weakref__", "last_brick", "timers")

    def __init__(self) -> None:
        self.timers: list[Any] = []
        self.last_brick: Scope | None = None


class GraphRecorder:
    """Records work that the caller has timed, at the caller's position in the graph. Users call it as
    `profiler.graph`.

    The `record_*` methods return the id of the node, for `add_dependency`, or 0 while recording is off. The same work
    in the same scope is one node. Its times are added up.
    """

    def __init__(self, path: Path, callbacks: Callbacks, scopes: Scopes, say: Callable[[Dependency], None]) -> None:
        self._path = path
        self._callbacks = callbacks
        self._scopes = scopes
        self._say = say
        self._pushed = finder(_Pushed)
        # Dependency (two nodes) -> whether it was declared since the last `reset`.
        self._dependencies: dict[Dependency, bool] = {}

    def push_scope(self, scope: Layer | Function) -> None:
        """Enter `scope` and time it. Later records of the caller belong to it."""
        key: Hashable = scope
        if isinstance(scope, Layer):
            key = (NodeKind.LAYER, scope.index, scope.stack) if scope.stack else (NodeKind.LAYER, scope.index)
        pushed = self._pushed()
        pushed.timers.append(self._path.start_brick(checked(key, "scope")))
        pushed.last_brick = None

    def pop_scope(self) -> None:
        """Leave the scope and record its duration. Raises UsageError if the caller has pushed no scope."""
        pushed = self._pushed()
        if not pushed.timers:
            raise UsageError("graph_pop_scope without a graph_push_scope before it")
        self._path.stop_brick(pushed.timers.pop(), 1)
        pushed.last_brick = None

    @property
    def is_scope_balanced(self) -> bool:
        """Whether the caller has left every scope that it pushed."""
        return not self._pushed().timers

    def record_brick(self, brick: Brick, duration_ns: int, elements: int = 1) -> int:
        """Record a brick that took `duration_ns` and ends now. Kernels recorded after it are its launches."""
        if not self._path.recording:
            return NO_NODE
        scope = self._child(self._path.position.scope, brick)
        self._pushed().last_brick = scope
        self._emit(scope, duration_ns, elements)
        return max(scope.node, NO_NODE)

    def record_kernel(
        self,
        name: str,
        ptx_hash: int | None = None,
        grid: Grid | None = None,
        block: Grid | None = None,
        shared_memory_bytes: int | None = None,
        duration_ns: int | None = None,
        backend: str = "",
        elements: int = 1,
    ) -> int:
        """Record a kernel launch of the running brick, or of the last brick of this scope if none is running.

        Without `duration_ns`, the kernel is in the graph without a time (n/a).
        """
        try:
            launch = {"grid": grid, "block": block, "shared_memory_bytes": shared_memory_bytes, "ptx_hash": ptx_hash}
            kernel = KernelDefinition(name, backend, **launch)  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            raise UsageError(f"kernel {name}: {error}") from error
        checked(kernel, "kernel")
        if not self._path.recording:
            return NO_NODE
        here, last = self._path.position.scope, self._pushed().last_brick
        return self._record(last if last is not None and last.parent is here else here, kernel, duration_ns, elements)

    def record_transfer(
        self,
        source: str,
        destination: str,
        size_bytes: int,
        direction: TransferDirection,
        duration_ns: int | None = None,
        stream: int | None = None,
    ) -> int:
        """Record a copy between memories. Without `duration_ns`, its time is n/a.

        On a `stream`, a copy counts as parallel to other work of its scope.
        """
        try:
            transfer = Transfer(source, destination, size_bytes, TransferDirection(direction), stream=stream)
        except ValueError as error:
            raise UsageError(str(error)) from error
        checked(transfer, "copy")
        if not self._path.recording:
            return NO_NODE
        return self._record(self._path.position.scope, transfer, duration_ns, 1)

    def record_poll(self, name: str, duration_ns: int, *, is_done: bool) -> int:
        """Record one poll of the async task `name`."""
        if not self._path.recording:
            return NO_NODE
        task = AsyncTask(checked(name, "task"), polls=0, yields=0, total_poll_ns=0.0)
        return self._record(self._path.position.scope, task, duration_ns, 0 if is_done else 1)

    def add_dependency(self, first: int, then: int) -> None:
        """Declare that the node `then` cannot start before the node `first` has ended."""
        dependency = checked(Dependency(first, then), "dependency")
        if NO_NODE in (first, then):
            return
        if dependency not in self._dependencies:
            if len(self._dependencies) >= MAX_DEPENDENCIES:
                self._scopes.dropped += 1
                return
            self._say(dependency)
        self._dependencies[dependency] = True

    def dependencies(self) -> list[Dependency]:
        """Return the dependencies declared since the last `reset`."""
        return [dependency for dependency, is_fresh in self._dependencies.items() if is_fresh]

    def reset(self) -> None:
        """Forget the dependencies that this process has declared.

        The daemon keeps those that it has already read.
        """
        self._dependencies = dict.fromkeys(self._dependencies, False)

    def record_elapsed(self, brick: Brick, duration_ns: int, elements: int) -> None:
        """Record a brick that took `duration_ns` and ends now."""
        if self._path.recording:
            self._emit(self._child(self._path.position.scope, brick), duration_ns, elements)

    def _record(self, outer: Scope, key: object, duration_ns: int | None, elements: int) -> int:
        scope = self._child(outer, key)
        if duration_ns is not None:
            self._emit(scope, duration_ns, elements)
        return max(scope.node, NO_NODE)

    def _child(self, outer: Scope, key: object) -> Scope:
        found: Scope = outer.children.get(key) or self._scopes.define(outer, key)
        return found

    def _emit(self, scope: Scope, duration_ns: int, elements: int) -> None:
        duration_ns = checked_ns("a duration", duration_ns)
        position, end_ns = self._path.position, HostTime(self._path.now_ns())
        start_ns = HostTime(end_ns - duration_ns)
        emit_at_once(self._callbacks, scope, position, start_ns, end_ns, elements, position.lane)
