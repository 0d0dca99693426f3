"""The hot path on a device clock: bricks are marked on the device, and recorded once it has reached the marks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from cbtop.profiler.clocks import DeviceClock, Mark
from cbtop.profiler.hot_path import Place, Thread
from cbtop.profiler.pending import Pending
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
        self._define = define
        self._pending = pending
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
        thread = self._thread()
        place = thread.here.below.get(key) or self._define(thread.here, key)
        thread.here = place
        if self.mode is SyncMode.IMMEDIATE:
            self._clock.synchronize()  # what was enqueued before is not this brick's
        return place, thread, self._clock.mark()

    def stop(self, timer: DeviceTimer | None, elements: int, /, *, failed: bool = False) -> None:
        if timer is None:
            return
        place, thread, start = timer
        end = self._clock.mark()
        thread.leave(place)
        if not self._recording:
            return
        self._pending.put_off(place.node | FLAG_FAILED if failed else place.node, start, end, elements)
        if self._is_due(place.key):
            self._pending.finalize()

    def span(self, key: object, /, elements: int = 1) -> DeviceSpan:
        return DeviceSpan(self, key, elements)

    def layer(self, index: int, /) -> DeviceSpan:
        return DeviceSpan(self, (NodeKind.LAYER, index), 1)

    def _is_due(self, key: object) -> bool:
        """Whether to wait for the device now that what `key` names has ended."""
        match self.mode, key:
            case (SyncMode.IMMEDIATE, _) | (_, (NodeKind.STEP, _)):
                return True
            case SyncMode.PER_LAYER, (NodeKind.LAYER, _):
                return True
            case _:
                return self._pending.is_full

    def _thread(self) -> Thread:
        try:
            thread: Thread = self._threads.thread
        except AttributeError:
            thread = self._threads.thread = Thread(self.root)
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
