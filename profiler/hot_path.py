"""The code that runs at every brick. It only finds the scope, reads the clock and writes the record.

Rules
- Rare cases call other modules: a new scope, a record that the ring refuses, no ring.
- Every operation counts, because a call costs 25 ns and a clock read 40 ns. So the `with` form repeats the lines of
  start and stop, and a profiler exposes these methods without wrappers.
- Only two errors reach the host: the error about a wrong argument, and an interrupt (an exception that is not an
  Exception).
- _hot_path.c does the same in C, with the same names, tests and ring. It is optional.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import repeat
from types import TracebackType
from typing import Any, ClassVar

from cbtop.profiler.positions import finder
from cbtop.protocol.ring import FLAG_FAILED, FLAG_LOOSE, NO_NODE, Record, RingWriter, pack_record
from cbtop.protocol.signals import is_ours, reraise_host_error
from cbtop.protocol.vocabulary import NodeKind

TOO_MANY = 1 << 63  # the lowest number of elements that is too large for a record
BEFORE_ALL_NS = -(1 << 63)
NOWHERE = -1  # an offset that is in no memory, so that writing there fails
# At most this many records wait for the name of their step. Further ones get no node, and count as rejected.
MAX_HELD = 1 << 16

HeldRecord = tuple["Scope", Any, Any, int, int]  # the scope, start, end, elements and flags of a call


class Scope:
    """A node of the graph in the hot path: its number, its parent scope, and its child scopes by key.

    `work` computes the FLOP and bytes of a call from its elements. None: the work is linear or not declared.
    """

    __slots__ = ("children", "key", "node", "parent", "work")

    def __init__(self, key: object, node: int, parent: Scope | None, work: object = None) -> None:
        self.key = key
        self.node = node
        self.parent = parent
        self.work = work
        self.children: dict[object, Scope] = {}


class Position:
    """Where one thread, task or greenlet is in the graph, and the settings of its step.

    `lane` is in the flags of every record, to tell apart steps that run at the same time.
    """

    __slots__ = ("__weakref__", "held", "lane", "recording", "scope", "step", "unit")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.recording = True  # whether the step is recorded; False in a plain step
        self.lane = 0
        self.step: object | None = None
        self.unit: Any = None  # other data of this thread, task or greenlet (instrument/open_step.py)
        self.held: list[HeldRecord] | None = None

    def leave(self, scope: Scope) -> bool:
        """Move to the parent of `scope` and return True. Return False if this position is not inside `scope`."""
        inside: Scope | None = self.scope
        while inside is not None and inside is not scope:
            inside = inside.parent
        if inside is None or inside.parent is None:
            return False
        self.scope = inside.parent
        return True


# The timer of a running brick: scope, position, start in ns. None while recording is off. A tuple, because an object
# costs five times as much.
BrickTimer = tuple[Scope, Position, int] | None


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The profiler's functions for rare cases, which the hot path calls."""

    define: Callable[[Any, object], Any]  # makes a scope for a key that is new in the given scope
    record: Record  # takes the records of calls while no ring is attached
    uncounted: Callable[[object], None]  # called if the `elements` of a call are not a count
    # Called with the scope and the elements after a call in a scope with `work`.
    amounts: Callable[[Any, object], None]
    # Called after an error in cbtop's code or in the clock, to end the recording.
    give_up: Callable[[Exception], None]


