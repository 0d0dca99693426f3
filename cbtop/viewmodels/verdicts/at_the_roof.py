"""Verdicts memory-bound and compute-bound: a brick with much time is near its roof."""

from __future__ import annotations

from functools import partial

from cbtop.units import number, percent
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.roofline import CeilingRow, advice_at_a_peak, peaks_over
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain_inside

# A brick is near a roof at this percentage of it. Below, latency or overhead limits it, at any intensity.
NEAR_PERCENT = 60.0
# Only a brick with this percentage of the time in steps gets a verdict. The limit of a smaller one hardly matters.
MIN_SHARE_PERCENT = 10.0
# what limits a brick (memory or compute) -> kind of the roof
_KINDS = {"memory": "bandwidth", "compute": "compute"}


def _find(view: SourceView, bound: str) -> Finding | None:
    bricks = [row for row in view.bricks if row.bound == bound and _is_near(row)]
    ceilings = [ceiling for ceiling in view.roofline.ceilings if ceiling.kind == _KINDS[bound]]
    if not bricks or not ceilings:
        return None
    brick = max(bricks, key=lambda row: row.percent or 0.0)
    if bound == "compute":
        ceilings = peaks_over(brick, ceilings)
    roof = max(ceilings, key=lambda ceiling: ceiling.value)
    at_percent, share = brick.percent_of_roof, brick.percent
    assert at_percent is not None
    assert share is not None
    rate = brick.gb_per_sec if bound == "memory" else brick.gflops
    assert rate is not None
    others = [row.percent or 0.0 for row in bricks if row is not brick]
    more = f"; with {len(others)} more such bricks it is {percent(share + sum(others))} of a step" if others else ""
    return Finding(
        f"{brick.name} is {bound}-bound: {percent(at_percent)} of the {_roof_in_words(roof, bound)} "
        f"({number(rate)} of {number(roof.value)} {roof.unit}){more}",
        (
            Evidence("of the roof", at_percent, "%"),
            Evidence("reached", rate, roof.unit),
            Evidence("roof", roof.value, roof.unit),
            Evidence("share of the time in steps", share, "%"),
        ),
        Subject(About.BRICK, brick.name),
        gain_inside(view, share * (1 - at_percent / 100)),
        "it reached the roof",
        advice=advice_at_a_peak(brick, view.roofline.ceilings) if bound == "compute" else "",
        is_inside=True,
    )


def _is_near(row: BrickRow) -> bool:
    near = row.percent_of_roof is not None and NEAR_PERCENT <= row.percent_of_roof <= 100 and not row.roof_unsure
    return near and (row.percent or 0.0) >= MIN_SHARE_PERCENT


def _roof_in_words(roof: CeilingRow, bound: str) -> str:
    what = "bandwidth" if bound == "memory" else f"{roof.dtype} peak" if roof.dtype else "peak"
    return f"{roof.provenance.value} {what}"


def _fires(roof: str) -> str:
    return (
        f"A brick with {MIN_SHARE_PERCENT:g} % or more of the time in steps reaches {NEAR_PERCENT:g} % to 100 % of "
        f"its roof ({roof}), and that roof is not unsure. The largest such brick is named."
    )


MEMORY_BOUND = Rule(
    id="memory-bound",
    severity=Severity.NOTE,
    means="The brick moves bytes about as fast as the memory can. It is not slow: it moves too many bytes.",
    fires=_fires("bandwidth"),
    advice="Move fewer bytes (smaller weights, a fused kernel), or let more sequences share each read of the "
    "weights.",
    find=partial(_find, bound="memory"),
)

COMPUTE_BOUND = Rule(
    id="compute-bound",
    severity=Severity.NOTE,
    means="The brick computes about as fast as the processor can. More bandwidth or a larger batch does not help.",
    fires=_fires("peak FLOP/s"),
    advice="Compute less, or multiply float32 in a lower precision that was measured to be faster here.",
    find=partial(_find, bound="compute"),
)
