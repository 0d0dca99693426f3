"""What runs at every brick: find the place in the graph, read the clock, write the record. Nothing else.

Rules
- What happens seldom (a new place, a record that the ring refuses, no ring) is a call out of here.
- The functions are closures: all they touch is a local or a cell. Each step counts, so the `with` form repeats the
  few lines of `start` and `stop` rather than pay two calls more (30 ns each, where the clock is 40).
- The same hot path exists once more in C, in _hot_path.c: same names, same tests, same ring.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from itertools import repeat
from types import TracebackType
from typing import Protocol

from cbtop.protocol.ring import FIRST_RECORD, FLAG_FAILED, NO_NODE, RECORD, Record, RingWriter
from cbtop.protocol.vocabulary import NodeKind


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


class _Threads(threading.local):
    """The thread that asks, as `thread`; each begins at the root."""

    def __init__(self, root: Place) -> None:
        self.thread = Thread(root)


BrickTimer = tuple[Place, Thread, int]  # where, whose, start ns; a tuple is made five times faster than an object


class Span(Protocol):
    """The `with` form of a brick, a layer or a step."""

    elements: int  # may be set inside the block, where it is known only then

    def __enter__(self) -> Span: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class HotPath:
    """Times what is started and stopped, and writes each as one record.

    `define(here, key)` gives the place of a key that nobody has started `here` yet. While no ring is attached,
    records go to `record`.
    """

    start: Callable[[object], BrickTimer]
    stop: Callable[..., None]
    span: Callable[..., Span]
    layer: Callable[[int], Span]
    switch: Callable[[bool], None]
    attach: Callable[[RingWriter | None], Record]

    def __init__(self, define: Callable[[Place, object], Place], clock_ns: Callable[[], int], record: Record) -> None:
        root = Place(None, NO_NODE, None)
        threads = _Threads(root)
        off: BrickTimer = (root, Thread(root), 0)
        recording = True
        pack_into = RECORD.pack_into
        no_ring = bytearray()
        memory: bytearray | memoryview = no_ring
        # Without a ring the place to write at is one that `pack_into` refuses.
        reserve: Callable[[], tuple[int, int]] = repeat((-1, 0)).__next__
        lap: Callable[[], object] = int

        def start(key: object) -> BrickTimer:
            if not recording:
                return off
            thread = threads.thread
            here = thread.here
            try:
                place = here.below[key]
            except KeyError:
                place = define(here, key)
            thread.here = place
            return place, thread, clock_ns()

        def stop(timer: BrickTimer, elements: int, failed: bool = False) -> None:
            if timer is off:
                return
            end_ns = clock_ns()
            place, thread, start_ns = timer
            if thread.here is place:
                thread.here = place.above  # type: ignore[assignment]  # only the root has none
            else:
                thread.leave(place)
            if recording:
                tag = place.node | FLAG_FAILED if failed else place.node
                at, sequence = reserve()
                try:
                    pack_into(memory, at, start_ns, end_ns, elements, tag, sequence)
                except struct.error:
                    refused(at, sequence, tag, start_ns, end_ns, elements)
                if at == FIRST_RECORD:
                    lap()

        def refused(at: int, sequence: int, tag: int, start_ns: int, end_ns: int, elements: int) -> None:
            if at < FIRST_RECORD:
                record(tag, start_ns, end_ns, elements)
            elif memory is not no_ring:  # the caller's elements are no 64-bit integer: keep the count
                pack_into(memory, at, 0, 0, 0, NO_NODE, sequence)

        class TimedSpan:
            __slots__ = ("elements", "key", "place", "start_ns", "thread")

            elements: int
            key: object
            place: Place
            start_ns: int
            thread: Thread | None

            def __enter__(self) -> TimedSpan:
                if not recording:
                    self.thread = None
                    return self
                self.thread = thread = threads.thread
                here = thread.here
                try:
                    place = here.below[self.key]
                except KeyError:
                    place = define(here, self.key)
                self.place = thread.here = place
                self.start_ns = clock_ns()
                return self

            def __exit__(
                self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
            ) -> None:
                thread = self.thread
                if thread is None:
                    return
                end_ns = clock_ns()
                place = self.place
                if thread.here is place:
                    thread.here = place.above  # type: ignore[assignment]  # only the root has none
                else:
                    thread.leave(place)
                if recording:
                    tag = place.node if kind is None else place.node | FLAG_FAILED
                    at, sequence = reserve()
                    try:
                        pack_into(memory, at, self.start_ns, end_ns, self.elements, tag, sequence)
                    except struct.error:
                        refused(at, sequence, tag, self.start_ns, end_ns, self.elements)
                    if at == FIRST_RECORD:
                        lap()

        def span(key: object, elements: int = 1) -> Span:
            made = TimedSpan()  # no __init__: it would cost as much as both clock reads
            made.key = key
            made.elements = elements
            return made

        def layer(index: int) -> Span:
            return span((NodeKind.LAYER, index))

        def switch(on: bool) -> None:
            nonlocal recording
            recording = on

        def attach(ring: RingWriter | None) -> Record:
            nonlocal memory, reserve, lap
            if ring is None:
                memory, reserve, lap = no_ring, repeat((-1, 0)).__next__, int
                return record
            memory, reserve, lap = ring.memory, ring.reserve, ring.lap
            return ring.record

        self.root = root
        self.start, self.stop, self.span, self.layer = start, stop, span, layer
        self.switch, self.attach = switch, attach
