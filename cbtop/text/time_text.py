"""Write moments, ages and time ranges as short texts."""

from __future__ import annotations

from datetime import datetime

from cbtop.units import NOT_MEASURED

# The latest moment that can be shown, in the year 9892. A file may contain any number, so later moments must be
# caught.
_MAX_DATE_S = 250_000_000_000
# If a moment is older than this, the date is added, because a time of day alone would be ambiguous.
_DATE_FROM_US = 12 * 3600e6


def position(value_s: float) -> str:
    """Format a position in a recording: `0:07`, `1:02:07`."""
    whole = int(value_s)
    hours = f"{whole // 3600}:{whole // 60 % 60:02}" if whole >= 3600 else f"{whole // 60}"
    return f"{hours}:{whole % 60:02}"


def age(value_s: float | None) -> str:
    """Format how long ago something was measured: `40 s`, `12 min`, `5 h`, `3 days`."""
    if value_s is None:
        return NOT_MEASURED
    for unit_s, limit_s, unit in ((1, 120, "s"), (60, 7_200, "min"), (3_600, 172_800, "h")):
        if value_s < limit_s:
            return f"{value_s / unit_s:.0f} {unit}"
    return f"{value_s / 86_400:,.0f} days"


def day(moment: str) -> str:
    """Return the date in a text with an ISO time, such as `2026-11-22T10:30:59+01:00`."""
    return moment[: len("2026-11-22")]


def date(unix_s: float) -> str:
    """Format a moment in local time: `2026-03-01 12:30:59`."""
    return moment(unix_s)[:19]


def moment(unix_s: float) -> str:
    """Format a moment to the millisecond: `2026-03-01 12:30:59.123`."""
    return f"{datetime.fromtimestamp(min(max(unix_s, 0), _MAX_DATE_S)):%Y-%m-%d %H:%M:%S.%f}"[:-3]


def seconds(value: float) -> str:
    """Format a duration from the settings: `0.25 s`, `5 s`."""
    return f"{value:g} s"


def between(range_s: tuple[float, float], *, with_date: bool = False) -> str:
    """Format a time range in local time, to a tenth of a second: `20:02:11.3–20:02:19.8`."""
    begin, end = (moment(unix_s)[:-2] for unix_s in range_s)
    return f"{begin[0 if with_date else 11 :]}–{end[11:]}"


def since(unix_s: float, wall_us: float | None, *, with_date: bool = False) -> str:
    """Format the start of a time range as a time of day.

    If the range is long, the day is added, and on request the year.
    """
    is_days = wall_us is not None and wall_us >= _DATE_FROM_US
    return date(unix_s)[0 if with_date else 5 if is_days else 11 :]
