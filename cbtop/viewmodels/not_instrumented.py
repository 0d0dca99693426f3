"""Find steps that spend much of their time outside of instrumented code."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.profiler.analysis.time_breakdown import INNER_STEPS
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.time_breakdown import GPU_WAITED, NOT_ITS_KERNELS
from cbtop.viewmodels.time_range import NamedTime

# Time outside of bricks is reported above this percentage of a step. An instrumented decoder spends some percent
# between its bricks, and a single brick rarely takes a quarter.
OUTSIDE_PERCENT = 25.0
COMPILED = "torch.compile compiled code of this process"
UNKNOWN = "no brick covers it: operations between a layer's bricks, a fused path, a script, or the program's own code"


@dataclass(frozen=True, slots=True)
class NotInstrumented:
    """The time of recorded steps outside of bricks (derived). It is unknown which code ran, and where."""

    percent: float
    wall_us: float
    parts: tuple[NamedTime, ...]
    why: str


def not_instrumented(view: SourceView) -> NotInstrumented | None:
    """Return the time of steps outside of bricks. None if unknown or below OUTSIDE_PERCENT."""
    books, steps = view.books, view.steps
    if books is None or steps is None or not books.close or not books.wall_us or not steps.recorded:
        return None
    parts = [gap for gap in books.gaps if gap.name not in (INNER_STEPS, GPU_WAITED, NOT_ITS_KERNELS) and gap.us]
    if books.unattributed_us:
        parts.append(NamedTime("in no layer", books.unattributed_us))
    share = 100 * sum(part.us for part in parts) / books.wall_us
    if share < OUTSIDE_PERCENT:
        return None
    return NotInstrumented(share, books.wall_us, tuple(parts), COMPILED if view.has_compiled else UNKNOWN)
