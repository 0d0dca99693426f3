"""The hot path on a device clock: bricks are marked on the device, and recorded once it has reached the marks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from cbtop.profiler.clocks import DeviceClock, Mark
from cbtop.profiler.hot_path import Place, Thread
from cbtop.profiler.pending import MAX_PENDING, Pending
from cbtop.protocol.ring import FLAG_FAILED, NO_NODE
from cbtop.protocol.vocabulary import NodeKind, SyncMode

DeviceTimer = tuple[Place, Thread, Mark]


class DevicePath:
    """As `HotPath`, with start and end of every brick, layer and step taken on `clock` and put off in `pending`."""

    def __init__(
        self, clock: DeviceClock, mode: SyncMode, define: Callable[[Place, object], Place], pending: Pending
    ) -> None:
        self.root = Place(None, NO_NODE, None)
        self.mode = mode
        self._clock = clock
        self._mark = clock.mark
        self._define = define
        self._pending = pending
        self._waiting = pending.timings
        self._put_off = pending.put_off
        self._threads = threading.local()
        self._recording = True

    @property
    def here(self) -> Place:
        """Where in the graph this thread is."""
        return self._thread().here

    def switch(self, on: bool) -> None:
        """Record from now on, or stop recording."""
        self._recording = on

    def start(self, key: object, /) -> DeviceTimer | None:
        if not self._recording:
            return None
        try:
            thread = self._threads.thread
        except AttributeError:
            thread = self._thread()
        here = thread.here
        place = here.below.get(key) or self._define(here, key)
        thread.here = place
        if self.mode is SyncMode.IMMEDIATE:
            self._clock.synchronize()  # what was enqueued before is not this brick's
        return place, thread, self._mark()

    def stop(self, timer: DeviceTimer | None, elements: int, failed: bool = False) -> None:
        if timer is None:
            return
        place, thread, start = timer
        end = self._mark()
        if thread.here is place:
            thread.here = place.above  # type: ignore[assignment]  # only the root has none
        else:
            thread.leave(place)
        if not self._recording:
            return
        self._put_off((place.node | FLAG_FAILED if failed else place.node, start, end, elements))
        # Layers and steps have tuples for keys; of bricks only the mode and the bound decide.
        if type(place.key) is tuple or self.mode is SyncMode.IMMEDIATE or len(self._waiting) >= MAX_PENDING:
            self._end(place.key)

    def span(self, brick: object, elements: int = 1) -> DeviceSpan:
        return DeviceSpan(self, brick, elements)

    def layer(self, index: int, /) -> DeviceSpan:
        return DeviceSpan(self, (NodeKind.LAYER, index), 1)

    def _end(self, key: object) -> None:
        """Wait for the device if it is time to, now that what `key` names has ended."""
        is_layer = isinstance(key, tuple) and key[0] is NodeKind.LAYER
        if not is_layer or self.mode is not SyncMode.DEFERRED or len(self._pending) >= MAX_PENDING:
            self._pending.finalize()

    def _thread(self) -> Thread:
        if not hasattr(self._threads, "thread"):
            self._threads.thread = Thread(self.root)
        thread: Thread = self._threads.thread
        return thread


class DeviceSpan:
    """The `with` form."""

    __slots__ = ("_key", "_path", "_timer", "elements")

    def __init__(self, path: DevicePath, key: object, elements: int) -> None:
        self._path = path
        self._key = key
        self.elements = elements

    def __enter__(self) -> DeviceSpan:
        self._timer = self._path.start(self._key)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._path.stop(self._timer, self.elements, failed=kind is not None)
