"""Tests of the gate's report in text and Markdown: no sentence appears twice."""

from __future__ import annotations

from cbtop.comparison.judged import Judged, Outcome
from cbtop.comparison.run_diff import diff_of
from cbtop.reports.gate import gate_markdown, gate_text, summary
from tests.cbtop.comparison.made_runs import Noise, made_run

SHARED = "too few runs; record more"


def test_a_remark_on_several_verdicts_is_printed_once_below_the_table() -> None:
    judged = [
        Judged("first", "decode", Outcome.UNKNOWN, f"1.10x; {SHARED}"),
        Judged("second", "decode", Outcome.UNKNOWN, f"1.20x; its own; {SHARED}"),
        Judged("third", "decode", Outcome.HOLDS, "1.00x"),
    ]
    found = diff_of([made_run(1, Noise())], [made_run(2, Noise())])
    for text in (gate_text(judged, found), gate_markdown(judged, found)):
        assert text.count(SHARED) == 1
        assert "1.20x; its own" in text
        assert "2 of 3 unknown" in text
    table, _, rest = gate_text(judged, found).partition("\n[1]")
    assert table.count(" [1]") == 2
    assert rest.startswith(f" {SHARED}\n\n2 of 3 unknown")
    assert summary(judged) == f"2 of 3 unknown: first: unknown: decode: 1.10x; {SHARED}"


def test_a_note_that_is_the_reason_of_a_verdict_is_not_printed_again() -> None:
    found = diff_of([made_run(1, Noise(warm_up=30.0))], [made_run(2, Noise())])
    note, *_ = found.notes
    judged = [Judged("is compared", "decode", Outcome.UNKNOWN, note)]
    for write in (gate_text, gate_markdown):
        assert write([], found).count(note) == 1
        assert write(judged, found).count(note) == 1
