"""The parts of a timeline: lanes with rows of spans, and the gaps between the outermost bricks.

Lanes
- Threads are not recorded. Records share a lane if they ran one after another or are nested.
- If two steps overlap, the second takes the next lane, and so does overlapping work inside a step.
- These have separate lanes: work that other threads or tasks do for a step (adopted work), work outside of steps, and
  host times of a step that a device has timed.
- An engine's requests have lanes without records. Their row of bricks has the phases of each request.
- On every lane, the outermost bricks and the gaps between them add up to the whole timeline, to the nanosecond.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cbtop.protocol.vocabulary import BrickCategory, NodeKind

# Only timelines have gaps with these names, not the time breakdown.
BETWEEN_STEPS, BETWEEN_RECORDED = "between steps", "between recorded steps"
# a gap that fills a whole step, because nothing inside was recorded
NOT_LOOKED_INTO = "not recorded inside"
UNATTRIBUTED = "rest of step"
NOTHING = "no brick recorded"
ELSEWHERE = "a step on another lane"
AFTER = "after the last step"
# A gap with parts of an incomplete step, which was cancelled, has not ended, or has lost its record.
CUT_SHORT = "a step cut short"
UNNAMED = "unnamed gap"  # a gap with lost records, where it is unknown what ran
# These are names of lanes, except BRICKS.
BRICKS = "bricks"  # the time that a lane spends in bricks
STEPS, BESIDE, HOST, ADOPTED, OUTSIDE = "steps", "beside steps", "host", "adopted", "outside steps"


# Named tuples, because a timeline makes hundreds of them per frame. A frozen dataclass takes five times as long.
class TimelineSpan(NamedTuple):
    """A record on a lane.

    `start_ns` is since the beginning of the timeline. `level` is the index of its row: first steps, then layers, then
    bricks.
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
    elements: int | None  # number of elements; None if not counted
    is_failed: bool = False
    is_plain: bool = False  # whether this is a step that was timed only as a whole

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class Gap(NamedTuple):
    """Time on a lane outside of all bricks."""

    start_ns: int
    duration_ns: int
    name: str
    where: tuple[str, ...] = ()  # names of the spans around this gap, outermost first

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a lane: spans in order of their starts, which do not overlap."""

    name: str
    spans: tuple[TimelineSpan, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane of a timeline.

    The row `bricks` and the `gaps` add up to the whole timeline. The first rows have steps, the next layers, the last
    bricks.
    """

    name: str
    backends: tuple[str, ...]
    rows: tuple[Row, ...]
    gaps: tuple[Gap, ...]
    bricks: int  # index of the row of the outermost bricks

    def parts_ns(self, begin_ns: int, end_ns: int) -> dict[str, int]:
        """Return how much time each part of the lane takes between two moments, longest first.

        The key is BRICKS for all bricks, or the name of a gap.
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
    """Return the index of the first part that ends after `begin_ns`. `parts` are in order and disjoint."""
    return bisect_right(parts, begin_ns, key=lambda part: part.end_ns)
