"""Verdict "bimodal latency": step times have a fast mode and one or more slower modes."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from cbtop.units import duration, percent
from cbtop.viewmodels.durations import DurationBar
from cbtop.viewmodels.run_ahead import may_run_ahead
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain, steps_alike
from cbtop.viewmodels.verdicts.grows_with_cache import GROWS_WITH_CACHE
from cbtop.viewmodels.verdicts.starved import is_explained_by_waiting

# The slow mode takes at least this many times as long as the fast one. A smaller difference does not matter.
APART = 1.20
# Each mode has at least this percentage of the steps. Rarer steps are a tail.
MIN_PERCENT = 10.0
VALLEY = 0.5  # Between two modes there are fewer steps than this share of the smaller mode.
# A valley or a mode differs by at least this many standard deviations, or it may be chance.
BEYOND_CHANCE = 2.0
_SHAPES = {2: "bimodal", 3: "trimodal"}
# With fewer steps than this, the histogram's bars vary too much by chance.
MIN_COUNT = 200


def _find(view: SourceView) -> Finding | None:
    steps = steps_alike(view)
    if steps is None or steps.count < MIN_COUNT or may_run_ahead(view):
        return None
    total = sum(bar.count for bar in steps.durations)
    fast, *slow = _kinds(steps.durations, total)
    if not slow:
        return None
    shares = [100 * sum(bar.count for bar in kind) / total for kind in (fast, *slow)]
    fast_us, *slow_us = (_mode_us(kind) for kind in (fast, *slow))
    mean_us = _mean_us(steps.durations)
    longer_percent = 100 * (mean_us - _mean_us(fast)) / mean_us
    if is_explained_by_waiting(view, longer_percent) or GROWS_WITH_CACHE.find(view) is not None:
        return None  # another verdict explains the slow steps better
    said = [f"{percent(share)} about {duration(us)}" for share, us in zip(shares[1:], slow_us, strict=True)]
    evidence = [Evidence("fast mode", fast_us, "µs")]
    for at, (share, us) in enumerate(zip(shares[1:], slow_us, strict=True)):
        name = "slow mode" if not at else f"slow mode {at + 1}"
        evidence += [Evidence(name, us, "µs"), Evidence(f"steps in the {name}", share, "%")]
    return Finding(
        f"{steps.phase} step times are {_SHAPES.get(len(shares), 'multimodal')}: {percent(shares[0])} take about "
        f"{duration(fast_us)}, {', '.join(said)}",
        tuple(evidence),
        Subject(About.STEPS, steps.phase),
        gain(view, longer_percent),
        "all were as fast as the fast mode",
    )


def _kinds(bars: Sequence[DurationBar], total: int) -> list[Sequence[DurationBar]]:
    """Return the histogram's bars of each mode, the fastest mode first. `total` is the number of all steps."""
    cut = _valley(bars, total)
    return [bars] if cut is None else [*_kinds(bars[:cut], total), *_kinds(bars[cut:], total)]


def _valley(bars: Sequence[DurationBar], total: int) -> int | None:
    """Return the index of the lowest bar between two modes of a histogram, or None.

    A mode needs enough of the `total` steps.
    """
    counts = [bar.count for bar in bars]
    size, those = len(counts), sum(counts)
    # Single bars vary too much by chance, so use sums of three.
    smooth = [sum(counts[max(0, at - 1) : at + 2]) for at in range(size)]
    best: tuple[float, int] | None = None
    before, peak_before = 0, 0
    peak_after = [0] * (size + 1)
    for at in range(size - 1, -1, -1):
        peak_after[at] = max(smooth[at], peak_after[at + 1])
    for at in range(size):
        smaller = min(peak_before, peak_after[at])
        enough = MIN_PERCENT / 100 * total
        if smaller and before >= enough and those - before >= enough:
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


def _mean_us(bars: Sequence[DurationBar]) -> float:
    """Return the mean time of the steps in `bars`. A step takes the middle of its bar."""
    return sum(bar.count * (bar.from_us + bar.to_us) / 2 for bar in bars) / sum(bar.count for bar in bars)


def _mode_us(bars: Sequence[DurationBar]) -> float:
    """Return the middle of the bar with the most steps."""
    fullest = max(bars, key=lambda bar: bar.count)
    return (fullest.from_us + fullest.to_us) / 2


BIMODAL_LATENCY = Rule(
    id="bimodal-latency",
    severity=Severity.WARNING,
    means="Steps of the same size have two typical times or more, and no mean or median describes them. Causes: two "
    "code paths, garbage collection, another program, processors of two speeds.",
    fires=f"{MIN_COUNT} steps or more have the same number of tokens, and their histogram has two modes or "
    f"more. Each mode has {MIN_PERCENT:g} % or more of the steps, and a slow mode is {100 * APART - 100:.0f} % or "
    "more above the fast one. The valley between two modes is below half of the smaller one, even if both are off by "
    f"{BEYOND_CHANCE:g} standard deviations. Not if steps grow with the cache, if waits for a processor explain "
    "the slow steps, or if the host runs ahead of the GPU.",
    advice="Find what the slow steps have in common (time of day, sequence, thread). The histogram and the timeline "
    "show which they are.",
    find=_find,
)
