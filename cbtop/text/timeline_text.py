"""Write the texts next to the lanes of a timeline."""

from __future__ import annotations

from cbtop.units import counted, duration
from cbtop.viewmodels.lanes import Lane
from cbtop.viewmodels.timeline import TimelineView


def lane_sum(lane: Lane, begin_ns: int, end_ns: int) -> str:
    """Format the time of a lane between two moments: `1.35 ms = bricks 1.29 ms + rest of step 61.2 µs`."""
    parts = lane.parts_ns(begin_ns, end_ns).items()
    return f"{duration((end_ns - begin_ns) / 1e3)} = " + " + ".join(
        f"{name} {duration(ns / 1e3)}" for name, ns in parts if ns or len(parts) == 1
    )


def timeline_notes(found: TimelineView) -> list[str]:
    """Return notes about records that the timeline does not draw, and about unknown facts of the drawn records."""
    notes = [
        (found.unplaced, "of steps that have not ended, or whose own record is missing"),
        (found.missing, "lost on the way or overwritten: gaps there have no name"),
        (found.older, "older"),
    ]
    told = [f"{counted(number, 'record')} {what}" for number, what in notes if number]
    return [*told, "which thread ran what is not recorded"]
