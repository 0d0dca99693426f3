"""The parts of a timeline: lanes with rows of spans, and the gaps between the outermost bricks.

Lanes
- Threads are not recorded. Records share a lane if they ran one after the other or are nested.
- If a step overlaps another step, it takes the next lane. The same is true of work that overlaps other work in its
  step.
- There are separate lanes for work that other threads or tasks do for a step (adopted work), for work outside steps,
  and for host times of a step that its device has timed.
- On every lane, the outermost bricks and the gaps between them add up to the whole timeline, to the nanosecond.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cbtop.protocol.vocabulary import BrickCategory, NodeKind

# Names of gaps that exist only in a timeline, not in the time breakdown.
BETWEEN_STEPS, BETWEEN_RECORDED = "between steps", "between recorded steps"
NOT_LOOKED_INTO = "not recorded inside"  # Gap in a step that was only timed as a whole.
UNATTRIBUTED = "unattributed"
NOTHING = "no brick recorded"
ELSEWHERE = "a step on another lane"
AFTER = "after the last step"
# Parts of a step ran here. The step was cancelled, has not ended, or has lost its record.
CUT_SHORT = "a step cut short"
UNNAMED = "unnamed gap"  # Records are missing here, so it is unknown what ran.
# Names of lanes, except BRICKS.
BRICKS = "bricks"  # Name of a lane's time outside gaps.
STEPS, BESIDE, HOST, ADOPTED, OUTSIDE = "steps", "beside steps", "host", "adopted", "outside steps"


# Named tuples are used, because a timeline makes hundreds a frame. A frozen dataclass takes five times as long.
class TimelineSpan(NamedTuple):
    """One record. `start_ns` counts from the timeline's beginning.

    `level` is its row: steps, then layers, then bricks.
    """

    start_ns: int
    duration_ns: int
    level: int
    node: int
    name: str
    kind: NodeKind
    category: BrickCategory | None
    where: tuple[str, ...]  # Names of the surrounding spans, from the step inwards.
    backend: str
    elements: int | None  # Number of elements, or None if not counted.
    is_failed: bool = False
    is_plain: bool = False  # Whether it is a step that was only timed as a whole.

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class Gap(NamedTuple):
    """Time on a lane without a brick."""

    start_ns: int
    duration_ns: int
    name: str
    where: tuple[str, ...] = ()  # Names of the surrounding spans, from the step inwards.

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Row:
    """Spans of one lane that do not overlap, sorted by start."""

    name: str
    spans: tuple[TimelineSpan, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """A lane. The spans of its row `bricks` and its `gaps` add up to the whole timeline.

    Rows are ordered from the steps inwards.
    """

    name: str
    backends: tuple[str, ...]
    rows: tuple[Row, ...]
    gaps: tuple[Gap, ...]
    bricks: int  # Index of the row with the outermost bricks.

    def parts_ns(self, begin_ns: int, end_ns: int) -> dict[str, int]:
        """Return the time in bricks (key `bricks`) and in gaps (by name) between two moments, the longest first."""
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
    """Return the index of the first of `parts` (disjoint, in order) that ends after `begin_ns`."""
    return bisect_right(parts, begin_ns, key=lambda part: part.end_ns)
