"""Where in time a screen or report is, and the kinds of notable events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Mark(StrEnum):
    """The kinds of notable events on a time bar, most urgent last."""

    PHASE = "phase"  # A different phase takes most of the time from now on.
    STARTED = "started"
    ENDED = "ended"
    VERDICT = "verdict"  # A verdict that is a warning or an error begins.
    STALLED = "stalled"  # The process is stalled or suspended.


@dataclass(frozen=True, slots=True)
class TimeView:
    """The position of a screen in time.

    Times are seconds from the beginning of the recording or of the daemon's history.
    """

    at_s: float
    duration_s: float
    marks: Mapping[int, Mark]  # second with events -> its most urgent kind
    chosen_s: tuple[float, float] | None = None  # (begin, end) of a chosen time range, or None
    is_now: bool = False  # whether the screen is paused at the present, not in the past


@dataclass(frozen=True, slots=True)
class ReplayView:
    """The position of a screen or report in a recording. Times are seconds from the beginning of the recording."""

    file: str
    host: str
    recorded_s: float  # Unix time when the recording begins
    at_s: float
    duration_s: float
    # Whether the recorder has closed the file. If not, it is still writing or was killed.
    is_complete: bool
    is_history: bool = False  # whether this is a daemon's history of the last minutes, not a recording file
    # (begin, end) of the chosen range, or None if one moment is shown
    range_s: tuple[float, float] | None = None
