"""Verdict "memory-grows": the memory of a process grows steadily over minutes, as if it were never freed."""

from __future__ import annotations

from statistics import fmean

from cbtop.units import number, size_bytes
from cbtop.viewmodels.memory_growth import LEAST_SHARE, PARTS, MemoryGrowth
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

# Memory that would take longer than this to fill is not reported.
MOST_S = 7 * 86_400.0
# If cached positions grow by this factor, a request fills its cache, which it frees at its end.
FILLS = 1.1
MIN_SECONDS = 8


def _find(view: SourceView) -> Finding | None:
    if _fills_cache(view):
        return None
    growths = [one for one in view.memory_growths if _fills_after_s(one) <= MOST_S]
    if not growths:
        return None
    growth = min(growths, key=_fills_after_s)
    return Finding(
        f"{_name(growth)} grows steadily: {_a_minute(growth.rate)} a minute ({_a_minute(growth.low_rate)} to "
        f"{_a_minute(growth.high_rate)}), from {size_bytes(growth.first_bytes)} to "
        f"{size_bytes(growth.last_bytes)} in {_time(growth.covers_s)}{_full(growth)}",
        (
            Evidence("growth a minute", 60 * growth.rate, "B"),
            Evidence("at least", 60 * growth.low_rate, "B"),
            Evidence("at most", 60 * growth.high_rate, "B"),
            Evidence("observed for", 1e6 * growth.covers_s, "µs"),
            *((Evidence("free memory", growth.free_bytes, "B"),) if growth.free_bytes is not None else ()),
        ),
        Subject(About.SOURCE, view.program),
    )


def _fills_cache(view: SourceView) -> bool:
    cached = [one.cached for one in view.pace if one.cached is not None]
    quarter = len(cached) // 4
    return len(cached) >= MIN_SECONDS and fmean(cached[-quarter:]) > FILLS * fmean(cached[:quarter])


def _fills_after_s(growth: MemoryGrowth) -> float:
    return MOST_S if growth.fills_in_s is None else growth.fills_in_s[1]


def _name(growth: MemoryGrowth) -> str:
    return f"Memory of {growth.gpu}" if growth.gpu else "Memory"


def _a_minute(rate: float) -> str:
    return size_bytes(60 * rate)


def _full(growth: MemoryGrowth) -> str:
    fills = growth.fills_in_s
    if fills is None or growth.free_bytes is None:
        return ""
    soonest, latest = map(_time, fills)
    return f"; the free {size_bytes(growth.free_bytes)} last {soonest} to {latest}"


def _time(time_s: float) -> str:
    """Return a time as text, in the largest unit of which it has at least two."""
    units = (("days", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    unit, unit_s = next((one for one in units if time_s >= 2 * one[1]), units[-1])
    return f"{number(time_s / unit_s)} {unit}"


MEMORY_GROWS = Rule(
    id="memory-grows",
    severity=Severity.WARNING,
    means="The program keeps ever more memory.",
    fires=f"Since the warm-up, its memory grows by {100 * LEAST_SHARE:g} % and 16 MiB or more, about "
    f"equally in {PARTS} parts of 3 to 15 min. The least of each 20 s counts, without files and shared memory. Not "
    "if filling takes a week, or while cached positions grow.",
    advice="Look for kept results, such as losses without .item().",
    find=_find,
)
