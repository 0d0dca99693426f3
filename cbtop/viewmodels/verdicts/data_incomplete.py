"""Verdict "data incomplete": records were lost, the time breakdown does not add up, or the daemon is silent."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.protocol.vocabulary import SourceStatus
from cbtop.units import count, counted, percent
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.time_breakdown import TimeBreakdownView
from cbtop.viewmodels.verdict import About, Evidence, Severity, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

# Figures have three or four digits, so a smaller percentage of lost records does not change them.
LOST_PERCENT = 0.1


@dataclass(frozen=True, slots=True)
class Lost:
    """The number of lost records, among `seen` records since the daemon found the process."""

    lost: int
    seen: int
    when: str  # time of the losses as text; "" means any time since the daemon found the process

    @property
    def percent(self) -> float:
        return 100 * self.lost / self.seen if self.seen else 0.0


def lost_records(view: SourceView) -> Lost:
    """Return how many records were lost since the daemon found the process, or how many were lost in the window, if
    the window lost a larger share.
    """
    window = view.window
    of_all = Lost(view.loss.lost, view.loss.seen, "")
    when = " in this range" if window and window.range_s else " in these last seconds"
    of_window = Lost(window.lost, window.seen, when) if window else of_all
    return max(of_all, of_window, key=lambda one: one.percent)


def _find(view: SourceView) -> Finding | None:
    loss = view.loss
    found = lost_records(view)
    why, evidence = [], []
    if view.state is SourceStatus.FAULTY:
        why.append(f"what it recorded cannot be trusted ({view.state_reason})")
    if view.stale_s is not None:
        why.append(f"its daemon has been silent for {view.stale_s:.0f} s")
        evidence.append(Evidence("silent", view.stale_s, "s"))
    if found.percent > LOST_PERCENT:
        why.append(
            f"{count(found.lost)} of {count(found.seen)} records were lost{found.when} ({percent(found.percent)})"
        )
        evidence += [
            Evidence("records lost", found.lost, "records"),
            Evidence("records since somebody looked" if not found.when else "records", found.seen, "records"),
            Evidence("lost", found.percent, "%"),
        ]
    if loss.left_out:
        why.append(f"{counted(loss.left_out, 'announcement')} did not fit")
        evidence.append(Evidence("announcements left out", loss.left_out, "announcements"))
    if view.books is not None and not view.books.close:
        why.append("the parts of a step do not add up, so shares of its time cannot be trusted")
        evidence.append(Evidence("parts off by", _off_us(view.books), "µs"))
    if not why:
        return None
    return Finding(f"Data is incomplete: {'; '.join(why)}", tuple(evidence), Subject(About.SOURCE, view.program))


def _off_us(books: TimeBreakdownView) -> float:
    """Return by how many µs parts of the time breakdown are longer than their whole."""
    return max(books.over_us, -books.unattributed_us, sum(one.us for one in books.exceeded))


DATA_INCOMPLETE = Rule(
    id="data-incomplete",
    severity=Severity.ERROR,
    means="Data is missing, so figures may be wrong by more than their digits suggest.",
    fires=f"More than {LOST_PERCENT:g} % of the records were lost, in the window or since the daemon attached. "
    "Or announcements did not fit, a step's parts do not add up, the daemon is silent, or the source is faulty.",
    advice="See `records` and `step time`. A larger ring, or fewer recorded steps, loses fewer records.",
    find=_find,
)
