"""Tests of marks in the time bar: each finding is marked in its second.

If there are several, the most urgent is shown.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.client.source_record import SourceRecord, StepSample
from cbtop.client.window import Window
from cbtop.feeds.marks import MAX_MARKS, Marks
from cbtop.feeds.replay import ReplayFeed
from cbtop.protocol.messages import HostHello, SourceState
from cbtop.protocol.vocabulary import SourceStatus
from cbtop.viewmodels.on_demand import LazyValue, with_parts
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.time_travel import Mark
from cbtop.viewmodels.verdict import Severity, Subject, Verdict
from tests.cbtop import samples
from tests.cbtop.feeds.test_replay import IMPERFECT, Hand

S = 1_000_000_000
BEGIN_NS = 70 * S + 123


def record(key: str = "a", state: SourceStatus = SourceStatus.LIVE, began_s: float = 0) -> SourceRecord:
    made = SourceRecord(key, Window(10))
    began_ns = BEGIN_NS + round(began_s * S)
    made.hello = HostHello(2, 0, 7, 1, "here", "boot", "x.py", "3.12", "c", began_ns, 0)
    made.state = SourceState(key, state, "", 0, 0, 0, 0, 0, 0)
    return made


def test_a_start_or_end_between_two_looks_is_marked_and_earlier_ones_are_not() -> None:
    marks = Marks(BEGIN_NS)
    marks.look(BEGIN_NS, [record(), record("gone", SourceStatus.ENDED)])
    marks.look(BEGIN_NS + S, [record(), record("gone", SourceStatus.ENDED)])
    marks.look(BEGIN_NS + 2 * S, [record(), record("b", began_s=1.8)])
    marks.look(BEGIN_NS + 3 * S, [record("a", SourceStatus.ENDED), record("b")])
    assert marks.found == {1: Mark.STARTED, 3: Mark.ENDED}
    late = [record("ran for long", began_s=-60), record("had ended", SourceStatus.ENDED, began_s=-50)]
    marks.look(BEGIN_NS + 4 * S, [*late, record("has another clock", began_s=1e6)])
    assert len(marks.found) == 2
    marks.forget_before()
    marks.look(BEGIN_NS + 9 * S, [record("c"), record("b", SourceStatus.ENDED)])
    assert len(marks.found) == 2


def test_another_phase_is_marked_in_the_second_when_it_took_the_most_time() -> None:
    marks, one = Marks(BEGIN_NS), record()
    # milliseconds of decode steps and of prefill steps in each second
    took = [(0, 9), (0, 8), (5, 2), (6, 1), (0, 0), (7, 0), (0, 4)]
    total = [0, 0]
    for second, ms in enumerate([(0, 0), *took]):
        total = [a + b for a, b in zip(total, ms, strict=True)]
        for phase, time_ms in zip(("decode", "prefill"), total, strict=True):
            one.history.setdefault(phase, deque()).append(StepSample(second * S, 0, time_ns=time_ms * 1_000_000))
        marks.look(BEGIN_NS + second * S, [one])
    assert marks.found == {3: Mark.PHASE, 7: Mark.PHASE}


def judged(*ids: str, severity: Severity = Severity.WARNING) -> SourceView:
    return replace(
        samples.LIVE, verdicts=tuple(Verdict(one, severity, "", (), "", Subject("source", "")) for one in ids)
    )


def test_a_verdict_is_marked_when_it_begins_and_not_if_it_lasts_or_flickers() -> None:
    marks = Marks(BEGIN_NS)
    shown = ["", "stuck", "stuck", "", "", "stuck", "", *[""] * 5, "stuck"]
    for at, one in enumerate(shown):
        marks.judge(BEGIN_NS + 2 * at * S, judged(*([one] if one else [])))
    assert marks.found == {2: Mark.VERDICT, 2 * (len(shown) - 1): Mark.VERDICT}


def test_no_verdict_is_marked_after_a_gap_or_for_a_note_or_for_another_phase() -> None:
    marks = Marks(BEGIN_NS)
    marks.judge(BEGIN_NS, judged())
    marks.judge(BEGIN_NS + 30 * S, judged("stuck"))
    marks.judge(BEGIN_NS + 31 * S, judged("stuck", "memory-bound", severity=Severity.NOTE))
    # The replay has moved back, so this second is before the previous one.
    marks.judge(BEGIN_NS + 29 * S, judged("stuck"))
    marks.judge(BEGIN_NS + 32 * S, replace(judged("odd-layer"), phase="prefill"))
    assert marks.found == {}


def test_of_every_other_second_the_verdicts_of_one_view_are_made_and_no_more() -> None:
    marks, made = Marks(BEGIN_NS), []

    def verdicts() -> tuple[Verdict, ...]:
        made.append("stuck")
        return judged("stuck").verdicts

    for moment_ns in (BEGIN_NS, BEGIN_NS, BEGIN_NS + S, BEGIN_NS + 2 * S, BEGIN_NS + 3 * S):
        marks.judge(moment_ns, with_parts(samples.LIVE, verdicts=LazyValue(verdicts)))
    assert made == ["stuck"] * 2


def test_of_one_second_the_most_urgent_stays_and_there_is_an_end_to_marks() -> None:
    marks = Marks(BEGIN_NS)
    marks.judge(BEGIN_NS - S, judged())
    marks.judge(BEGIN_NS + S, judged("stuck"))
    marks.look(BEGIN_NS + S - 1, [])
    marks.look(BEGIN_NS + S, [record(began_s=1)])
    assert marks.found == {1: Mark.VERDICT}
    for second in range(MAX_MARKS + 5):
        marks.look(BEGIN_NS + (10 + second) * S, [record(str(second), began_s=10 + second)])
    assert len(marks.found) == MAX_MARKS
    marks.forget_older(BEGIN_NS + 100 * S)
    assert min(marks.found) == 100


@pytest.mark.parametrize("later_ns", [0, 5 * S, 5 * S + S // 2])
def test_marks_that_were_found_elsewhere_stand_in_their_second(later_ns: int) -> None:
    marks, others = Marks(BEGIN_NS + later_ns), Marks(BEGIN_NS)
    others.look(BEGIN_NS, [])
    for second in (2, 9):
        others.look(BEGIN_NS + second * S, [record(str(second), began_s=second)])
    marks.take(others)
    begins = [second for second in (2 * S - later_ns, 9 * S - later_ns) if second >= 0]
    assert list(marks.found) == [begin_ns // S for begin_ns in begins]
    assert marks.found == dict(others.since(BEGIN_NS + later_ns))


def test_a_recording_that_is_played_has_marks_of_every_kind_that_was_in_it(tmp_path: Path) -> None:
    hand = Hand()
    with ReplayFeed(IMPERFECT, clock_s=hand) as feed:
        while feed.at_s < feed.duration_s:
            hand.now_s += 1
            feed.poll()
            feed.view(window=True)
        assert {Mark.STALLED, Mark.VERDICT} <= set(feed.marks.values())
        feed.seek(3)
        assert {Mark.STALLED, Mark.VERDICT} <= set(feed.marks.values())
