"""BrickProfiler: times bricks inside the profiled process and writes each as one record into the ring.

Rules
- No thread, no socket, no numpy. What can fail or grow (files, nodes) is bounded; its failure is counted or
  logged once, and never raised into the host.
- A timing is a record against a node. A node is defined once, under the place in the graph it first ran in.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from cbtop.profiler.definitions import BrickDefinition, KernelDefinition
from cbtop.profiler.graph.node_table import MAX_DEPTH, MAX_NODES
from cbtop.profiler.hot_path import HotPath, Place, Span, chosen
from cbtop.profiler.recorder import RingRecorder
from cbtop.protocol.messages import CatalogMessage, Node
from cbtop.protocol.ring import NO_NODE
from cbtop.protocol.vocabulary import BrickCategory, BrickId, NodeKind, SyncMode

if TYPE_CHECKING:
    from cbtop.profiler.brick_stats import BrickStats, CategoryStats
    from cbtop.profiler.clocks import DeviceClock
    from cbtop.profiler.device_path import DevicePath
    from cbtop.profiler.session import Report, Session

Brick = BrickId | BrickDefinition | str

MAX_RECURSION = 4  # a brick that runs inside itself more often than this was never stopped

_log = logging.getLogger("cbtop")
_profilers: weakref.WeakSet[BrickProfiler] = weakref.WeakSet()


class Recorder(Protocol):
    """Where records and catalog messages go."""

    def record(self, tag: int, start_ns: int, end_ns: int, elements: int, /) -> None: ...

    def announce(self, message: CatalogMessage, /) -> None: ...

    def close(self, reason: str, /) -> None: ...


if TYPE_CHECKING:
    _HotPath = HotPath
else:
    _HotPath = chosen()


class BrickProfiler(_HotPath):
    """Times bricks, layers and steps, and records them for the daemon to show.

    `clock_ns` and `recorder` are arguments so that a test can bring its own; by default the host's monotonic
    clock and this process's ring. Safe to use from several threads: each has its own place in the graph.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        sample_every: int = 1,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        recorder: Recorder | None = None,
        device_clock: DeviceClock | None = None,
        sync_mode: SyncMode = SyncMode.DEFERRED,
    ) -> None:
        if sample_every < 1:
            raise ValueError(f"sample_every={sample_every}; 1 records every step, k every k-th")
        self.sample_every = sample_every
        self._recorder: Recorder = RingRecorder() if recorder is None else recorder
        super().__init__(self._place_of, clock_ns, self._hand_over)
        self._now_ns = clock_ns
        self._epoch_ns: int | None = None
        self._steps = itertools.count()
        self._nodes = 0
        self._complained = False
        self._defining = threading.RLock()
        self._enabled = enabled
        self._session: Session | None = None
        self._sync_mode = sync_mode
        self._device_path: DevicePath | None = None
        if device_clock is not None:
            self._on_device(device_clock)
        self._switch()
        if isinstance(self._recorder, RingRecorder):
            self._recorder.follow(self)
        _profilers.add(self)

    @property
    def enabled(self) -> bool:
        """Whether anything is recorded."""
        return self._enabled

    def enable(self) -> None:
        """Record from now on."""
        self._enabled = True
        self._switch()

    def disable(self) -> None:
        """Record nothing from now on; a brick that is running is not recorded either."""
        self._enabled = False
        self._switch()

    @property
    def sync_mode(self) -> SyncMode:
        """When the device is waited for."""
        return self._sync_mode

    def set_sync_mode(self, mode: SyncMode) -> None:
        """Wait for the device as `mode` says from now on; what was put off until now is recorded first."""
        self.finalize()
        self._sync_mode = mode
        if self._device_path is not None:
            self._device_path.mode = mode
        self._switch()

    @property
    def pending_count(self) -> int:
        """How many timings wait for the device."""
        return self._device_path.pending if self._device_path else 0

    def finalize(self) -> None:
        """Wait for the device once and record what was put off, each timing with its own start and end."""
        if self._device_path is not None:
            self._device_path.finalize()

    def report(self) -> Report:
        """What this process has recorded so far, by brick and category; `print` shows it as text.

        Ask often enough that the ring does not overwrite what was not read: 260,000 records by default.
        """
        return self._read_back().report()

    def stats_for(self, brick: Brick) -> BrickStats | None:
        """The statistics of one brick, whatever layers it ran in; None where it did not run."""
        name = brick.display_name if isinstance(brick, BrickId) else getattr(brick, "name", brick)
        return self._read_back().stats_for(str(name))

    def category_stats(self) -> dict[BrickCategory, CategoryStats]:
        """The statistics of the categories that ran."""
        return self._read_back().category_stats()

    def announce(self, message: CatalogMessage) -> None:
        """Say something once about this process: its model (Manifest), a Ceiling, a CheckResult, an Activity."""
        self._recorder.announce(message)

    def close(self, reason: str = "closed") -> None:
        """Say goodbye; what was recorded stays readable. Happens by itself when the interpreter exits."""
        self.finalize()
        self.disable()
        self._recorder.close(reason)

    def step(self, name: str, tokens: int) -> Span:
        """`with profiler.step("decode", tokens=1):` is one forward pass; tokens are counted here, and only here.

        With `sample_every=k` the first step and every k-th after it is recorded. A step decides for the whole
        process and until the next one begins: threads that run steps side by side should record every step.
        """
        if self.sample_every > 1 and self._enabled:
            self._switch(sampled=next(self._steps) % self.sample_every == 0)
        return self.brick((NodeKind.STEP, name), tokens)

    def reset_epoch(self) -> None:
        """Let `elapsed_ns` count from now."""
        self._epoch_ns = self._now_ns()

    def elapsed_ns(self) -> int:
        """Time since `reset_epoch`; the first call begins the count where nobody did."""
        now_ns = self._now_ns()
        if self._epoch_ns is None:
            self._epoch_ns = now_ns
        return now_ns - self._epoch_ns

    def _switch(self, sampled: bool = True) -> None:
        on = self._enabled and sampled and self._sync_mode is not SyncMode.NONE
        self.switch(on)
        if self._device_path is not None:
            self._device_path.switch(on)

    def _on_device(self, clock: DeviceClock) -> None:
        """Take start and end of everything on `clock`: its path stands in for the host's."""
        from cbtop.profiler.device_path import DevicePath

        path = self._device_path = DevicePath(clock, self._sync_mode, self._place_of, self._hand_over)
        self.start_brick, self.stop_brick = path.start, path.stop  # type: ignore[method-assign, assignment]
        self.brick, self.layer = path.span, path.layer  # type: ignore[method-assign, assignment]

    def _read_back(self) -> Session:
        # NumPy comes with it, which a process that only records need not load.
        from cbtop.profiler.session import Session

        if self._session is None:
            if not isinstance(self._recorder, RingRecorder):
                raise TypeError(f"a {type(self._recorder).__name__} cannot be read back")
            self._session = Session(self._recorder)
        return self._session

    def _hand_over(self, tag: int, start_ns: int, end_ns: int, elements: int) -> None:
        self._recorder.record(tag, start_ns, end_ns, elements)

    def _place_of(self, here: Place, key: object) -> Place:
        """The place for `key` below `here`, which nobody has started there yet."""
        with self._defining:
            if key in here.below:
                return here.below[key]
            place = _lost_track(here, key)
            if place is None:
                place = type(here)(key, self._define_node(key, here), here)
                if place.node == NO_NODE:
                    return place  # not kept: what has no bound must not be remembered
            here.below[key] = place
            return place

    def _define_node(self, key: object, here: Place) -> int:
        nodes = _nodes(key, self._nodes + 1, here.node or None)
        # A brick's kernels lie one deeper than the brick.
        if self._nodes + len(nodes) > MAX_NODES or _depth(here) + 2 > MAX_DEPTH:
            if not self._complained:
                self._complained = True
                what = "more than %d nodes, or more than %d deep: what comes after is counted, not recorded"
                _log.warning(f"cbtop: {what}", MAX_NODES, MAX_DEPTH)
            return NO_NODE
        self._nodes += len(nodes)
        for node in nodes:
            self._recorder.announce(node)
        return nodes[0].id


def _lost_track(here: Place, key: object) -> Place | None:
    """Where `key` first ran among the places above `here`, once it has run inside itself MAX_RECURSION times.

    So deep it is no recursion: stops were never reached. Going back to where it began keeps a host that loses
    exceptions from growing the graph for ever.
    """
    running = []
    place: Place | None = here
    while place is not None and place.above is not None:
        if place.key == key:
            running.append(place)
        place = place.above
    return running[-1] if len(running) >= MAX_RECURSION else None


def _depth(place: Place) -> int:
    depth = 0
    while place.above is not None:
        depth, place = depth + 1, place.above
    return depth


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
