"""Straggler: one rank for which all others wait."""

from __future__ import annotations

from cbtop.units import count, duration, percent
from cbtop.viewmodels.model import About, Evidence, Severity, SourceView, Subject
from cbtop.viewmodels.straggler import THRESHOLD
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain


def _find(view: SourceView) -> Finding | None:
    found = view.straggler
    if found is None:
        return None
    others = "the other" if found.ranks == 2 else f"the median of the other {count(found.ranks - 1)}"
    mean_us = view.steps.mean_us if view.steps else None
    saved = 100 * (found.busy_us - found.others_us) / mean_us if mean_us else 0.0
    return Finding(
        f"Rank {found.rank} is {percent(found.percent)} slower than {others} "
        f"({duration(found.busy_us)} against {duration(found.others_us)} a {found.phase} step), most of it in "
        f"{found.brick} (+{duration(found.brick_excess_us)}): all wait for it",
        (
            Evidence("slower", found.percent, "%"),
            Evidence("busy a step", found.busy_us, "µs"),
            Evidence("others busy a step", found.others_us, "µs"),
            Evidence(f"more in {found.brick}", found.brick_excess_us, "µs"),
        ),
        Subject(About.RANK, f"rank {found.rank}"),
        gain(view, saved),
        "it were as fast as the others",
    )


STRAGGLER = Rule(
    id="straggler",
    severity=Severity.WARNING,
    means="One rank of a job works longer for a step than each of the others, and they wait for it.",
    fires=f"Outside of communication its median step takes over {100 * THRESHOLD:.0f} % longer than that of every "
    "other rank, beyond what pauses and noise explain; over the last two seconds, whatever stretch is shown.",
    advice="Look at its machine (clocks, neighbours, links) and at how work is divided among the ranks.",
    find=_find,
)
