"""The position of a screen or report in time, and the kinds of notable events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Mark(StrEnum):
    """The kinds of notable events. The most urgent kind is the last."""

    PHASE = "phase"  # a different phase takes most of the time now
    STARTED = "started"
    ENDED = "ended"
    VERDICT = "verdict"  # a warning or an error begins
    STALLED = "stalled"  # the process is stalled or suspended


@dataclass(frozen=True, slots=True)
class TimeView:
    """The position of a screen in time. Times are seconds from the beginning of the data."""

    at_s: float
    duration_s: float
    marks: Mapping[int, Mark]  # most urgent kind of event by second; seconds without an event are missing
    chosen_s: tuple[float, float] | None = None  # (begin, end) of a chosen range, or None
    is_now: bool = False  # whether the screen is paused at the present moment


@dataclass(frozen=True, slots=True)
class ReplayView:
    """The position of a screen or report in a recording. Times are seconds from the beginning of the recording."""

    file: str
    host: str
    recorded_s: float  # Unix time of the beginning
    at_s: float
    duration_s: float
    is_complete: bool  # whether the recorder has closed the file; if not, it still writes or was killed
    is_history: bool = False  # whether this is a daemon's history of the last minutes, and not a file
    range_s: tuple[float, float] | None = None  # (begin, end) of a range that is shown in place of a moment
