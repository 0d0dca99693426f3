"""Data incomplete: records were lost, the books do not close, or nothing is heard."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.protocol.vocabulary import SourceStatus
from cbtop.units import count, counted, percent
from cbtop.viewmodels.model import About, BooksView, Evidence, Severity, SourceView, Subject
from cbtop.viewmodels.verdicts.base import Finding, Rule

LOST_PERCENT = 0.1  # figures have three digits or four: less than that changes none of them


@dataclass(frozen=True, slots=True)
class Lost:
    """So many records were lost, of those `seen` while somebody looked."""

    lost: int
    seen: int
    when: str  # "", or in which part of that time

    @property
    def percent(self) -> float:
        return 100 * self.lost / self.seen if self.seen else 0.0


def lost_records(view: SourceView) -> Lost:
    """What was lost in all that time or, where that is more of it, in the window."""
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
        why.append(f"nothing was heard for {view.stale_s:.0f} s")
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
        why.append(f"{counted(loss.left_out, 'announcement')} had no room")
        evidence.append(Evidence("announcements left out", loss.left_out, "announcements"))
    if view.books is not None and not view.books.close:
        why.append("the books do not close, so no share of a step's time can be trusted")
        evidence.append(Evidence("books off by", _off_us(view.books), "µs"))
    if not why:
        return None
    return Finding(f"Data is incomplete: {'; '.join(why)}", tuple(evidence), Subject(About.SOURCE, view.program))


def _off_us(books: BooksView) -> float:
    """By how much parts are larger than what they are parts of."""
    return max(books.over_us, -books.unattributed_us, sum(one.us for one in books.outdone))


DATA_INCOMPLETE = Rule(
    id="data-incomplete",
    severity=Severity.ERROR,
    means="Something is missing from what is shown: figures may be wrong by more than their digits say.",
    fires=f"More than {LOST_PERCENT:g} % of the records since somebody looked, or of those in the window, were lost, "
    "announcements had no room, the books do not close, its daemon is silent, or the source is faulty.",
    advice="See the line `records` and the books; a larger ring, or fewer recorded steps, loses fewer records.",
    find=_find,
)
