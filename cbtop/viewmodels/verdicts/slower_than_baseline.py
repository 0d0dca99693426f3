"""Verdict "slower than the baseline": a brick takes longer than in the baseline.

The baseline is a time that the user marked, or a recording given by --baseline.
"""

from __future__ import annotations

from cbtop.comparison.comparison import Comparison, PlaceChange
from cbtop.comparison.noise import CONFIDENCE, LEAST_PERCENT, MIN_BLOCKS
from cbtop.units import counted, number, percent
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain_inside

# A brick became slower by at least this fraction of a token's time. Less does not matter.
LEAST_OF_ALL_PERCENT = 0.02


def _find(view: SourceView) -> Finding | None:
    found = view.baseline
    if found is None or found.step_us is None:
        return None
    # `bricks` has an entry for the time between bricks, too, so the sum is the whole step.
    all_us = sum(change.now for change in found.bricks.values())
    slower = [one for one in found.slower if one.change.delta >= LEAST_OF_ALL_PERCENT / 100 * all_us]
    if not slower:
        return None
    worst, unit = slower[0], f"µs/{found.unit}"
    change = worst.change.decisive
    beside = "" if change is worst.change else " relative to all others"
    calls = f", {worst.calls.text}" if worst.calls and worst.calls.text else ""
    others = f"; {counted(len(slower) - 1, 'more brick')} slower, too" if len(slower) > 1 else ""
    size = f"{number(change.delta)} ± {number(change.half)} {unit}"
    against = f"({percent(change.percent)}: {number(change.now)} against {number(change.before)})"
    return Finding(
        f"{worst.name} is {size} slower than the baseline{beside} {against}{calls}{_most_in(found, worst)}{others}",
        (
            Evidence("more than the baseline", change.delta, unit),
            Evidence("right to within", change.half, unit),
            Evidence("now", change.now, unit),
            Evidence("baseline", change.before, unit),
        ),
        _subject(view, worst),
        gain_inside(view, 100 * change.delta / max(_mean_us(view, found.unit), all_us)),
        "it were as fast as in the baseline",
        is_inside=True,
    )


def _mean_us(view: SourceView, unit: str) -> float:
    """Return the mean time of a token or step in µs, or 0 if unknown.

    A few long calls may make it larger than the sum of typical calls.
    """
    steps = view.steps
    if steps is None or steps.mean_us is None:
        return 0.0
    units = steps.tokens if unit == "token" else steps.count
    return steps.mean_us * steps.count / units if units else 0.0


def _most_in(found: Comparison, worst: PlaceChange) -> str:
    """Return a text about the layer with the largest part of a brick's change, or "".

    A layer with half of the change or more is already named by `worst`. Then the text is "".
    """
    if worst.layer is not None:
        return ""
    cells = [
        one
        for one in found.changes
        if one.brick == worst.brick and one.layer is not None and one.change.delta > 0 and one.change.is_beyond_noise
    ]
    if not cells:
        return ""
    most = max(cells, key=lambda one: one.change.delta)
    told = most.change.decisive
    return f", the most in {most.layer} (+{number(told.delta)} ± {number(told.half)})"


def _subject(view: SourceView, worst: PlaceChange) -> Subject:
    if worst.layer is None or view.layer_times is None:
        return Subject(About.BRICK, worst.name)
    node = next((row.id for row in view.layer_times.rows if row.name == worst.layer), None)
    return Subject(About.LAYER, worst.layer, node)


SLOWER_THAN_BASELINE = Rule(
    id="slower-than-baseline",
    severity=Severity.WARNING,
    means="A brick takes longer for a token than in the seconds that were marked with `b`, or than in the recording "
    "of --baseline.",
    fires=f"Its typical call, in all layers or in one, takes {LEAST_PERCENT:g} % longer or more, or a step calls it "
    f"more often and all calls take longer. This is at least {LEAST_OF_ALL_PERCENT:g} % of a token's time. The "
    f"difference is beyond chance: {100 * CONFIDENCE:g} % confidence over all bricks and layers, "
    f"from the scatter of at least {MIN_BLOCKS} blocks of steps each. Not if model, batch or mix of phases "
    "differ. "
    "Not for attention in every layer if the cache is longer or its length is unknown.",
    advice="Look at what has changed since: the code, the clocks, other programs, the machine.",
    find=_find,
)
