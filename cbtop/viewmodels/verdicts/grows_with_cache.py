"""Verdict "grows with the cache": steps take longer with more cached positions, because of some bricks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import StatisticsError, correlation, linear_regression

from cbtop.protocol.vocabulary import BrickCategory
from cbtop.units import count, duration
from cbtop.viewmodels.brick_growth import BrickGrowth, alike
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.steps import PaceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, pace_shown, steps_alike

# Each second with steps is a point. A line through fewer points than this proves little.
MIN_SECONDS = 8
# The cached positions grow at least by this factor. With less, there may be other causes.
LONGER = 1.5
# The step times grow at least by this factor. Less does not matter.
GROWTH = 1.2
MOST = 0.8  # The named bricks explain at least this share of the growth.
# Least correlation of cached positions and step times over the seconds. The cache then explains four fifths of the
# variance.
CORRELATION = 0.9
NOT_ATTENTION = "The bricks that grow are not attention. Look at what they do with earlier positions."


def _find(view: SourceView) -> Finding | None:
    steps = steps_alike(view)
    if steps is None:
        return None
    shown = pace_shown(view)
    line = _line(shown)
    if line is None:
        return None
    slope_us, begin_us = line
    cached = [one.cached for one in shown if one.cached is not None]
    least, most = min(cached), max(cached)
    short_us, long_us = (begin_us + slope_us * positions for positions in (least, most))
    if most < LONGER * least or short_us <= 0 or long_us < GROWTH * short_us:
        return None
    # All bricks became slower by the same factor, which a growing cache does not cause.
    if alike(view.brick_growth) is not None:
        return None
    growing = _growing(view)
    named = f"; most of the growth is in {', '.join(one.name for one in growing)}" if growing else ""
    is_attention = any(one.category is BrickCategory.ATTENTION for one in growing)
    return Finding(
        f"{steps.phase} steps grow with the cache: {duration(short_us)} at {count(least)} positions, "
        f"{duration(long_us)} at {count(most)}{named}",
        (
            Evidence("a position", slope_us, "µs"),
            Evidence("fewest positions", least, "positions"),
            Evidence("step at the fewest", short_us, "µs"),
            Evidence("most positions", most, "positions"),
            Evidence("step at the most", long_us, "µs"),
        ),
        Subject(About.STEPS, steps.phase),
        advice="" if is_attention or not growing else NOT_ATTENTION,
    )


def _growing(view: SourceView) -> list[BrickGrowth]:
    """Return the bricks that explain most of the growth of step times, largest growth first, at most three."""
    longer = [one for one in view.brick_growth if one.after_us > one.before_us]
    growth_us = sum(one.after_us - one.before_us for one in longer)
    found: list[BrickGrowth] = []
    for one in longer:
        if sum(each.after_us - each.before_us for each in found) >= MOST * growth_us:
            break
        found.append(one)
    return found[:3]


def _line(pace: Sequence[PaceView]) -> tuple[float, float] | None:
    """Return the slope (µs per position) and intercept (µs) of step times over cached positions. None without
    correlation.
    """
    points = [(one.cached, one.us) for one in pace if one.cached is not None]
    if len(points) < MIN_SECONDS:
        return None
    positions, us = zip(*points, strict=True)
    try:
        if correlation(positions, us) < CORRELATION:
            return None
    except StatisticsError:  # all cached positions or all step times are equal, so there can be no correlation
        return None
    slope, intercept = linear_regression(positions, us)
    return slope, intercept


GROWS_WITH_CACHE = Rule(
    id="grows-with-cache",
    severity=Severity.NOTE,
    means="Part of a step works on all earlier positions, as attention reads the whole cache: the longer the "
    "sequence, the slower the token.",
    fires=f"In {MIN_SECONDS} seconds or more with steps of the same number of tokens, the mean step follows the mean "
    f"number of cached positions (correlation {CORRELATION:g}). The positions grow by half or more, and a step by "
    f"{100 * GROWTH - 100:.0f} %. It uses the last two minutes at most, and only if the process reports its cached "
    "positions. Not if every larger brick takes longer by the same factor.",
    advice="Use a smaller cache (grouped heads, a quantized one, a sliding window) or a fused attention kernel. "
    "Compare runs at equal lengths.",
    find=_find,
)
