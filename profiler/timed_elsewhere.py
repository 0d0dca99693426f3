"""What was timed elsewhere, put into the same graph and the same ring: elapsed times, launches, copies, polls."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.profiler.graph.nodes import AsyncTask, Function, Layer, Transfer
from cbtop.profiler.hot_path import BrickTimer, Place
from cbtop.profiler.pending import MAX_PENDING, HostTime, Pending
from cbtop.protocol.attributes import Grid
from cbtop.protocol.messages import CatalogMessage, Dependency
from cbtop.protocol.ring import NO_NODE, Record
from cbtop.protocol.vocabulary import BrickId, NodeKind, TransferDirection

if TYPE_CHECKING:
    from collections.abc import Callable

    from cbtop.profiler.clocks import DeviceClock
    from cbtop.profiler.hot_path import HotPath

    _Base = HotPath
else:
    _Base = object

Brick = BrickId | BrickDefinition | str

MAX_DEPENDENCIES = 4096


class _Scopes(threading.local):
    """The scopes this thread has pushed, and the brick it recorded last in the innermost of them."""

    def __init__(self) -> None:
        self.timers: list[BrickTimer] = []
        self.last_brick: Place | None = None


class TimedElsewhere(_Base):
    """The methods of BrickProfiler that take a time instead of taking it, where this thread is in the graph.

    The `graph_*` methods give the id of the node they recorded against, for `graph_add_dependency`; 0 while nothing
    is recorded. The same thing recorded again in the same place is the same node: its times add up.
    """

    _now_ns: Callable[[], int]
    _hand_over: Record
    _here: Callable[[], Place]
    _place_of: Callable[[Place, object], Place]
    _pending: Pending
    _clock: DeviceClock
    _dependencies: dict[Dependency, bool]  # whether it was said since the last `reset`
    _dropped: int
    _scopes: _Scopes
    announce: Callable[[CatalogMessage], None]

    def record_elapsed(self, brick: Brick, duration_ns: int, elements: int = 1) -> None:
        """Record a brick that has just ended and took `duration_ns`."""
        if self.recording:
            here = self._here()
            self._record_elapsed(here.below.get(brick) or self._place_of(here, brick), duration_ns, elements)

    def record_deferred(self, brick: Brick, start_ns: int, elements: int = 1, end_ns: int | None = None) -> None:
        """Put off recording a brick until `finalize`, between `start_ns` and `end_ns` on the monotonic clock.

        Without `end_ns` it ends here: when the device has reached this point, or now where there is no device.
        """
        if not self.recording:
            return
        here = self._here()
        place = here.below.get(brick) or self._place_of(here, brick)
        end = self._clock.mark() if end_ns is None else HostTime(end_ns)
        self._pending.put_off((place.node, HostTime(start_ns), end, elements))
        if len(self._pending) >= MAX_PENDING:
            self._pending.finalize()

    def graph_push_scope(self, scope: Layer | Function) -> None:
        """Go inside `scope`, and time it: what is recorded next in this thread belongs there."""
        key = (NodeKind.LAYER, scope.index) if isinstance(scope, Layer) else scope
        self._scopes.timers.append(self.start_brick(key))
        self._scopes.last_brick = None

    def graph_pop_scope(self) -> None:
        """Go back out, and record how long the scope took. Raises ValueError when there is nothing to leave."""
        if not self._scopes.timers:
            raise ValueError("graph_pop_scope without a graph_push_scope before it")
        self.stop_brick(self._scopes.timers.pop(), 1)
        self._scopes.last_brick = None

    @property
    def graph_is_scope_balanced(self) -> bool:
        """Whether this thread has left every scope it pushed."""
        return not self._scopes.timers

    def graph_record_brick(self, brick: Brick, duration_ns: int, elements: int = 1) -> int:
        """Record a brick that ended now and took `duration_ns`; kernels recorded next are its launches."""
        if not self.recording:
            return NO_NODE
        here = self._here()
        place = here.below.get(brick) or self._place_of(here, brick)
        self._scopes.last_brick = place
        self._record_elapsed(place, duration_ns, elements)
        return place.node

    def graph_record_kernel(
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
        """Record a kernel launch of the running brick, or else of the brick recorded last in this scope.

        Without `duration_ns` it is in the graph, and its time is n/a.
        """
        if not self.recording:
            return NO_NODE
        here, last = self._here(), self._scopes.last_brick
        above = last if last is not None and last.above is here else here
        kernel = KernelDefinition(
            name, backend, grid=grid, block=block, shared_memory_bytes=shared_memory_bytes, ptx_hash=ptx_hash
        )
        return self._add(above, kernel, duration_ns, elements)

    def graph_record_transfer(
        self,
        source: str,
        destination: str,
        size_bytes: int,
        direction: TransferDirection,
        duration_ns: int | None = None,
    ) -> int:
        """Record a copy between memories; without `duration_ns` its time is n/a."""
        if not self.recording:
            return NO_NODE
        transfer = Transfer(source, destination, size_bytes, TransferDirection(direction))
        return self._add(self._here(), transfer, duration_ns, 1)

    def graph_record_poll(self, name: str, duration_ns: int, *, is_done: bool) -> int:
        """Record one poll of the async task `name`."""
        if not self.recording:
            return NO_NODE
        task = AsyncTask(name, polls=0, yields=0, total_poll_ns=0.0)
        return self._add(self._here(), task, duration_ns, 0 if is_done else 1)

    def graph_add_dependency(self, first: int, then: int) -> None:
        """Say that the node `then` cannot start before the node `first` has ended."""
        dependency = Dependency(first, then)
        if NO_NODE in (first, then):
            return
        if dependency not in self._dependencies:
            if len(self._dependencies) >= MAX_DEPENDENCIES:
                self._dropped += 1
                return
            self.announce(dependency)
        self._dependencies[dependency] = True

    def _add(self, above: Place, key: object, duration_ns: int | None, elements: int) -> int:
        place = above.below.get(key) or self._place_of(above, key)
        if duration_ns is not None:
            self._record_elapsed(place, duration_ns, elements)
        return place.node

    def _record_elapsed(self, place: Place, duration_ns: int, elements: int) -> None:
        end_ns = self._now_ns()
        self._hand_over(place.node, end_ns - duration_ns, end_ns, elements)
