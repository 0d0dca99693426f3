"""What runs at every brick: find the place in the graph, read the clock, write the record. Nothing else.

Rules
- What happens seldom (a new place, a record that the ring refuses, no ring) is a call out of here.
- Each step counts: a call costs 25 ns where the clock costs 40. So BrickProfiler inherits these methods rather than
  wrap them, and the `with` form repeats the few lines of start and stop.
- The same hot path exists once more in C, in _hot_path.c: same names, same tests, same ring. It is optional.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from itertools import repeat
from types import TracebackType
from typing import ClassVar

from cbtop.protocol.ring import FLAG_FAILED, NO_NODE, RECORD, Record, RingWriter
from cbtop.protocol.vocabulary import NodeKind

pack_into = RECORD.pack_into
NOWHERE = -1  # a place that no memory has


class Place:
    """A place in the graph: its node, the place above, and the places below by what was started there."""

    __slots__ = ("above", "below", "key", "node")

    def __init__(self, key: object, node: int, above: Place | None) -> None:
        self.key = key
        self.node = node
        self.above = above
        self.below: dict[object, Place] = {}


class Thread:
    """Where in the graph one thread is."""

    __slots__ = ("here",)

    def __init__(self, here: Place) -> None:
        self.here = here

    def leave(self, place: Place) -> None:
        """Go to the place above `place`, if it is one that this thread is in."""
        inside: Place | None = self.here
        while inside is not None and inside is not place:
            inside = inside.above
        if inside is not None and inside.above is not None:
            self.here = inside.above


# Where, whose, start ns: a tuple is made five times faster than an object. None while nothing is recorded.
BrickTimer = tuple[Place, Thread, int] | None


class HotPath:
    """Times what is started and stopped, and writes each as one record: the base of BrickProfiler.

    `define(here, key)` gives the place of a key that nobody has started `here` yet. While no ring is attached,
    records go to `record`.
    """

    implementation: ClassVar[str] = "python"
    place: ClassVar[type[Place]] = Place

    # Found at once, however many attributes a subclass adds.
    __slots__ = (
        "_clock_ns",
        "_define",
        "_memory",
        "_record",
        "_recording",
        "_reserve",
        "_ring",
        "_root",
        "_threads",
    )

    def __init__(self, define: Callable[[Place, object], Place], clock_ns: Callable[[], int], record: Record) -> None:
        self._define = define
        self._clock_ns = clock_ns
        self._record = record
        self._root = Place(None, NO_NODE, None)
        self._threads = threading.local()  # each thread's Thread, as `thread`
        self._recording = True
        self.attach(None)

    @property
    def here(self) -> Place:
        """Where in the graph the calling thread is: what it starts next is started here."""
        return (getattr(self._threads, "thread", None) or self._first_look()).here

    @property
    def recording(self) -> bool:
        """Whether what is started now is timed."""
        return self._recording

    def start_brick(self, brick: Hashable, /) -> BrickTimer:
        """Start timing `brick` where this thread is: a BrickId, a BrickDefinition, or a name of your own."""
        if not self._recording:
            return None
        try:
            thread = self._threads.thread
        except AttributeError:
            thread = self._first_look()
        here = thread.here
        try:
            place = here.below[brick]
        except KeyError:
            place = self._define(here, brick)
        thread.here = place
        clock_ns = self._clock_ns
        return place, thread, clock_ns()

    def stop_brick(self, timer: BrickTimer, elements: int, failed: bool = False) -> None:
        """Record the brick that `timer` timed, with the `elements` it worked on."""
        if timer is None:
            return
        clock_ns = self._clock_ns
        end_ns = clock_ns()
        place, thread, start_ns = timer
        if thread.here is place:
            thread.here = place.above  # type: ignore[assignment]  # only the root has none
        else:
            thread.leave(place)
        if self._recording:
            tag = place.node | FLAG_FAILED if failed else place.node
            at, number = next(self._reserve)
            try:
                pack_into(self._memory, at, start_ns, end_ns, elements, tag, number)
            except BaseException as error:
                self._refused(at, number, tag, start_ns, end_ns, elements)
                if not isinstance(error, Exception):  # an interrupt is not ours to swallow
                    raise

    def brick(self, brick: Hashable, elements: int = 1) -> Span:
        """`with profiler.brick(BrickId.RMS_NORM, elements=4096):` times the block; an exception marks it failed."""
        span = Span()  # without an __init__, which would cost as much as both clock reads
        span._hot_path = self
        span._key = brick
        span.elements = elements
        return span

    def layer(self, index: int, /) -> Span:
        """`with profiler.layer(3):` makes what runs inside part of layer 3."""
        return self.brick((NodeKind.LAYER, index))

    def switch(self, on: bool, /) -> None:
        """Record from now on, or do not."""
        self._recording = bool(on)

    def attach(self, ring: RingWriter | None, /) -> Record:
        """Write into `ring` from now on; gives what writes a record of its own beside this hot path."""
        if ring is None:
            # Here `pack_into` refuses to write; each record then takes the slow way to `record`.
            self._memory: bytearray | memoryview = bytearray()
            self._reserve: Iterator[tuple[int, int]] = repeat((NOWHERE, 0))
            self._ring: RingWriter | None = None
            return self._record
        self._ring, self._memory, self._reserve = ring, ring.memory, ring.reserve
        return ring.record

    def _first_look(self) -> Thread:
        thread = self._threads.thread = Thread(self._root)
        return thread

    def _refused(self, at: int, number: int, tag: int, start_ns: int, end_ns: int, elements: int) -> None:
        if at == NOWHERE:
            self._record(tag, start_ns, end_ns, elements)
        elif self._ring is not None:
            self._ring.refused(at, number, tag, start_ns, end_ns, elements)


class Span:
    """The `with` form of a brick, a layer or a step."""

    __slots__ = ("_hot_path", "_key", "_place", "_start_ns", "_thread", "elements")

    elements: int  # may be set inside the block, where it is known only then
    _hot_path: HotPath
    _key: Hashable
    _place: Place
    _start_ns: int
    _thread: Thread | None

    def __enter__(self) -> Span:
        hot_path = self._hot_path
        if not hot_path._recording:
            self._thread = None
            return self
        try:
            thread = hot_path._threads.thread
        except AttributeError:
            thread = hot_path._first_look()
        self._thread = thread
        here = thread.here
        try:
            place = here.below[self._key]
        except KeyError:
            place = hot_path._define(here, self._key)
        self._place = thread.here = place
        clock_ns = hot_path._clock_ns
        self._start_ns = clock_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        thread = self._thread
        if thread is None:
            return
        hot_path = self._hot_path
        clock_ns = hot_path._clock_ns
        end_ns = clock_ns()
        place = self._place
        if thread.here is place:
            thread.here = place.above  # type: ignore[assignment]  # only the root has none
        else:
            thread.leave(place)
        if hot_path._recording:
            tag = place.node if kind is None else place.node | FLAG_FAILED
            at, number = next(hot_path._reserve)
            try:
                pack_into(hot_path._memory, at, self._start_ns, end_ns, self.elements, tag, number)
            except BaseException as error:
                hot_path._refused(at, number, tag, self._start_ns, end_ns, self.elements)
                if not isinstance(error, Exception):
                    raise


def chosen() -> type[HotPath]:
    """The compiled hot path where it was built, unless CBTOP_PURE_PYTHON is set to something."""
    if os.environ.get("CBTOP_PURE_PYTHON"):
        return HotPath
    try:
        from cbtop.profiler import _hot_path
    except ImportError:  # no compiler or no headers where it was installed
        return HotPath
    compiled: type[HotPath] = _hot_path.HotPath
    return compiled
