"""Find notable events for the time bar: stalls, beginnings and ends of processes, changes of phase, and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cbtop.client.source_record import SourceRecord
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.stall import StallKind, stall_view
from cbtop.viewmodels.time_travel import Mark
from cbtop.viewmodels.verdict import Severity

MAX_MARKS = 10_000
SECOND_NS = 1_000_000_000
# The begin of a verdict is an event. The verdict was not shown during the last VERDICT_ENDS_NS, and the view was
# judged during the last JUST_BEFORE_NS. Otherwise its begin is unknown.
VERDICT_ENDS_NS, JUST_BEFORE_NS = 10 * SECOND_NS, 3 * SECOND_NS
# Making verdicts takes half the time of a frame, so make them at every other heartbeat.
LOOK_AGAIN_NS = 3 * SECOND_NS // 2
FOUND_WITHIN_NS = 30 * SECOND_NS
_STILL = (StallKind.STALLED, StallKind.SUSPENDED)
_URGENCY = list(Mark)


class Marks:
    """Keeps the most urgent event of each second since `begin_ns`, on the daemon's clock."""

    def __init__(self, begin_ns: int) -> None:
        self.begin_ns = begin_ns
        self.found: dict[int, Mark] = {}
        # For each source: whether the source had ended at the last call of `look`
        self._known: dict[str, bool] | None = None
        self._phases: dict[str, str] = {}  # source -> phase with the most time in its last second
        # view -> when it was last judged, and when each of its verdicts was last shown
        self._judged: dict[tuple[str, str | None, bool], tuple[int, dict[str, int]]] = {}

    def forget_before(self) -> None:
        """Forget the state before a gap in the data. Begins and ends in the gap are not events, because their time is
        unknown.
        """
        self._known = None
        self._phases.clear()

    def forget_older(self, than_ns: int) -> None:
        """Drop all events before the time `than_ns`."""
        for second in [one for one in self.found if self.begin_ns + one * SECOND_NS < than_ns]:
            del self.found[second]

    def look(self, at_ns: int, records: Iterable[SourceRecord]) -> None:
        """Find events by comparing `records` at the time `at_ns` with the records at the last call."""
        known = list(records)
        before, self._known = self._known, {one.key: one.has_ended for one in known}
        for record in known:
            stall = stall_view(record)
            if stall and stall.word in _STILL:
                self._put(at_ns, Mark.STALLED)
            if before is not None and record.key not in before and (began_ns := _began_ns(record, at_ns)) is not None:
                self._put(began_ns, Mark.STARTED)
            if before is not None and record.has_ended and before.get(record.key) is False:
                self._put(at_ns, Mark.ENDED)
            phase = _busiest_phase(record)
            if phase and self._phases.setdefault(record.key, phase) != phase:
                self._phases[record.key] = phase
                self._put(at_ns, Mark.PHASE)

    def judge(self, at_ns: int, view: SourceView) -> None:
        """Find new verdicts on a view at `at_ns`, and store them as events.

        Verdicts are made at most every 1.5 s. Verdicts of severity `note` do not count, because healthy processes
        have them, too.
        """
        what = view.key, view.phase, view.window is None
        seen_ns, known = self._judged.get(what, (None, {}))
        if seen_ns is not None and 0 <= at_ns - seen_ns < LOOK_AGAIN_NS:
            # Reading `view.verdicts` would make the verdicts again, so soon after the last time.
            return
        ids = {one.id for one in view.verdicts if one.severity is not Severity.NOTE}
        if seen_ns is not None and 0 <= at_ns - seen_ns <= JUST_BEFORE_NS:
            if any(at_ns - known.get(one, -VERDICT_ENDS_NS) >= VERDICT_ENDS_NS for one in ids):
                self._put(at_ns, Mark.VERDICT)
        else:
            known = {}
        self._judged[what] = at_ns, {**known, **dict.fromkeys(ids, at_ns)}

    def take(self, other: Marks) -> None:
        """Add the events that `other` has found since `begin_ns`."""
        for second, mark in other.found.items():
            self._put(other.begin_ns + second * SECOND_NS, mark)

    def since(self, begin_ns: int) -> Mapping[int, Mark]:
        """Return the events from `begin_ns` on, by seconds since `begin_ns`."""
        moved = ((self.begin_ns + second * SECOND_NS - begin_ns) // SECOND_NS for second in self.found)
        return {second: mark for second, mark in zip(moved, self.found.values(), strict=True) if second >= 0}

    def _put(self, at_ns: int, mark: Mark) -> None:
        second = (at_ns - self.begin_ns) // SECOND_NS
        before = self.found.get(second)
        if second >= 0 and (before is not None or len(self.found) < MAX_MARKS):
            self.found[second] = mark if before is None else max(mark, before, key=_URGENCY.index)


def _began_ns(record: SourceRecord, at_ns: int) -> int | None:
    """Return when the process began (the time of its hello). None if that was not recently.

    Without a recent hello, it began before this viewer, or has another clock.
    """
    began_ns = record.hello.monotonic_ns if record.hello else None
    return began_ns if began_ns is not None and 0 <= at_ns - began_ns <= FOUND_WITHIN_NS else None


def _busiest_phase(record: SourceRecord) -> str:
    """Return the phase with the most time in the process's last second. "" if no step ended in it."""
    latest = {phase: (list(samples)[-2:]) for phase, samples in record.history.items() if len(samples) > 1}
    newest_ns = max((samples[-1].monotonic_ns for samples in latest.values()), default=0)
    took_ns = {
        phase: now.time_ns - before.time_ns
        for phase, (before, now) in latest.items()
        if now.monotonic_ns == newest_ns and now.time_ns > before.time_ns
    }
    return max(took_ns, key=took_ns.__getitem__, default="")
