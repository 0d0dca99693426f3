"""Roof unsure: the rounds that measured a roof do not agree."""

from __future__ import annotations

from cbtop.units import number, percent
from cbtop.viewmodels.model import About, CeilingRow, Evidence, Severity, SourceView, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

UNSURE_PERCENT = 10.0  # a share of a roof is read to the nearest tenth


def is_unsure(ceiling: CeilingRow) -> bool:
    """Whether its rounds differ so much that no share of it means anything."""
    return _spread_percent(ceiling) > UNSURE_PERCENT


def _spread_percent(ceiling: CeilingRow) -> float:
    return 0.0 if ceiling.lowest is None else 100 * (1 - ceiling.lowest / ceiling.value)


def _find(view: SourceView) -> Finding | None:
    unsure = [ceiling for ceiling in view.roofline.ceilings if is_unsure(ceiling)]
    if not unsure:
        return None
    worst = max(unsure, key=_spread_percent)
    assert worst.lowest is not None
    spread = _spread_percent(worst)
    return Finding(
        f"The roof {worst.name} is unsure: its rounds lie between {number(worst.lowest)} and {number(worst.value)} "
        f"{worst.unit}, {percent(spread)} apart",
        (
            Evidence("apart", spread, "%"),
            Evidence("lowest round", worst.lowest, worst.unit),
            Evidence("best round", worst.value, worst.unit),
        ),
        Subject(About.ROOF, worst.name),
    )


ROOF_UNSURE = Rule(
    id="roof-unsure",
    severity=Severity.NOTE,
    means="The machine did something else while its roof was measured: shares of that roof are not to be trusted, "
    "and no brick is said to be bound by it.",
    fires=f"The lowest round of a roof is more than {UNSURE_PERCENT:g} % below the best one.",
    advice="Run `cbtop calibrate` on a machine that does nothing else.",
    find=_find,
)
