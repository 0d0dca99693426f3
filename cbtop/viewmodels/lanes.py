"""The parts of a timeline: lanes with rows of spans, and the gaps between the outermost bricks.

Lanes
- Threads are not recorded. Records share a lane if they ran one after another or are nested.
- If two steps overlap, the second one takes the next lane. Overlapping work inside a step is treated in the same way.
- Three kinds of records have separate lanes: work that other threads or tasks do for a step (adopted work), work
  outside of steps, and the host times of a step that was timed on a device.
- The requests of an engine have lanes without records. The row of bricks in such a lane has the phases of each
  request.
- On every lane, the outermost bricks and the gaps between these bricks add up to the whole timeline, to the
  nanosecond.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cbtop.protocol.vocabulary import BrickCategory, NodeKind

# These names of gaps exist only in a timeline, and not in the time breakdown.
BETWEEN_STEPS, BETWEEN_RECORDED = "between steps", "between recorded steps"
# name of a gap that fills a whole step, because nothing inside of the step was recorded
NOT_LOOKED_INTO = "not recorded inside"
UNATTRIBUTED = "unattributed"
NOTHING = "no brick recorded"
ELSEWHERE = "a step on another lane"
AFTER = "after the last step"
# Name of a gap that contains parts of an incomplete step. The step was cancelled, has not ended, or its record was
# lost.
CUT_SHORT = "a step cut short"
UNNAMED = "unnamed gap"  # name of a gap with lost records, so that it is unknown what ran there
# These are names of lanes, except BRICKS.
BRICKS = "bricks"  # name of the time that a lane spends in bricks
STEPS, BESIDE, HOST, ADOPTED, OUTSIDE = "steps", "beside steps", "host", "adopted", "outside steps"


# The parts are named tuples, because a timeline makes hundreds of them per frame. Making a frozen dataclass takes
# five times as long.
class TimelineSpan(NamedTuple):
    """One record on a lane.

    `start_ns` counts from the beginning of the timeline. `level` is the index of its row. Rows are steps, then
    layers, then bricks.
    """

    start_ns: int
    duration_ns: int
    level: int
    node: int
    name: str
    kind: NodeKind
    category: BrickCategory | None
    where: tuple[str, ...]  # names of the spans around this record, outermost first
    backend: str
    elements: int | None  # number of elements of the record, or None if not counted
    is_failed: bool = False
    is_plain: bool = False  # whether this is a step that was timed only as a whole

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class Gap(NamedTuple):
    """A gap: time on a lane that is in no brick."""

    start_ns: int
    duration_ns: int
    name: str
    where: tuple[str, ...] = ()  # names of the spans around this gap, outermost first

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a lane: spans that do not overlap, sorted by start."""

    name: str
    spans: tuple[TimelineSpan, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane of a timeline.

    The spans in the row `bricks` and the `gaps` add up to the whole timeline. The first rows have steps, the next
    rows layers, and the last rows bricks.
    """

    name: str
    backends: tuple[str, ...]
    rows: tuple[Row, ...]
    gaps: tuple[Gap, ...]
    bricks: int  # index of the row of the lane that has the outermost bricks

    def parts_ns(self, begin_ns: int, end_ns: int) -> dict[str, int]:
        """Return how much time each part of the lane takes between two moments, the longest first.

        The key BRICKS has the time in bricks. The other keys are names of gaps.
        """
        bricks = self.rows[self.bricks].name
        found = {bricks: 0}
        rows: tuple[tuple[TimelineSpan | Gap, ...], ...] = (self.rows[self.bricks].spans, self.gaps)
        for row in rows:
            for part in row[_first_from(row, begin_ns) :]:
                inside_ns = min(part.end_ns, end_ns) - max(part.start_ns, begin_ns)
                if inside_ns > 0:
                    name = part.name if isinstance(part, Gap) else bricks
                    found[name] = found.get(name, 0) + inside_ns
                elif part.start_ns >= end_ns:
                    break
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def _first_from(parts: Sequence[TimelineSpan | Gap], begin_ns: int) -> int:
    """Return the index of the first part that ends after `begin_ns`.

    `parts` are in order and do not overlap.
    """
    return bisect_right(parts, begin_ns, key=lambda part: part.end_ns)
