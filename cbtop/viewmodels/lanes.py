"""The parts of a timeline: lanes with rows of spans, one per record, and the gaps between the outermost bricks.

Lanes
- Threads are not recorded. Records that ran one after the other or nested share a lane. A step that overlaps another
  takes the next lane, and so does work that overlaps its siblings inside a step.
- Work done by other threads or tasks for a step (adopted work), work outside steps, and host times of a step timed by
  its device have lanes of their own.
- On every lane, the outermost bricks and the gaps between them add up to the whole timeline, to the nanosecond.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cbtop.protocol.vocabulary import BrickCategory, NodeKind

# Gaps that the books do not name.
BETWEEN_STEPS, BETWEEN_RECORDED = "between steps", "between recorded steps"
NOT_LOOKED_INTO = "not recorded inside"  # a step timed only as a whole
UNATTRIBUTED = "unattributed"
NOTHING = "no brick recorded"
ELSEWHERE = "a step on another lane"
AFTER = "after the last step"
CUT_SHORT = "a step cut short"  # parts of a step that was cancelled, has not ended, or has lost its record
UNNAMED = "unnamed gap"  # records are missing, so what ran is unknown
# Lanes
BRICKS = "bricks"  # name of the part of a lane that is not a gap
STEPS, BESIDE, HOST, ADOPTED, OUTSIDE = "steps", "beside steps", "host", "adopted", "outside steps"


# Named tuples: a timeline makes hundreds a frame, and a frozen dataclass takes five times as long to make.
class TimelineSpan(NamedTuple):
    """One record. `start_ns` counts from the begin of the timeline; `level` is its row: steps, layers, bricks."""

    start_ns: int
    duration_ns: int
    level: int
    node: int
    name: str
    kind: NodeKind
    category: BrickCategory | None
    where: tuple[str, ...]  # the spans around it, from the step inwards
    backend: str
    elements: int | None  # None: not counted
    is_failed: bool = False
    is_plain: bool = False  # a step timed only as a whole

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class Gap(NamedTuple):
    """Time without a brick of the lane."""

    start_ns: int
    duration_ns: int
    name: str
    where: tuple[str, ...] = ()  # the spans around it, from the step inwards

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Row:
    """Spans of one lane that do not overlap, by start."""

    name: str
    spans: tuple[TimelineSpan, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """Rows from the steps inwards. The spans of row `bricks` and the `gaps` add up to the whole timeline."""

    name: str
    backends: tuple[str, ...]
    rows: tuple[Row, ...]
    gaps: tuple[Gap, ...]
    bricks: int  # row of the outermost bricks

    def parts_ns(self, begin_ns: int, end_ns: int) -> dict[str, int]:
        """Return how the time between two moments is spent: `bricks`, and gaps by name, the longest first."""
        found = {BRICKS: 0}
        rows: tuple[tuple[TimelineSpan | Gap, ...], ...] = (self.rows[self.bricks].spans, self.gaps)
        for row in rows:
            for part in row[_first_from(row, begin_ns) :]:
                inside_ns = min(part.end_ns, end_ns) - max(part.start_ns, begin_ns)
                if inside_ns > 0:
                    name = part.name if isinstance(part, Gap) else BRICKS
                    found[name] = found.get(name, 0) + inside_ns
                elif part.start_ns >= end_ns:
                    break
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def _first_from(parts: Sequence[TimelineSpan | Gap], begin_ns: int) -> int:
    """Return the index of the first of `parts` (disjoint, in order) that ends after a moment."""
    return bisect_right(parts, begin_ns, key=lambda part: part.end_ns)