class HotPath:
    """Times calls on `clock_ns` and writes a record for each."""

    implementation: ClassVar[str] = "python"
    scope_type: ClassVar[type[Scope]] = Scope

    __slots__ = (
        "__weakref__",
        "_ring",
        "_root",
        "callbacks",
        "clock_ns",
        "define",
        "find_position",
        "forked_ns",
        "is_on",
        "memory",
        "reserve",
    )

    def __init__(self, callbacks: Callbacks, clock_ns: Callable[[], int]) -> None:
        self.callbacks = callbacks
        self.define = callbacks.define
        self.clock_ns = clock_ns
        self._root = Scope(None, NO_NODE, None)
        self.find_position = finder(lambda: Position(self._root))
        self.is_on = True
        self.forked_ns = BEFORE_ALL_NS
        self.attach(None)

    @property
    def position(self) -> Position:
        """The caller's current position in the graph. The next brick begins there."""
        return self.find_position()

    @property
    def recording(self) -> bool:
        """Whether a brick that the caller starts now is timed."""
        return self.is_on and self.find_position().recording

    def start_brick(self, brick: Hashable, /) -> BrickTimer:
        """Start timing a brick at the caller's position in the graph: a BrickId, a BrickDefinition or a name of your
        own.
        """
        if not self.is_on:
            return None
        position = self.find_position()
        if not position.recording:
            return None
        scope = position.scope
        try:
            inside = scope.children[brick]
        except KeyError:
            inside = self.define(scope, brick)
        clock_ns = self.clock_ns
        try:
            start_ns = clock_ns()
        except Exception as error:  # noqa: BLE001 - whatever the host's clock raises must not reach the host
            self.callbacks.give_up(error)
            return None
        position.scope = inside
        return inside, position, start_ns

    def stop_brick(self, timer: BrickTimer, elements: int, failed: bool = False) -> None:
        """Record the brick that `timer` timed, with the number of `elements` that it processed."""
        if timer is None:
            return
        clock_ns = self.clock_ns
        scope, position, start_ns = timer
        try:
            end_ns = clock_ns()
        except Exception as error:  # noqa: BLE001 - an error of the host's clock must not reach the host
            position.leave(scope)
            self.callbacks.give_up(error)
            return
        loose = 0
        if position.scope is scope:
            position.scope = scope.parent  # type: ignore[assignment]  # only the root has no parent
        elif not position.leave(scope):
            if start_ns <= self.forked_ns:
                return
            loose = FLAG_LOOSE
        if self.is_on:
            tag = position.lane | scope.node | FLAG_FAILED if failed else position.lane | scope.node
            if loose or scope.node < 0 or scope.work is not None:
                self.record_seldom(scope, position, start_ns, end_ns, elements, FLAG_FAILED * failed | loose)
                return
            at, number = next(self.reserve)
            try:
                if elements >= TOO_MANY:
                    raise OverflowError
                pack_record(self.memory, at, start_ns, end_ns, elements, tag, number)
            except BaseException as error:
                self.write_refused(at, number, tag, start_ns, end_ns, elements)
                if not is_ours(error):  # an interrupt, such as KeyboardInterrupt, reaches the host
                    raise

    def brick(self, brick: Hashable, elements: int = 1) -> Span:
        """Time a block: `with profiler.brick(BrickId.RMS_NORM, elements=4096):`. An exception marks it as failed."""
        # A Span has no __init__, because calling it costs as much as both clock reads.
        span = Span()
        span.hot_path = self
        span.key = brick
        span.elements = elements
        return span

    def layer(self, index: int, stack: str = "") -> Span:
        """Put a block into a layer: `with profiler.layer(3):`. `stack` is the name of one of several layer stacks."""
        return self.brick((NodeKind.LAYER, index, stack) if stack else (NodeKind.LAYER, index))

    def set_recording(self, on: bool, /) -> None:
        """Turn recording on or off."""
        self.is_on = bool(on)

    def after_fork(self) -> None:
        """In a forked child, drop the calls that began before the fork, because they belong to the parent."""
        self.forked_ns = self.clock_ns()

    def enter(self, position: Position, scope: Scope, start_ns: int, /) -> None:
        """Move `position` to `scope`, which began at `start_ns`.

        The compiled class also writes it into the ring.
        """
        position.scope = scope

    def publish(self, position: Position, scope: Scope, start_ns: int, tokens: object, sequences: object, /) -> None:
        """Do nothing. The compiled class writes `scope` and the step's size into the ring, for viewers."""

    def now_ns(self) -> int:
        """Read the clock that times all bricks."""
        return self.clock_ns()

    def attach(self, ring: RingWriter | None, /) -> Record:
        """Write records into `ring` from now on. Returns a function that writes one record."""
        if ring is None:
            # Writing into this empty memory fails, so that the record goes to `callbacks.record`.
            self.memory: bytearray | memoryview = bytearray()
            self.reserve: Iterator[tuple[int, int]] = repeat((NOWHERE, 0))
            self._ring: RingWriter | None = None
            return self.callbacks.record
        self._ring, self.memory, self.reserve = ring, ring.memory, ring.reserve
        return self._write

    def _write(self, tag: int, start_ns: int, end_ns: int, elements: int) -> None:
        at, number = next(self.reserve)
        try:
            if elements >= TOO_MANY:
                raise OverflowError
            pack_record(self.memory, at, start_ns, end_ns, elements, tag, number)
        except BaseException as error:
            self.write_refused(at, number, tag, start_ns, end_ns, elements)
            if not is_ours(error):
                raise

    def record_seldom(
        self, scope: Scope, position: Position, start_ns: int, end_ns: int, elements: int, flags: int
    ) -> None:
        """Record a call that was stopped out of order, that has `work`, or that waits for its step's name."""
        if scope.node >= 0:
            self._write(position.lane | scope.node | flags, start_ns, end_ns, elements)
            if scope.work is not None:
                self.callbacks.amounts(scope, elements)
        elif position.held is not None and len(position.held) < MAX_HELD:
            position.held.append((scope, start_ns, end_ns, self._counted(elements), flags))
        else:
            self._write(NO_NODE, 0, 0, 0)

    def _counted(self, elements: object) -> int:
        """Return `elements` as an int, so that no object of the host is kept alive. -1 if it is not a count."""
        try:
            return operator.index(elements)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - converting an object of the host to a number may raise any error
            reraise_host_error(error)
            self.callbacks.uncounted(elements)
            return -1

    def write_refused(self, at: int, number: int, tag: int, start_ns: int, end_ns: int, elements: int) -> None:
        """Handle a record that was not written.

        The ring may be missing, the record may be the first of a lap (a pass through the ring), or `elements` may not
        be a count.
        """
        if at == NOWHERE:
            try:
                self.callbacks.record(tag, start_ns, end_ns, elements)
            except Exception as error:  # noqa: BLE001 - a recorder that fails must not reach the host
                self.callbacks.give_up(error)
        elif self._ring is not None and not self._ring.refused(at, number, tag, start_ns, end_ns, elements):
            self.callbacks.uncounted(elements)


