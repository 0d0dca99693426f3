"""Plans the stamps (kernels that store the device's time) in a captured graph: their positions, and which layers and
bricks are between them.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise

from cbtop.profiler.definitions import OwnOperations
from cbtop.profiler.device.graph_surgery import START, StampSites
from cbtop.profiler.instrument.capturing import OTHER, CapturedCall, Keys, Last, place


class StampedInterval:
    """A layer or brick between two stamps. `keys` lead from the step down to it."""

    __slots__ = ("begin", "elements", "end", "keys")

    def __init__(self, keys: tuple[Hashable, ...], begin: int, end: int, elements: int) -> None:
        self.keys = keys
        self.begin = begin
        self.end = end
        self.elements = elements


class StampPlan:
    """The stamps of a graph, and the layers and bricks between them.

    `shape` has all places that can have a stamp.
    """

    def __init__(self, shape: StampSites, spans: list[CapturedCall]) -> None:
        self.shape = shape
        # The keys of a layer or brick, its begin and end, and its elements.
        self._found: list[tuple[tuple[Hashable, ...], int, int, int]] = []
        self.left_out = 0  # number of calls without a possible stamp at their begin or end
        first, last = shape.places[START], shape.places[shape.end]
        self._walk(spans, (), first, last, (OTHER,))
        numbers = sorted({first, last}.union(*({begin, end} for _, begin, end, _ in self._found)))
        place_of = {number: place for place, number in shape.places.items()}
        self.places = [place_of[number] for number in numbers]
        at = {number: index for index, number in enumerate(numbers)}
        self.intervals = [
            StampedInterval(keys, at[begin], at[end], elements) for keys, begin, end, elements in self._found
        ]

    def _number(self, last: Last) -> int | None:
        place = self.shape.place_of(last)
        return None if place is None else self.shape.places[place]

    def _walk(self, spans: list[CapturedCall], keys: Keys, begin: int, end: int, gap: Keys | None) -> None:
        """Store the intervals of `spans`, which are all between `begin` and `end`.

        Inner spans are stored before outer ones. If `gap` is given, the gaps between spans are stored under these
        keys.
        """
        at, some = begin, False
        for span in spans:
            first, last = self._number(span.begin), self._number(span.end)
            if first is None or last is None or not at <= first <= last <= end:
                self.left_out += 1
                before = len(self._found)
                is_around = span.key is not None and not isinstance(span.key, OwnOperations)
                self._walk(span.inside, (*keys, span.key) if is_around else keys, at, end, None)
                at = max([at, *(found[2] for found in self._found[before:])])
                continue
            if first == last:  # skip a call that ran nothing on the device
                continue
            if gap is not None and first > at:
                self._found.append((gap, at, first, 0))
            key, before = span.key, len(self._found)
            if key is None:  # the call is the model's
                self._walk(span.inside, keys, first, last, (*keys, span.own or OTHER))
            elif isinstance(key, OwnOperations):
                self._walk(span.inside, keys, first, last, (*keys, key))
                if len(self._found) == before:
                    self._found.append(((*keys, key), first, last, span.elements))
            else:
                inside = *keys, key
                self._walk(span.inside, inside, first, last, place(inside) if isinstance(key, tuple) else None)
                self._found.append((inside, first, last, span.elements))
            at, some = last, True
        if gap is not None and some and at < end:
            self._found.append((gap, at, end, 0))


def times_without_stamps(times: list[int], cost_ns: float) -> list[int]:
    """Return the times in ns at the stamps of a graph, relative to the first. The cost of a stamp, `cost_ns`, is
    subtracted from each interval.
    """
    at, found = 0.0, [0]
    for before, after in pairwise(times):
        at += max(0.0, after - before - cost_ns)
        found.append(round(at))
    return found
