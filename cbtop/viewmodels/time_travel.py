"""Position of a screen or report in time, and marks of notable events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Mark(StrEnum):
    """Kinds of notable events, the most urgent kind last."""

    PHASE = "phase"  # The phase that takes most of the time has changed.
    STARTED = "started"
    ENDED = "ended"
    VERDICT = "verdict"  # A warning or an error begins.
    STALLED = "stalled"  # The process is stalled or suspended.


@dataclass(frozen=True, slots=True)
class TimeView:
    """Position of a screen in time. Times are seconds from the beginning of the data."""

    at_s: float
    duration_s: float
    marks: Mapping[int, Mark]  # Most urgent kind of event, by second.
    chosen_s: tuple[float, float] | None = None  # (begin, end) of a range.
    is_now: bool = False  # Whether the screen is paused at the present.


@dataclass(frozen=True, slots=True)
class ReplayView:
    """Position of a screen or report in a recording. Times are seconds from the beginning of the recording."""

    file: str
    host: str
    recorded_s: float  # Unix time of the beginning.
    at_s: float
    duration_s: float
    is_complete: bool  # Whether the recorder has closed the file. If not, it was killed or still writes.
    is_history: bool = False  # Whether this is a daemon's history of the last minutes, not a file.
    range_s: tuple[float, float] | None = None  # (begin, end) of a range that is shown instead of a moment.
