"""Paths time bricks, layers and steps on one clock: the host's (hot_path.py) or a device's (device_path.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import starmap
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from cbtop.profiler.hot_path import MAX_HELD, Callbacks, HotPath, Position, Scope, chosen
from cbtop.protocol.ring import FLAG_AMOUNTS, NO_NODE, UNKNOWN_AMOUNT, Record, RingWriter

if TYPE_CHECKING:
    from cbtop.profiler.held_steps import HeldSteps

MOST = (1 << 31) - 1  # largest number of sequences or positions that is recorded for a step


class TimedBlock(Protocol):
    """Times a block as a brick or a layer."""

    elements: int

    def __enter__(self) -> TimedBlock: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


# Calls that were timed elsewhere, as four columns: scopes, starts in ns, ends in ns, elements.
Told = tuple[Sequence[Scope], Sequence[int], Sequence[int], Sequence[int]]


class Path(Protocol):
    """The interface of HostPath and DevicePath."""

    implementation: str
    give_up: Callable[[Exception], None]  # called if this path fails to time something

    @property
    def is_over(self) -> bool:
        """Whether this path has stopped timing for good."""

    @property
    def held_steps(self) -> HeldSteps | None:
        """The ended steps that wait for their times.

        None if the times of a step are always known at its end.
        """

    @property
    def position(self) -> Position:
        """The caller's current position in the graph. The next brick begins there."""

    @property
    def recording(self) -> bool:
        """Whether a brick that the caller starts now is timed."""

    def start_brick(self, brick: Hashable, /) -> Any:
        """Start timing `brick`. Returns the timer for `stop_brick`."""

    def stop_brick(self, timer: Any, elements: int, failed: bool = False) -> None:
        """Record the call that `timer` timed."""

    def brick(self, brick: Hashable, elements: int = 1) -> TimedBlock:
        """Return a context manager that times a block as `brick`."""

    def layer(self, index: int, stack: str = "") -> TimedBlock:
        """Return a context manager that times a block as a layer."""

    def set_recording(self, on: bool, /) -> None:
        """Turn recording on or off."""

    def enter(self, position: Position, scope: Scope, start_ns: int, /) -> None:
        """Move `position` to `scope`, which began at `start_ns`."""

    def publish(self, position: Position, scope: Scope, start_ns: int, tokens: object, sequences: object, /) -> None:
        """Tell viewers through the ring that `position` has been in `scope` since `start_ns`, and how large its step
        is.

        The size is `tokens`, or `sequences` if `tokens` is not a number above 0. The position does not move.
        """

    def after_fork(self) -> None:
        """In a forked child, drop the running calls, because they belong to the parent."""

    def now_ns(self) -> int:
        """Read the host's monotonic clock."""

    def start_mark(self) -> Any:
        """Return a mark for a call that begins now, on the clock that times bricks."""

    def end_mark(self) -> Any:
        """Return a mark for a call that ends now, on the clock that times bricks."""

    def emit(self, scope: Scope, position: Position | None, start: Any, end: Any, elements: int, flags: int) -> None:
        """Record a call in `scope` between two marks.

        If the step at `position` has no name yet, the call is stored until it has one.
        """

    def emit_step(
        self, scope: Scope, start: Any, end: Any, tokens: int, flags: int, sequences: object, cached: object
    ) -> None:
        """Record a step that ran in `scope`.

        `sequences` and `cached` are the numbers of sequences and of cached positions, or None if unknown.
        """

    def emit_deferred(self, told: Told, flags: int) -> None:
        """Record calls that were timed elsewhere. Their times are on the host's clock."""

    def step_ended(self) -> None:
        """Finish the recording after the caller's outermost step has ended.

        A device path may wait for its device.
        """


def amount_of(value: object) -> int:
    """Return `value` if it can be recorded as an amount of work, else UNKNOWN_AMOUNT."""
    return value if isinstance(value, int) and 0 <= value <= MOST else UNKNOWN_AMOUNT


