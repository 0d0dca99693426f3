"""What a timeline is made of: lanes with rows of spans, one a record, and the gaps between the outermost bricks.

What a lane is
- Threads are not recorded. What ran one after the other, or inside of each other, takes one lane; a step that ran
  while another did takes the next, and so does what ran beside its like inside one step.
- What other threads or tasks did for a step (adopted work), what ran outside of steps, and what the host timed of a
  step that its device timed have lanes of their own.
- On every lane the outermost bricks and the gaps between them add up to the whole timeline, to the nanosecond.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cbtop.protocol.vocabulary import BrickCategory, NodeKind

# The gaps that the books do not name.
BETWEEN_STEPS, BETWEEN_RECORDED = "between steps", "between recorded steps"
NOT_LOOKED_INTO = "not recorded inside"  # a step that was timed as a whole
UNATTRIBUTED = "unattributed"
NOTHING = "no brick recorded"
ELSEWHERE = "a step on another lane"
AFTER = "after the last step"
CUT_SHORT = "a step cut short"  # bricks ran in one that was cancelled, has not ended, or whose record is lost
UNNAMED = "unnamed gap"  # records are missing there: what ran is not known
# Lanes
BRICKS = "bricks"  # of the parts of a lane, what is no gap
STEPS, BESIDE, HOST, ADOPTED, OUTSIDE = "steps", "beside steps", "host", "adopted", "outside steps"


# Named tuples: a timeline makes hundreds a frame, and a frozen dataclass takes five times as long to make.
class Span(NamedTuple):
    """One record. `start_ns` counts from where the timeline begins; `level` is its row: steps, layers, bricks."""

    start_ns: int
    duration_ns: int
    level: int
    node: int
    name: str
    kind: NodeKind
    category: BrickCategory | None
    where: tuple[str, ...]  # what it lies in, from the step down
    backend: str
    elements: int | None  # None: not counted
    is_failed: bool = False
    is_plain: bool = False  # a step that was timed as a whole

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class Gap(NamedTuple):
    """Time in which no brick of a lane ran."""

    start_ns: int
    duration_ns: int
    name: str
    where: tuple[str, ...] = ()  # what it lies in, from the step down

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Row:
    """Spans of one lane that lie side by side, by their start."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """Rows from the steps down; the spans of the row number `bricks` and the `gaps` add up to the whole timeline."""

    name: str
    backends: tuple[str, ...]
    rows: tuple[Row, ...]
    gaps: tuple[Gap, ...]
    bricks: int  # the row of the outermost bricks

    def parts_ns(self, begin_ns: int, end_ns: int) -> dict[str, int]:
        """What the time from one moment to another is: `bricks`, and its gaps by their names, the longest first."""
        found = {BRICKS: 0}
        rows: tuple[tuple[Span | Gap, ...], ...] = (self.rows[self.bricks].spans, self.gaps)
        for row in rows:
            for part in row[_first_from(row, begin_ns) :]:
                inside_ns = min(part.end_ns, end_ns) - max(part.start_ns, begin_ns)
                if inside_ns > 0:
                    name = part.name if isinstance(part, Gap) else BRICKS
                    found[name] = found.get(name, 0) + inside_ns
                elif part.start_ns >= end_ns:
                    break
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def _first_from(parts: Sequence[Span | Gap], begin_ns: int) -> int:
    """The first of `parts`, disjoint and in their order, that ends after a moment."""
    return bisect_right(parts, begin_ns, key=lambda part: part.end_ns)
