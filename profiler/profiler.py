"""BrickProfiler: times bricks inside the profiled process and writes each as one record into the ring.

Rules
- No thread, no socket, no numpy. What can fail or grow (files, nodes) is bounded; its failure is counted or
  logged once, and never raised into the host.
- A timing is a record against a node. A node is defined once, under the place in the graph it first ran in.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from cbtop.profiler.clocks import DeviceClock, HostClock
from cbtop.profiler.graph.node_of import nodes_of
from cbtop.profiler.graph.node_table import MAX_DEPTH, MAX_NODES
from cbtop.profiler.hot_path import HotPath, Place, Span, chosen
from cbtop.profiler.pending import Pending
from cbtop.profiler.read_back import ReadBack
from cbtop.profiler.recorder import Recorder, RingRecorder
from cbtop.profiler.timed_elsewhere import Brick, TimedElsewhere, _Scopes
from cbtop.protocol.endpoint import parse_endpoint
from cbtop.protocol.messages import CatalogMessage, Dependency
from cbtop.protocol.ring import NO_NODE
from cbtop.protocol.vocabulary import NodeKind, SyncMode

if TYPE_CHECKING:
    from cbtop.profiler.device_path import DevicePath
    from cbtop.profiler.session import Session

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_RECURSION = 4  # a brick that runs inside itself more often than this was never stopped

_log = logging.getLogger("cbtop")
_profilers: weakref.WeakSet[BrickProfiler] = weakref.WeakSet()


if TYPE_CHECKING:
    _HotPath = HotPath
else:
    _HotPath = chosen()


class BrickProfiler(TimedElsewhere, ReadBack, _HotPath):
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
        self._open = threading.local()
        self._nodes = 0
        self._dropped = 0
        self._dependencies: dict[Dependency, bool] = {}
        self._scopes = _Scopes()
        self._defining = threading.RLock()
        self._enabled = enabled
        self._session: Session | None = None
        self._sync_mode = sync_mode
        self._clock: DeviceClock = HostClock(clock_ns) if device_clock is None else device_clock
        self._pending = Pending(self._clock, self._hand_over)
        self._device_path: DevicePath | None = None
        if device_clock is not None:
            self._on_device(device_clock)
        self._switch()
        if isinstance(self._recorder, RingRecorder):
            self._recorder.add_listener(self)
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
        """How many timings wait for the device, or for `finalize`."""
        return len(self._pending)

    def finalize(self) -> None:
        """Wait for the device once and record what was put off, each timing with its own start and end."""
        self._pending.finalize()

    def timed(
        self, brick: Brick, elements: int | Callable[Arguments, int] = 1
    ) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
        """Time every call of a function: `@profiler.timed(BrickId.RMS_NORM, elements=lambda x: x.size)`.

        `elements` is a number, or what the call's arguments give. Raises TypeError for a coroutine or a generator,
        whose time between the awaits belongs to others: use `with profiler.brick(...)` inside.
        """

        def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
            if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
                raise TypeError(
                    f"{function.__name__} runs in pieces; time them with `with profiler.brick(...)` inside"
                )

            @functools.wraps(function)
            def timed_function(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
                if not self.recording:
                    return function(*args, **kwargs)
                count = elements(*args, **kwargs) if callable(elements) else elements
                with self.brick(brick, count):
                    return function(*args, **kwargs)

            return timed_function

        return decorate

    def reset(self) -> None:
        """Begin anew: statistics, the graph, what waits for `finalize`, the epoch, the count of steps.

        Settings stay, and so does where each thread is. What the daemon was told stays told: its totals are those
        of the process.
        """
        self._pending.start_over()
        self._epoch_ns = None
        self._steps = itertools.count()
        self._dropped = 0
        self._dependencies = dict.fromkeys(self._dependencies, False)
        if isinstance(self._recorder, RingRecorder):
            self._read_back().reset()

    def announce(self, message: CatalogMessage) -> None:
        """Say something once about this process: its model (Manifest), a Ceiling, a CheckResult, an Activity."""
        self._recorder.announce(message)

    def close(self, reason: str = "closed") -> None:
        """Say goodbye; what was recorded stays readable. Happens by itself when the interpreter exits."""
        self.finalize()
        self.disable()
        self._recorder.close(reason)

    def serve(self, endpoint: str) -> None:
        """Start a daemon beside this process for viewers at `endpoint` (`tcp://127.0.0.1:5555`): `cbtop --connect`.

        It is a process of its own and ends with this one. Returns at once; on this machine nobody needs it.
        Raises EndpointError for what is no address; one that is taken, or not allowed, the daemon names on stderr.
        """
        from cbtop.profiler.sidecar import start_sidecar

        start_sidecar(parse_endpoint(endpoint))

    def step(self, name: str, tokens: int) -> Span:
        """`with profiler.step("decode", tokens=1):` is one forward pass; tokens are counted here, and only here.

        With `sample_every=k` the first step and every k-th after it is recorded. A step decides for the whole
        process and until the next one begins: threads that run steps side by side should record every step.
        """
        if self.sample_every > 1 and self._enabled:
            self._switch(sampled=next(self._steps) % self.sample_every == 0)
        step = self._open.step = self.brick((NodeKind.STEP, name), tokens)
        return step

    def add_tokens(self, tokens: int) -> None:
        """Count `tokens` more for the step this thread is in: for those that are known only when it has run.

        Raises RuntimeError outside a step: tokens are counted once a forward pass, and nowhere else.
        """
        if not self.recording:
            return
        place: Place | None = self._here()
        while place is not None and not (isinstance(place.key, tuple) and place.key[0] is NodeKind.STEP):
            place = place.above
        if place is None:
            raise RuntimeError("add_tokens outside a step; `with profiler.step(name, tokens=0):` is one forward pass")
        self._open.step.elements += tokens

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

        path = self._device_path = DevicePath(clock, self._sync_mode, self._place_of, self._pending)
        self.start_brick, self.stop_brick = path.start, path.stop  # type: ignore[method-assign, assignment]
        self.brick, self.layer = path.span, path.layer  # type: ignore[method-assign, assignment]

    def _here(self) -> Place:
        return self.here if self._device_path is None else self._device_path.here

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
                    self._dropped += 1
                    return place  # not kept: what has no bound must not be remembered
            here.below[key] = place
            return place

    def _define_node(self, key: object, here: Place) -> int:
        nodes = nodes_of(key, self._nodes + 1, here.node or None, here.key)
        # A brick's kernels lie one deeper than the brick.
        if self._nodes + len(nodes) > MAX_NODES or _depth(here) + 2 > MAX_DEPTH:
            if not self._dropped:
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


def _after_fork() -> None:
    # Another thread of the parent may have held the lock; that thread does not exist here.
    for profiler in _profilers:
        profiler._defining = threading.RLock()
        profiler._pending.start_over()  # what waits is the parent's to record


os.register_at_fork(after_in_child=_after_fork)