def emit_at_once(
    callbacks: Callbacks,
    scope: Scope,
    position: Position | None,
    start_ns: int,
    end_ns: int,
    elements: int,
    flags: int,
) -> None:
    """Record a call in `scope` with times of the host.

    If the step at `position` has no name yet, the call is stored until it has one.
    """
    if scope.node >= 0 or position is None:
        callbacks.record(max(scope.node, NO_NODE) | flags, start_ns, end_ns, elements)
        if scope.work is not None:
            callbacks.amounts(scope, elements)
    elif position.held is not None and len(position.held) < MAX_HELD:
        position.held.append((scope, start_ns, end_ns, elements, flags))
    else:
        callbacks.record(NO_NODE, 0, 0, 0)


class HostPath:
    """Times bricks on the host's clock. The hot path provides the methods that run at every brick."""

    is_over = False
    held_steps = None

    def __init__(self, hot_path: HotPath, callbacks: Callbacks) -> None:
        self.implementation = hot_path.implementation
        self.give_up = callbacks.give_up
        self.start_brick = hot_path.start_brick
        self.stop_brick = hot_path.stop_brick
        self.brick = hot_path.brick
        self.layer = hot_path.layer
        self.set_recording = hot_path.set_recording
        self.enter = hot_path.enter
        self.publish = hot_path.publish
        self.after_fork = hot_path.after_fork
        self.now_ns = self.start_mark = self.end_mark = hot_path.now_ns
        self.hot_path = hot_path
        self._callbacks = callbacks
        self._record = callbacks.record

    # Every step reads both properties below. attrgetter runs no Python code, which the model would have evicted from
    # the processor's caches.
    position = property(attrgetter("hot_path.position"), doc="Where in the graph the caller is.")
    recording = property(attrgetter("hot_path.recording"), doc="Whether what the caller starts now is timed.")

    def attach(self, ring: RingWriter | None, /) -> Record:
        """Write records into `ring` from now on. Returns a function that writes one record."""
        self._record = self.hot_path.attach(ring)
        return self._record

    def emit(self, scope: Scope, position: Position | None, start: int, end: int, elements: int, flags: int) -> None:
        """Record a call that ran in `scope`."""
        if scope.node > NO_NODE and scope.work is None:  # the usual case, written out to save a call
            self._record(scope.node | flags, start, end, elements)
        else:
            emit_at_once(self._callbacks, scope, position, start, end, elements, flags)

    def emit_step(
        self, scope: Scope, start: int, end: int, tokens: int, flags: int, sequences: object, cached: object
    ) -> None:
        """Record a step that ran in `scope`."""
        if scope.work is not None:
            emit_at_once(self._callbacks, scope, None, start, end, tokens, flags)
        else:
            self._record(max(scope.node, NO_NODE) | flags, start, end, tokens)
        if sequences is not None or cached is not None:
            if type(sequences) is not int or not 0 <= sequences <= MOST:
                sequences = amount_of(sequences)
            if type(cached) is not int or not 0 <= cached <= MOST:
                cached = amount_of(cached)
            self._record(max(scope.node, NO_NODE) | FLAG_AMOUNTS, sequences, cached, 0)

    def emit_deferred(self, told: Told, flags: int) -> None:
        """Record calls that were timed elsewhere. A step may have hundreds, so this must be fast."""
        scopes, starts_ns, ends_ns, elements = told
        if all(scope.node > NO_NODE and scope.work is None for scope in scopes):
            tags = [scope.node | flags for scope in scopes]
            deque(starmap(self._record, zip(tags, starts_ns, ends_ns, elements, strict=True)), maxlen=0)
        else:
            for scope, start_ns, end_ns, count in zip(*told, strict=True):
                self.emit(scope, None, start_ns, end_ns, count, flags)

    def step_ended(self) -> None:
        """Do nothing, because this path has no device to wait for."""


def host_path(callbacks: Callbacks, clock_ns: Any) -> HostPath:
    """Return a path that times bricks on `clock_ns`, with the compiled hot path if it was built."""
    return HostPath(chosen()(callbacks, clock_ns), callbacks)
