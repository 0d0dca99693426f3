"""BrickProfiler: times bricks inside the profiled process and writes each as one record into the ring.

Rules
- No thread, no socket, no numpy. What can fail or grow (files, nodes) is bounded; its failure is counted or
  logged once, and never raised into the host.
- A timing is a record against a node. A node is defined once, under the place in the graph it first ran in.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import Any, Protocol

from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.profiler.graph.node_table import MAX_NODES
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.messages import CatalogMessage, Node
from cbtop.protocol.ring import FLAG_FAILED, NO_NODE
from cbtop.protocol.vocabulary import BrickCategory, BrickId, NodeKind

Brick = BrickId | BrickDefinition | str

_log = logging.getLogger("cbtop")
_profilers: weakref.WeakSet[BrickProfiler] = weakref.WeakSet()


class Recorder(Protocol):
    """Where records and catalog messages go."""

    def record(self, tag: int, start_ns: int, end_ns: int, elements: int, /) -> None: ...

    def announce(self, message: CatalogMessage, /) -> None: ...

    def close(self, reason: str, /) -> None: ...


class _Place:
    """A place in the graph: its node, the place above, and the places below by what was started there."""

    __slots__ = ("above", "below", "key", "node")

    def __init__(self, key: object, node: int, above: _Place | None) -> None:
        self.key = key
        self.node = node
        self.above = above
        self.below: dict[object, _Place] = {}


class BrickTimer:
    """A running brick: what `start_brick` gives and `stop_brick` takes."""

    __slots__ = ("place", "start_ns")

    def __init__(self, place: _Place, start_ns: int) -> None:
        self.place = place
        self.start_ns = start_ns


class _Position(threading.local):
    """Where in the graph each thread is; all begin at the root."""

    def __init__(self, root: _Place) -> None:
        self.place = root


class BrickProfiler:
    """Times bricks, layers and steps, and records them for the daemon to show.

    `clock_ns` and `recorder` are arguments so that a test can bring its own; by default the host's monotonic
    clock and this process's ring. Safe to use from several threads: each has its own place in the graph.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        recorder: Recorder | None = None,
    ) -> None:
        self._clock_ns = clock_ns
        self._recorder: Recorder = RingRecorder() if recorder is None else recorder
        self._enabled = enabled
        self._root = _Place(None, NO_NODE, None)
        self._off = BrickTimer(_Place(None, NO_NODE, None), 0)
        self._nodes = 0
        self._defining = threading.RLock()
        self._position = _Position(self._root)
        _profilers.add(self)

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded."""
        return self._enabled

    def enable(self) -> None:
        """Record from now on."""
        self._enabled = True

    def disable(self) -> None:
        """Record nothing from now on; a brick that is running is not recorded either."""
        self._enabled = False

    def announce(self, message: CatalogMessage) -> None:
        """Say something once about this process: its model (Manifest), a Ceiling, a CheckResult, an Activity."""
        self._recorder.announce(message)

    def close(self, reason: str = "closed") -> None:
        """Say goodbye; what was recorded stays readable. Happens by itself when the interpreter exits."""
        self._enabled = False
        self._recorder.close(reason)

    def start_brick(self, brick: Brick) -> BrickTimer:
        """Start timing `brick` where this thread is: a BrickId, a BrickDefinition, or a name of your own."""
        if not self._enabled:
            return self._off
        return self._start(brick)

    def stop_brick(self, timer: BrickTimer, elements: int, *, failed: bool = False) -> None:
        """Record the brick that `timer` timed, with the `elements` it worked on."""
        if timer is self._off:
            return
        end_ns = self._clock_ns()
        place = timer.place
        self._position.place = place.above or self._root
        if self._enabled:
            tag = place.node | FLAG_FAILED if failed else place.node
            self._recorder.record(tag, timer.start_ns, end_ns, elements)

    def brick(self, brick: Brick, elements: int = 1) -> Span:
        """`with profiler.brick(BrickId.RMS_NORM, elements=4096):` times the block; an exception marks it failed."""
        return Span(self, brick, elements)

    def layer(self, index: int) -> Span:
        """`with profiler.layer(3):` makes what runs inside part of layer 3."""
        return Span(self, (NodeKind.LAYER, index), 1)

    def step(self, name: str, tokens: int) -> Span:
        """`with profiler.step("decode", tokens=1):` is one forward pass; tokens are counted here, and only here."""
        return Span(self, (NodeKind.STEP, name), tokens)

    def _start(self, key: object) -> BrickTimer:
        position = self._position
        here = position.place
        place = here.below.get(key)
        if place is None:
            place = self._define(here, key)
        position.place = place
        return BrickTimer(place, self._clock_ns())

    def _define(self, here: _Place, key: object) -> _Place:
        """The place for `key` below `here`, which nobody has started there yet."""
        with self._defining:
            if key in here.below:
                return here.below[key]
            place = _abandoned(here, key)
            if place is None:
                place = _Place(key, self._define_node(key, here.node or None), here)
            here.below[key] = place
            return place

    def _define_node(self, key: object, parent: int | None) -> int:
        nodes = _nodes(key, self._nodes + 1, parent)
        if self._nodes + len(nodes) > MAX_NODES:
            if self._nodes < MAX_NODES:
                _log.warning("cbtop: more than %d nodes; what comes after is counted, not recorded", MAX_NODES)
            self._nodes = MAX_NODES
            return NO_NODE
        self._nodes += len(nodes)
        for node in nodes:
            self._recorder.announce(node)
        return nodes[0].id


class Span:
    """The `with` form of a brick, a layer or a step."""

    __slots__ = ("_key", "_profiler", "_timer", "elements")

    def __init__(self, profiler: BrickProfiler, key: object, elements: int) -> None:
        self._profiler = profiler
        self._key = key
        self.elements = elements  # may be set inside the block, where it is known only then

    def __enter__(self) -> Span:
        profiler = self._profiler
        self._timer = profiler._start(self._key) if profiler._enabled else profiler._off
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profiler.stop_brick(self._timer, self.elements, failed=kind is not None)


def _abandoned(here: _Place, key: object) -> _Place | None:
    """The place above (or at) `here` where `key` runs already.

    A brick does not run inside itself: its earlier `stop_brick` was never reached. Going back to that place
    keeps a host that loses exceptions from growing the graph for ever.
    """
    place: _Place | None = here
    while place is not None:
        if place.key is not None and place.key == key:
            return place
        place = place.above
    return None


def _nodes(key: object, first_id: int, parent: int | None) -> list[Node]:
    """The node of what was started, followed by those of its kernels."""
    match key:
        case (NodeKind.LAYER, index):
            return [Node(first_id, parent, NodeKind.LAYER, str(index))]
        case (NodeKind.STEP, name):
            return [Node(first_id, parent, NodeKind.STEP, str(name))]
        case BrickId():
            return _brick_nodes(BrickDefinition.of(key), first_id, parent)
        case BrickDefinition():
            return _brick_nodes(key, first_id, parent)
        case _:
            return _brick_nodes(BrickDefinition(str(key), BrickCategory.OTHER), first_id, parent)


def _brick_nodes(definition: BrickDefinition, first_id: int, parent: int | None) -> list[Node]:
    # An unknown amount of work leaves the fields None.
    work: dict[str, Any] = asdict(definition.work) if definition.work else {}
    brick = Node(
        first_id,
        parent,
        NodeKind.BRICK,
        definition.name,
        category=definition.category,
        brick=definition.brick,
        backend=definition.backend,
        budget_us_per_token=definition.budget_us_per_token,
        **work,
    )
    kernels = enumerate(definition.kernels, start=first_id + 1)
    return [brick, *(_kernel_node(kernel, at, definition, first_id) for at, kernel in kernels)]


def _kernel_node(kernel: KernelDefinition, at: int, definition: BrickDefinition, parent: int) -> Node:
    return Node(
        at,
        parent,
        NodeKind.KERNEL,
        kernel.name,
        category=definition.category,
        backend=kernel.backend,
        grid=kernel.grid,
        block=kernel.block,
        shared_memory_bytes=kernel.shared_memory_bytes,
        ptx_hash=kernel.ptx_hash,
    )


def _after_fork() -> None:
    # Another thread of the parent may have held the lock; that thread does not exist here.
    for profiler in _profilers:
        profiler._defining = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
