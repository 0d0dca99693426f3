"""Write the time breakdown of steps, and reasons to doubt it. Names in the code call the breakdown `books`."""

from __future__ import annotations

from cbtop.units import counted, duration, percent
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.time_breakdown import BesideView, TimeBreakdownView

_MAX_NAMED = 3  # A list has at most this many names.


# In a time breakdown, this is the name of the time when bricks overlap because they run in parallel.
OVERLAP = "overlap"
# This is the name of the wall time in no brick and in no gap. JSON calls it `unattributed`.
REST = "rest of step"


def no_books(source: SourceView) -> str:
    """Return why the time breakdown of the steps is missing, or "" if it exists."""
    steps = source.steps
    if steps is None or steps.recorded:
        return ""
    if not steps.count:
        return f"no {source.phase} step ended in this time"
    return f"none of {counted(steps.count, f'{source.phase} step')} of this time was recorded inside"


def books_trouble(books: TimeBreakdownView | None) -> str:
    """Return why the parts of the time breakdown do not add up, and by how much. "" if they do.

    If they do not, a share of wall time may be above 100 % or below 0.
    """
    if books is None or books.close:
        return ""
    why = []
    if books.unattributed_us < 0:
        parts = 100 * (books.bricks_us + books.gaps_us - books.overlap_us) / books.wall_us if books.wall_us else None
        why.append(f"bricks and gaps measured {percent(parts)} of the steps' wall time")
    if books.over:
        why.append(f"in {counted(books.over, 'step')} what ran took {duration(books.over_us)} more than there was")
    if books.exceeded:
        named = ", ".join(f"{one.name} by {duration(one.us)}" for one in books.exceeded[:_MAX_NAMED])
        more = f" and {len(books.exceeded) - _MAX_NAMED} more" if len(books.exceeded) > _MAX_NAMED else ""
        why.append(f"what ran inside outdid {named}{more}")
    return f"parts do not add up: {'; '.join(why)}"


def books_notes(books: TimeBreakdownView | None, outside: BesideView | None) -> list[str]:
    """Return notes about time outside of the breakdown, and about missing data.

    Where room is scarce, a note is cut before its first comma.
    """
    found = []
    if books is not None and books.adopted is not None:
        found.append(f"in other threads for these steps: {_beside(books.adopted)}, beside the wall time")
    if outside is not None:
        found.append(f"outside steps: {_beside(outside)}, in no step's wall time")
    if books is not None and books.unmatched_calls:
        calls = counted(books.unmatched_calls, "call")
        found.append(f"in no step: {duration(books.unmatched_us)} in {calls}, stopped twice, out of order or late")
    if books is not None and books.cancelled:
        steps = counted(books.cancelled, "step")
        found.append(f"in no step: bricks of {steps} cancelled or renamed inside, which the rows hold")
    if books is not None and books.in_shared_lane:
        found.append(
            f"{counted(books.in_shared_lane, 'step')} ran beside fifteen others, whose bricks are whose is not known"
        )
    return found


def _beside(found: BesideView) -> str:
    """Format a sum of times with its largest parts: `5.00 ms in 10 calls, added up (Sampling 4.00 ms, detokenize 1.00
    ms)`.
    """
    return f"{duration(found.us)} in {counted(found.calls, 'call')}, added up ({longest(found)})"


def longest(found: BesideView) -> str:
    """Format the longest times by name of the call: `Sampling 4.00 ms, detokenize 1.00 ms`."""
    named = ", ".join(f"{one.name} {duration(one.us)}" for one in found.by_name[:_MAX_NAMED])
    return f"{named}{', …' if len(found.by_name) > _MAX_NAMED else ''}"
