"""Slower than the baseline: a brick takes longer than when somebody said: compare with this."""

from __future__ import annotations

from cbtop.units import counted, number, percent
from cbtop.viewmodels.comparison import Comparison, PlaceChange
from cbtop.viewmodels.model import About, Evidence, Severity, SourceView, Subject
from cbtop.viewmodels.noise import CONFIDENCE, LEAST_PERCENT, MIN_BLOCKS
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain_inside

LEAST_OF_ALL_PERCENT = 0.02  # of a token's time: what costs less is worth no word


def _find(view: SourceView) -> Finding | None:
    found = view.baseline
    if found is None or found.step_us is None:
        return None
    all_us = sum(change.now for change in found.bricks.values())  # what lies between bricks is one of them
    slower = [one for one in found.slower if one.change.delta >= LEAST_OF_ALL_PERCENT / 100 * all_us]
    if not slower:
        return None
    worst, unit = slower[0], f"µs/{found.unit}"
    change = worst.change
    others = f"; {counted(len(slower) - 1, 'more brick')} slower, too" if len(slower) > 1 else ""
    size = f"{number(change.delta)} ± {number(change.half)} {unit}"
    against = f"({percent(change.percent)}: {number(change.now)} against {number(change.before)})"
    return Finding(
        f"{worst.name} is {size} slower than the baseline {against}{_most_in(found, worst)}{others}",
        (
            Evidence("more than the baseline", change.delta, unit),
            Evidence("right to within", change.half, unit),
            Evidence("now", change.now, unit),
            Evidence("baseline", change.before, unit),
        ),
        _subject(view, worst),
        gain_inside(view, 100 * change.delta / max(_mean_us(view, found.unit), all_us)),
        "it were as at the baseline",
        is_inside=True,
    )


def _mean_us(view: SourceView, unit: str) -> float:
    """What a token, or a step, takes on average: more than typical calls add up to, where a few take long. 0 where
    that is not known."""
    steps = view.steps
    if steps is None or steps.mean_us is None:
        return 0.0
    units = steps.tokens if unit == "token" else steps.count
    return steps.mean_us * steps.count / units if units else 0.0


def _most_in(found: Comparison, worst: PlaceChange) -> str:
    """The layer with more of it than any other; none has half of it, else it would be that layer's."""
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
    return f", the most in {most.layer} (+{number(most.change.delta)} ± {number(most.change.half)})"


def _subject(view: SourceView, worst: PlaceChange) -> Subject:
    if worst.layer is None or view.layer_times is None:
        return Subject(About.BRICK, worst.name)
    node = next((row.id for row in view.layer_times.rows if row.name == worst.layer), None)
    return Subject(About.LAYER, worst.layer, node)


SLOWER_THAN_BASELINE = Rule(
    id="slower-than-baseline",
    severity=Severity.WARNING,
    means="A brick takes longer for a token than in the seconds that were marked with `b`, or in the recording that "
    "--baseline names.",
    fires=f"Its exclusive time for a token, in all layers or in one, is higher by {LEAST_PERCENT:g} % or more, by "
    f"{LEAST_OF_ALL_PERCENT:g} % of a token's time, and by more than chance explains: {100 * CONFIDENCE:g} % sure of "
    f"all bricks and layers together, by how blocks of steps scatter, {MIN_BLOCKS} on either side at least; the "
    f"median call is longer by {LEAST_PERCENT:g} %, too. Not where model, batch or mix of phases are others, nor of "
    "attention in every layer where the cache is longer, or nobody says how long it is.",
    advice="Look at what has changed since: the code, the clocks, the neighbours, the machine.",
    find=_find,
)
