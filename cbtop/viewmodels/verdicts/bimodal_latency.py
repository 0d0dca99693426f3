"""Bimodal latency: steps are of two kinds, one fast and one slow."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from cbtop.units import duration, percent
from cbtop.viewmodels.durations import DurationBar
from cbtop.viewmodels.model import About, Evidence, Severity, SourceView, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain, steps_alike

APART = 1.20  # times as long as the fast mode: kinds that differ by less need no name
MIN_PERCENT = 10.0  # of the steps in each mode: what is rarer is a tail
VALLEY = 0.5  # between the modes: below this part of the smaller one
BEYOND_CHANCE = 2.0  # standard deviations of a count, by which a valley may be higher and a mode lower than it looks
MIN_COUNT = 200  # steps: of fewer, the bars of a histogram jump by themselves


def _find(view: SourceView) -> Finding | None:
    steps = steps_alike(view)
    if steps is None or steps.count < MIN_COUNT:
        return None
    cut = _valley([bar.count for bar in steps.durations], steps.durations)
    if cut is None:
        return None
    fast, slow = steps.durations[:cut], steps.durations[cut:]
    fast_us, slow_us, slow_count = _mode_us(fast), _mode_us(slow), sum(bar.count for bar in slow)
    slow_percent = 100 * slow_count / sum(bar.count for bar in steps.durations)
    saved = 100 * (slow_us - fast_us) * slow_count / (steps.mean_us * steps.count) if steps.mean_us else 0.0
    return Finding(
        f"{steps.phase} steps are of two kinds: {percent(100 - slow_percent)} take about {duration(fast_us)}, "
        f"{percent(slow_percent)} about {duration(slow_us)}",
        (
            Evidence("fast mode", fast_us, "µs"),
            Evidence("slow mode", slow_us, "µs"),
            Evidence("steps in the slow mode", slow_percent, "%"),
        ),
        Subject(About.STEPS, steps.phase),
        gain(view, saved),
        "all were of the fast kind",
    )


def _valley(counts: Sequence[int], bars: Sequence[DurationBar]) -> int | None:
    """Where the deepest valley between two modes lies; None where there are no two."""
    size, total = len(counts), sum(counts)
    # Three bars together: single ones jump by chance.
    smooth = [sum(counts[max(0, at - 1) : at + 2]) for at in range(size)]
    best: tuple[float, int] | None = None
    before, peak_before = 0, 0
    peak_after = [0] * (size + 1)
    for at in range(size - 1, -1, -1):
        peak_after[at] = max(smooth[at], peak_after[at + 1])
    for at in range(size):
        smaller = min(peak_before, peak_after[at])
        enough = MIN_PERCENT / 100 * total
        if smaller and before >= enough and total - before >= enough:
            depth = smooth[at] / smaller
            is_deep = _at_most(smooth[at]) < VALLEY * _at_least(smaller)
            if is_deep and (best is None or depth < best[0]) and _mode_us(bars[at:]) >= APART * _mode_us(bars[:at]):
                best = depth, at
        before += counts[at]
        peak_before = max(peak_before, smooth[at])
    return None if best is None else best[1]


def _at_most(count: int) -> float:
    return count + BEYOND_CHANCE * sqrt(count + 1)


def _at_least(count: int) -> float:
    return count - BEYOND_CHANCE * sqrt(count)


def _mode_us(bars: Sequence[DurationBar]) -> float:
    """The middle of the fullest bar."""
    fullest = max(bars, key=lambda bar: bar.count)
    return (fullest.from_us + fullest.to_us) / 2


BIMODAL_LATENCY = Rule(
    id="bimodal-latency",
    severity=Severity.WARNING,
    means="Steps of the same size are of two kinds, and no mean or median is true of either: two code paths, a "
    "garbage collection, a neighbour, processors of two speeds.",
    fires=f"Of {MIN_COUNT} or more steps with the same number of tokens, the histogram has two modes, the slow one "
    f"{100 * APART - 100:.0f} % above the fast one or more, each of {MIN_PERCENT:g} % of the steps, and between "
    f"them a valley below half of the smaller one, each off by {BEYOND_CHANCE:g} standard deviations.",
    advice="Find what the slow steps share (time of day, sequence, thread): the histogram and the timeline tell "
    "them apart.",
    find=_find,
)
