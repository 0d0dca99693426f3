"""Verdict "stuck": the process runs but makes no progress."""

from __future__ import annotations

from cbtop.units import duration
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.stall import MIN_S, SLOW, StallKind
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule


def _find(view: SourceView) -> Finding | None:
    found = view.stall
    if found is None or found.word not in (StallKind.STALLED, StallKind.SUSPENDED):
        return None
    who = f"{found.member} is" if found.member else "It is"
    place = f" in {' → '.join(found.place)}" if found.place else ""
    usual_us = None if found.usual_s is None else 1e6 * found.usual_s
    usual = "" if usual_us is None else f"; the p99 of {found.usual_of} is {duration(usual_us)}"
    evidence = [Evidence("without progress", found.age_s, "s"), Evidence("said from", found.limit_s, "s")]
    evidence += [] if usual_us is None else [Evidence(f"p99 of {found.usual_of}", usual_us, "µs")]
    return Finding(
        f"{who} {found.word} for {found.age_s:.0f} s{place}{usual}",
        tuple(evidence),
        Subject(About.BRICK, found.brick) if found.brick else Subject(About.SOURCE, view.program),
        advice=_go_on(view) if found.word is StallKind.SUSPENDED else "",
    )


def _go_on(view: SourceView) -> str:
    """Return the advice for a suspended process, whose stacks need no inspection."""
    pid = "PID" if view.merged else view.pid
    return f"If a signal stopped it, `kill -CONT {pid}` on its host resumes it. A debugger resumes it by itself."


STUCK = Rule(
    id="stuck",
    severity=Severity.ERROR,
    means="The process runs and is inside a step or brick, but nothing has ended for much longer than usual. It "
    "hangs, or a signal or a debugger has stopped it.",
    fires=f"It is stalled: nothing was recorded for {MIN_S:g} s and for {SLOW:g} times the p99 of the running step "
    "or brick. Or it is suspended. Not between two steps, nor if it is unknown what runs.",
    advice="Find out what it waits for there (in a collective, look at the other ranks): py-spy shows its stacks. "
    "`kill -CONT PID` resumes a suspended process.",
    find=_find,
)