class Span:
    """Times a block as a brick or a layer."""

    __slots__ = ("_position", "_scope", "_start_ns", "elements", "hot_path", "key")

    elements: int  # the caller may set the number of elements inside the `with` block
    hot_path: HotPath
    key: Hashable
    _scope: Scope
    _start_ns: int
    _position: Position | None

    def __enter__(self) -> Span:
        hot_path = self.hot_path
        self._position = None
        if not hot_path.is_on:
            return self
        position = hot_path.find_position()
        if not position.recording:
            return self
        scope = position.scope
        try:
            inside = scope.children[self.key]
        except KeyError:
            inside = hot_path.define(scope, self.key)
        clock_ns = hot_path.clock_ns
        try:
            self._start_ns = clock_ns()
        except Exception as error:  # noqa: BLE001 - an error of the host's clock must not reach the host
            hot_path.callbacks.give_up(error)
            return self
        self._scope = position.scope = inside
        self._position = position
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        position = self._position
        if position is None:
            return
        hot_path = self.hot_path
        scope = self._scope
        clock_ns = hot_path.clock_ns
        try:
            end_ns = clock_ns()
        except Exception as error:  # noqa: BLE001 - an error of the host's clock must not reach the host
            position.leave(scope)
            hot_path.callbacks.give_up(error)
            return
        loose = 0
        if position.scope is scope:
            position.scope = scope.parent  # type: ignore[assignment]  # only the root has none
        elif not position.leave(scope):
            if self._start_ns <= hot_path.forked_ns:
                return
            loose = FLAG_LOOSE
        if hot_path.is_on:
            tag = position.lane | scope.node if kind is None else position.lane | scope.node | FLAG_FAILED
            if loose or scope.node < 0 or scope.work is not None:
                flags = loose if kind is None else loose | FLAG_FAILED
                hot_path.record_seldom(scope, position, self._start_ns, end_ns, self.elements, flags)
                return
            at, number = next(hot_path.reserve)
            try:
                if self.elements >= TOO_MANY:
                    raise OverflowError
                pack_record(hot_path.memory, at, self._start_ns, end_ns, self.elements, tag, number)
            except BaseException as error:
                hot_path.write_refused(at, number, tag, self._start_ns, end_ns, self.elements)
                if not is_ours(error):
                    raise


def chosen() -> type[HotPath]:
    """Return the compiled hot path. Without it, or if CBTOP_PURE_PYTHON is set, return the one in Python."""
    if os.environ.get("CBTOP_PURE_PYTHON"):
        return HotPath
    try:
        from cbtop.profiler import _hot_path
    except ImportError:  # at installation, the compiler or the headers of Python were missing
        return HotPath
    compiled: type[HotPath] = _hot_path.HotPath
    return compiled
