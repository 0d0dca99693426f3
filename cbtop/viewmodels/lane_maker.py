"""Make a lane of a timeline from the records of one track: rows of spans, and named gaps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cbtop.client.recent import Hole
from cbtop.exporters.records import TimedRecord
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.time_breakdown import BETWEEN_LAYERS, INSIDE_LAYERS
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from cbtop.viewmodels.lanes import (
    AFTER,
    BRICKS,
    CUT_SHORT,
    ELSEWHERE,
    NOT_LOOKED_INTO,
    NOTHING,
    UNATTRIBUTED,
    UNNAMED,
    Gap,
    Lane,
    Row,
    TimelineSpan,
)


class LaneMaker:
    """Makes a lane of a timeline from the records of one track.

    The timeline begins at `begin_ns`. The lane begins `since_ns` after that moment.
    """

    def __init__(self, nodes: NodeTable, begin_ns: int, names: GapNames, since_ns: int, *, has_steps: bool) -> None:
        self._nodes = nodes
        self._begin_ns = begin_ns
        self._names = names
        self._has_steps = has_steps
        self._told_ns = since_ns  # Until this moment (ns), all time of the lane is assigned to a brick or a gap.
        self._gaps: list[Gap] = []

    def lane(self, name: str, records: Sequence[tuple[int, TimedRecord]], length_ns: int) -> Lane:
        """Return the lane of `records`, which come with their depths (numbers of records around them)."""
        layers = self._layers(records)
        bricks = self._has_steps + layers
        rows: dict[int, list[TimelineSpan]] = {}
        open_: list[TimelineSpan] = []  # the spans that may contain the next record, outermost first
        # id of a node -> (node, its name, whether it is a layer or a step)
        known: dict[int, tuple[Node, str, bool]] = {}
        for depth, record in records:
            self._close(open_, depth, bricks)
            start_ns = record.start_ns - self._begin_ns
            is_in_brick = bool(open_) and open_[-1].level >= bricks
            if not is_in_brick:
                self._gap(start_ns, open_)
            found = known.get(record.node)
            if found is None:
                one = self._nodes[record.node]
                is_container = one.kind is NodeKind.LAYER or is_step(self._nodes, one.id)
                found = known[record.node] = one, display_name(one), is_container
            node, title, is_container = found
            level = bricks
            if is_in_brick:
                level += sum([one.level >= bricks for one in open_])
            elif is_container:
                level = len(open_)
            span = TimelineSpan(
                start_ns,
                record.end_ns - record.start_ns,
                level,
                node.id,
                title,
                node.kind,
                node.category,
                tuple(
                    [one.name for one in open_ if record.end_ns > record.start_ns or self._holds(one.node, node.id)]
                ),
                node.backend,
                record.elements,
                record.failed,
                record.plain,
            )
            rows.setdefault(level, []).append(span)
            if level == bricks:
                self._told_ns = span.end_ns
            open_.append(span)
        self._close(open_, 0, bricks)
        self._gap(length_ns, [])
        backends = sorted({span.backend for spans in rows.values() for span in spans if span.backend})
        titles = ["steps"] * self._has_steps + ["layers"] * layers + [BRICKS]
        titles += ["in bricks"] * (max(rows) + 1 - len(titles))
        drawn = (Row(title, tuple(rows.get(level, ()))) for level, title in enumerate(titles))
        return Lane(name, tuple(backends), tuple(drawn), tuple(self._gaps), bricks)

    def _layers(self, records: Sequence[tuple[int, TimedRecord]]) -> int:
        """Return how deep layers are nested, without layers inside of bricks."""
        # for each record around: whether it and everything around it are steps or layers
        deepest, open_ = 0, list[bool]()
        for depth, record in records:
            del open_[depth:]
            kind = self._nodes[record.node].kind
            open_.append(all(open_) and (kind is NodeKind.LAYER or is_step(self._nodes, record.node)))
            deepest = max(deepest, sum(open_) - self._has_steps)
        return deepest

    def _holds(self, outer: int, node: int) -> bool:
        """Return whether node `outer` contains `node` in the graph.

        Times do not tell: a record of zero length fits into any record that began at the same moment.
        """
        at = self._nodes.parent_of[node]
        while at > outer:
            at = self._nodes.parent_of[at]
        return at == outer

    def _close(self, open_: list[TimelineSpan], depth: int, bricks: int) -> None:
        """Close all open spans except the outermost `depth`.

        If a step or layer ends outside of bricks, its end becomes a gap.
        """
        while len(open_) > depth:
            if open_[-1].level < bricks:
                self._gap(open_[-1].end_ns, open_)
            open_.pop()

    def _gap(self, until_ns: int, around: Sequence[TimelineSpan]) -> None:
        """Add a gap for the time until `until_ns`, which is in no brick. It is inside of the spans `around`."""
        if until_ns > self._told_ns:
            self._gaps += self._names.of(self._told_ns, until_ns, around)
            self._told_ns = until_ns


@dataclass(frozen=True, slots=True)
class GapNames:
    """Names the gaps of a lane.

    `ran` are the times of steps on all lanes (None: the lane has no steps). `cut_short` are the times of parts of
    incomplete steps.
    """

    nodes: NodeTable
    ran: Sequence[tuple[int, int]] | None
    cut_short: Sequence[tuple[int, int]]
    between: str
    begin_ns: int
    holes: Sequence[Hole]
    # node of a step or layer -> the name of gaps inside it
    inside: dict[int, str] = field(default_factory=dict)

    def of(self, start_ns: int, end_ns: int, around: Sequence[TimelineSpan]) -> Iterator[Gap]:
        """Yield the gaps of a lane from `start_ns` to `end_ns` that are inside the spans `around`."""
        where = tuple([span.name for span in around])
        if self.holes and self._is_in_hole(self.begin_ns + start_ns, self.begin_ns + end_ns):
            yield Gap(start_ns, end_ns - start_ns, UNNAMED, where)
        elif around:
            yield Gap(start_ns, end_ns - start_ns, self._inside(around[-1]), where)
        elif self.ran is None:
            yield Gap(start_ns, end_ns - start_ns, NOTHING)
        else:
            yield from self._between(start_ns, end_ns, self.ran)

    def _is_in_hole(self, begin_ns: int, end_ns: int) -> bool:
        return any(hole.begin_ns < end_ns and begin_ns < hole.end_ns for hole in self.holes)

    def _inside(self, innermost: TimelineSpan) -> str:
        if innermost.kind is NodeKind.STEP:
            return NOT_LOOKED_INTO if innermost.is_plain else UNATTRIBUTED
        found = self.inside.get(innermost.node)
        if found is None:
            holds_layers = any(child.kind is NodeKind.LAYER for child in self.nodes.children[innermost.node])
            found = self.inside[innermost.node] = BETWEEN_LAYERS if holds_layers else INSIDE_LAYERS
        return found

    def _between(self, start_ns: int, end_ns: int, ran: Sequence[tuple[int, int]]) -> Iterator[Gap]:
        """Yield the gaps of a lane outside of steps.

        After the last known step, another may be running.
        """
        for at, until_ns, is_step_there in _split(start_ns, end_ns, ran):
            if is_step_there:
                yield Gap(at, until_ns - at, ELSEWHERE)
                continue
            name = self.between if ran and at < ran[-1][0] else AFTER
            for begin_ns, stop_ns, is_cut_short in _split(at, until_ns, self.cut_short):
                yield Gap(begin_ns, stop_ns - begin_ns, CUT_SHORT if is_cut_short else name)


def _split(start_ns: int, end_ns: int, ran: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """Split a time range at the borders of `ran`, which are sorted and disjoint ranges.

    Yields (begin, end, whether the part is in `ran`).
    """
    at = start_ns
    for begin_ns, until_ns in ran[max(0, bisect_right(ran, (start_ns, 0)) - 1) :]:
        if begin_ns >= end_ns:
            break
        if begin_ns > at:
            yield at, begin_ns, False
            at = begin_ns
        if until_ns > at:
            yield at, min(until_ns, end_ns), True
            at = min(until_ns, end_ns)
    if at < end_ns:
        yield at, end_ns, False


def is_step(nodes: NodeTable, node: int) -> bool:
    """Return whether records of `node` are whole steps."""
    return nodes.step_of[node] == node
