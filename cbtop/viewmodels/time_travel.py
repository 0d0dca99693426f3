"""The position of a screen or report in time, and the marks of notable events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Mark(StrEnum):
    """A notable event, the most urgent last."""

    PHASE = "phase"  # the phase that takes most of the time has changed
    STARTED = "started"
    ENDED = "ended"
    VERDICT = "verdict"  # a warning or an error begins
    STALLED = "stalled"  # or suspended


@dataclass(frozen=True, slots=True)
class TimeView:
    """The position of a screen in time, in seconds from the beginning of the data."""

    at_s: float
    duration_s: float
    marks: Mapping[int, Mark]  # by second
    chosen_s: tuple[float, float] | None = None  # begin and end of a range
    is_now: bool = False  # paused, but still at the present


@dataclass(frozen=True, slots=True)
class ReplayView:
    """The position of a screen or report in a recording. Times are seconds from its beginning."""

    file: str
    host: str
    recorded_s: float  # Unix time of its beginning
    at_s: float
    duration_s: float
    is_complete: bool  # closed by its recorder; else it was killed or still writes
    is_history: bool = False  # not a file, but a daemon's history of the last minutes
    range_s: tuple[float, float] | None = None  # shown instead of a moment
