"""Verdict "roof unsure": the measured rounds of a roof differ too much."""

from __future__ import annotations

from cbtop.protocol.messages import UNSURE_PERCENT
from cbtop.units import number, percent
from cbtop.viewmodels.roofline import peaks_over
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule


def _find(view: SourceView) -> Finding | None:
    roofs = view.roofline
    peaks = [peak for brick in roofs.points for peak in peaks_over(brick, roofs.ceilings)]
    used = [one for one in roofs.ceilings if one.kind == "bandwidth" or one in peaks or not roofs.points]
    unsure = [one for one in used if one.is_unsure and one.kind != "cache"]
    if not unsure:
        return None
    worst = max(unsure, key=lambda ceiling: ceiling.spread_percent or 0.0)
    spread = worst.spread_percent
    assert worst.median is not None
    assert spread is not None
    return Finding(
        f"The roof {worst.name} is unsure: the best of its rounds reached {number(worst.value)} {worst.unit}, the "
        f"median one {number(worst.median)}, {percent(spread)} less",
        (
            Evidence("spread", spread, "%"),
            Evidence("median round", worst.median, worst.unit),
            Evidence("best round", worst.value, worst.unit),
        ),
        Subject(About.ROOF, worst.name),
    )


ROOF_UNSURE = Rule(
    id="roof-unsure",
    severity=Severity.NOTE,
    means="The machine was busy while its roof was measured. Shares of that roof cannot be trusted, and no brick is "
    "reported as bound by it.",
    fires=f"The median round of a roof above any brick is more than {UNSURE_PERCENT:g} % below the best round.",
    advice="Run `cbtop calibrate` while nothing else runs on the machine.",
    find=_find,
)
