"""Verdict "straggler": all other ranks wait for one rank."""

from __future__ import annotations

from cbtop.units import count, duration, percent, with_article
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.straggler import THRESHOLD, WAIT_WITHIN
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule, gain_inside


def _find(view: SourceView) -> Finding | None:
    found = view.straggler
    if found is None or not found.others_wait:
        return None
    others = "the other" if found.ranks == 2 else f"the median of the other {count(found.ranks - 1)}"
    saved_us = min(found.busy_us - found.others_us, found.waited_us)
    return Finding(
        f"Rank {found.rank} is {percent(found.percent)} slower than {others} "
        f"({duration(found.busy_us)} against {duration(found.others_us)} {with_article(f'{found.phase} step')}), "
        f"most of it in {found.brick} (+{duration(found.brick_excess_us)}): all wait for it",
        (
            Evidence("slower", found.percent, "%"),
            Evidence("busy a step", found.busy_us, "µs"),
            Evidence("others busy a step", found.others_us, "µs"),
            Evidence(f"more in {found.brick}", found.brick_excess_us, "µs"),
            Evidence("whole step", found.step_us, "µs"),
            Evidence("others' whole step", found.others_step_us, "µs"),
        ),
        Subject(About.RANK, f"rank {found.rank}"),
        gain_inside(view, 100 * saved_us / found.step_us),
        "it were as fast as the others",
        is_inside=True,
    )


STRAGGLER = Rule(
    id="straggler",
    severity=Severity.WARNING,
    means="One rank of a job works longer on a step than every other rank, and they wait for it.",
    fires=f"Outside of communication its median step takes over {100 * THRESHOLD:.0f} % longer than that of every "
    "other rank, beyond pauses and noise. The whole steps of all ranks are about equally long: within "
    f"{100 * WAIT_WITHIN:.0f} % of its own, and nearer to that than to their length without the wait. It always uses "
    "the last five seconds. Not for replicas, which do not wait for each other.",
    advice="Look at its machine (clocks, other programs, links) and at how work is divided among the ranks.",
    find=_find,
)
