"""Times bricks by marks on the device. A brick is recorded after the device has reached its marks."""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING

from cbtop.profiler.clocks import DeviceClock, Mark
from cbtop.profiler.hot_path import MAX_HELD, Callbacks, Position, Scope
from cbtop.profiler.path import HostPath, Told, amount_of
from cbtop.profiler.pending import MAX_PENDING, HostTime, Pending
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_FAILED, FLAG_LOOSE, NO_NODE
from cbtop.protocol.vocabulary import NodeKind, SyncMode

if TYPE_CHECKING:
    from cbtop.profiler.held_steps import HeldSteps

DeviceTimer = tuple[Scope, Position, Mark]


class DevicePath:
    """Times every brick, layer and step on the device's clock, `clock`. `pending` keeps the timings until they can be
    recorded.

    `host`, the path for the host's clock, knows where in the graph the caller is. If `kept` is given and the mode is
    DEFERRED, steps wait in `kept` for their times, and no call waits for the device.
    """

    implementation = "python"

    def __init__(
        self,
        clock: DeviceClock,
        host: HostPath,
        mode: SyncMode,
        callbacks: Callbacks,
        pending: Pending,
        kept: HeldSteps | None = None,
    ) -> None:
        self.mode = mode
        self.now_ns = host.now_ns
        self.enter = host.enter
        self.publish = host.publish
        self.kept = kept
        self.is_over = False
        self.give_up = callbacks.give_up
        self._host = host
        self.clock = clock
        self._mark = clock.mark
        self._callbacks = callbacks
        self._define = callbacks.define
        self._pending = pending
        self._waiting = pending.timings
        self._defer = pending.defer
        self._recording = True

    @property
    def held_steps(self) -> HeldSteps | None:
        """The ended steps that wait for their times. None if each step waits for the device at its end."""
        return self.kept if self.mode is SyncMode.DEFERRED else None

    position = property(attrgetter("_host.position"), doc="Where in the graph the caller is.")

    @property
    def recording(self) -> bool:
        """Whether a brick that the caller starts now is timed."""
        return self._recording and self._host.position.recording

    def set_recording(self, on: bool, /) -> None:
        """Turn recording on or off."""
        self._recording = on

    def after_fork(self) -> None:
        """In a forked child, stop timing and drop the waiting steps, because the child cannot use the device."""
        self.is_over = True
        if self.kept is not None:
            self.kept.after_fork()

    def start_brick(self, brick: Hashable, /) -> DeviceTimer | None:
        """Start timing `brick`, at the position of the caller in the graph."""
        if not self._recording:
            return None
        position = self._host.position
        if not position.recording:
            return None
        scope = position.scope
        inside = scope.children.get(brick) or self._define(scope, brick)
        try:
            if self.mode is SyncMode.IMMEDIATE:
                self.clock.synchronize()  # do not count the time of earlier work
            start = self._mark()
        except Exception as error:  # noqa: BLE001 - the loss of a device must not stop the host
            self._callbacks.give_up(error)
            return None
        self.enter(position, inside, 0)
        return inside, position, start

    def stop_brick(self, timer: DeviceTimer | None, elements: int, failed: bool = False) -> None:
        """Record the brick that `timer` timed, once the device has reached its end."""
        if timer is None:
            return
        scope, position, start = timer
        try:
            end = self._mark()
            loose = 0
            if position.scope is scope:
                self.enter(position, scope.parent, 0)  # type: ignore[arg-type]  # only the root has no parent
            elif not position.leave(scope):
                loose = FLAG_LOOSE
            if not self._recording:
                return
            flags = position.lane | loose | FLAG_FAILED if failed else position.lane | loose
            if scope.node >= 0 and scope.work is None:
                self._defer((scope.node | flags, start, end, elements))
            else:
                self.emit(scope, position, start, end, elements, flags)
            # A tuple is the key of a layer, which may wait for the device in any mode. A brick waits only in
            # IMMEDIATE mode, or if MAX_PENDING timings are waiting.
            if isinstance(scope.key, tuple) or self.mode is SyncMode.IMMEDIATE or len(self._waiting) >= MAX_PENDING:
                self._end(scope.key)
        except Exception as error:  # noqa: BLE001 - as in start_brick
            position.leave(scope)
            self._callbacks.give_up(error)

    def brick(self, brick: Hashable, elements: int = 1) -> DeviceSpan:
        """Time a block as `brick`: `with profiler.brick(...)`."""
        return DeviceSpan(self, brick, elements)

    def layer(self, index: int, stack: str = "") -> DeviceSpan:
        """Time a block as a layer: `with profiler.layer(3)`."""
        return DeviceSpan(self, (NodeKind.LAYER, index, stack) if stack else (NodeKind.LAYER, index), 1)

    def end_mark(self) -> Mark:
        """Return a mark at the current end of the device's work."""
        return self._mark()

    def start_mark(self) -> Mark:
        """Return a mark after the device's current work. In IMMEDIATE mode, wait for this work first."""
        if self.mode is SyncMode.IMMEDIATE:
            self.clock.synchronize()
        elif self.kept is not None:
            self.kept.settle()
            self.kept.look()
        return self._mark()

    def emit(
        self, scope: Scope, position: Position | None, start: Mark, end: Mark, elements: int, flags: int
    ) -> None:
        """Defer the record of a call in `scope`.

        If the step at `position` has no name yet, the call is stored in `position.held`.
        """
        if scope.node >= 0 or position is None:
            # Outside of steps, use the host's times when the marks were enqueued.
            if self.held_steps is not None:
                tag = max(scope.node, 0) | flags
                self._callbacks.record(tag, self.held_steps.host_ns(start), self.held_steps.host_ns(end), elements)
            else:
                self._defer((max(scope.node, 0) | flags, start, end, elements))
            if scope.work is not None:
                self._callbacks.amounts(scope, elements)
            # Plain steps do not wait for the device, so their timings could fill `pending`. If it is full, wait now.
            if len(self._waiting) >= MAX_PENDING:
                self._pending.finalize()
        elif position.held is not None and len(position.held) < MAX_HELD:
            position.held.append((scope, start, end, elements, flags))
        else:
            self._callbacks.record(NO_NODE, 0, 0, 0)

    def emit_step(
        self, scope: Scope, start: Mark, end: Mark, tokens: int, flags: int, sequences: object, cached: object
    ) -> None:
        """Defer the records of a step that ran in `scope`: its time, and its numbers of sequences and cached
        positions.
        """
        self.emit(scope, None, start, end, tokens, flags)
        if sequences is not None or cached is not None:
            amounts = HostTime(amount_of(sequences)), HostTime(amount_of(cached))
            self.emit(scope, None, *amounts, 0, FLAG_AMOUNTS)

    def emit_deferred(self, told: Told, flags: int) -> None:
        """Defer the records of calls with known times on the host's clock."""
        for scope, start_ns, end_ns, count in zip(*told, strict=True):
            self.emit(scope, None, HostTime(start_ns), HostTime(end_ns), count, flags)

    def step_ended(self) -> None:
        """Wait for the device. If `held_steps` exists, keep the step there instead until the device has finished
        it.
        """
        if self.held_steps is None:
            self._pending.finalize()

    def _end(self, key: object) -> None:
        """Wait for the device after the call `key`, if the mode requires it here."""
        is_layer = isinstance(key, tuple) and key[0] is NodeKind.LAYER
        if not is_layer or self.mode is not SyncMode.DEFERRED or len(self._pending) >= MAX_PENDING:
            self._pending.finalize()


class DeviceSpan:
    """Times a block on the device, as a brick or a layer."""

    __slots__ = ("_key", "_path", "_timer", "elements")

    def __init__(self, path: DevicePath, key: Hashable, elements: int) -> None:
        self._path = path
        self._key = key
        self.elements = elements

    def __enter__(self) -> DeviceSpan:
        self._timer = self._path.start_brick(self._key)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._path.stop_brick(self._timer, self.elements, failed=kind is not None)
