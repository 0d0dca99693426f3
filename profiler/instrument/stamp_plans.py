"""Plans the stamps (kernels that store the device's time) in a captured graph: their places, and the layers and
bricks between these places.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise

from cbtop.profiler.device.graph_surgery import START, StampSites
from cbtop.profiler.instrument.capturing import OTHER, CapturedCall, Last


class StampedInterval:
    """A layer or brick between two stamps. `keys` are its keys, from the step inwards."""

    __slots__ = ("begin", "elements", "end", "keys")

    def __init__(self, keys: tuple[Hashable, ...], begin: int, end: int, elements: int) -> None:
        self.keys = keys
        self.begin = begin
        self.end = end
        self.elements = elements


class StampPlan:
    """The places of a graph that are stamped, and the intervals between them. `shape` has all possible places of
    stamps.
    """

    def __init__(self, shape: StampSites, spans: list[CapturedCall]) -> None:
        self.shape = shape
        # Keys, begin, end and elements of a layer or brick.
        self._found: list[tuple[tuple[Hashable, ...], int, int, int]] = []
        self.left_out = 0  # number of calls that have no place for a stamp at their begin or end
        first, last = shape.places[START], shape.places[shape.end]
        self._walk(spans, (), first, last, names_gaps=True)
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

    def _walk(
        self, spans: list[CapturedCall], keys: tuple[Hashable, ...], begin: int, end: int, *, names_gaps: bool
    ) -> None:
        """Store the intervals of `spans`, which are all between the places `begin` and `end`.

        Spans inside a span are stored before it. If `names_gaps`, the gaps between spans are stored, too.
        """
        at, some = begin, False
        for span in spans:
            first, last = self._number(span.begin), self._number(span.end)
            if first is None or last is None or not at <= first <= last <= end:
                self.left_out += 1
                before = len(self._found)
                self._walk(span.inside, keys if span.key is None else (*keys, span.key), at, end, names_gaps=False)
                at = max([at, *(found[2] for found in self._found[before:])])
                continue
            if first == last:  # skip a call that runs nothing on the device
                continue
            if span.key is None:  # skip the call of the model itself
                if names_gaps and first > at:
                    self._found.append(((*keys, OTHER), at, first, 0))
                self._walk(span.inside, keys, first, last, names_gaps=True)
                at, some = last, True
                continue
            if names_gaps and first > at:
                self._found.append(((*keys, OTHER), at, first, 0))
            key = span.key
            is_layer = isinstance(key, tuple)
            self._walk(span.inside, (*keys, key), first, last, names_gaps=is_layer)
            self._found.append(((*keys, key), first, last, span.elements))
            at, some = last, True
        if names_gaps and some and at < end:
            self._found.append(((*keys, OTHER), at, end, 0))


def times_without_stamps(times: list[int], cost_ns: float) -> list[int]:
    """Return the times at the stamped places of a graph in ns, relative to the first place. The cost of one stamp,
    `cost_ns`, is subtracted from each interval.
    """
    at, found = 0.0, [0]
    for before, after in pairwise(times):
        at += max(0.0, after - before - cost_ns)
        found.append(round(at))
    return found
