"""Verdict "below timer resolution": calls are too short for the clock."""

from __future__ import annotations

from cbtop.comparison.noise import READINGS
from cbtop.units import duration, number
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

MIN_CALLS = 20


def _find(view: SourceView) -> Finding | None:
    if not view.clock_resolution_ns:
        return None
    resolution_us = view.clock_resolution_ns / 1e3
    short = [
        (row.p50_us, row)
        for row in view.bricks
        if row.p50_us is not None and row.count >= MIN_CALLS and row.p50_us < READINGS * resolution_us
    ]
    if not short:
        return None
    p50_us, brick = min(short, key=lambda one: one[0])
    more = f"; the same holds for {len(short) - 1} more" if len(short) > 1 else ""
    return Finding(
        f"{brick.name} is below the timer's resolution: its median call takes {duration(p50_us)}, "
        f"{number(p50_us / resolution_us)} times the smallest difference between two clock readings "
        f"({duration(resolution_us)}){more}",
        (
            Evidence("median call", p50_us, "µs"),
            Evidence("clock resolution", resolution_us, "µs"),
            Evidence("bricks so short", len(short), "bricks"),
        ),
        Subject(About.BRICK, brick.name),
    )


BELOW_RESOLUTION = Rule(
    id="below-resolution",
    severity=Severity.NOTE,
    means="Calls of a brick are so short that much of the measured time is the clock's own. Statistics say little.",
    fires=f"The median of {MIN_CALLS} calls or more is below {READINGS:g} times the smallest difference between two "
    "readings of the process's clock. The process measures that once, as it begins. If it does not report it, there "
    "is no verdict.",
    advice="Time a larger part of the code as one brick, or read their share of the step instead of their calls.",
    find=_find,
)
