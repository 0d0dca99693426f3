"""The text of a comparison of two runs."""

from __future__ import annotations

from dataclasses import replace

from cbtop.comparison.run_diff import diff
from cbtop.reports.run_diff import diff_text, work_done
from tests.cbtop.comparison.made_runs import STEADY, made_run


def test_whole_numbers_of_tokens_and_sequences_have_no_decimals() -> None:
    (part,) = diff(made_run(1, STEADY, 40), made_run(2, STEADY, 40)).parts
    assert work_done(replace(part, now=replace(part.now, tokens=2.0, sequences=4.0))) == (
        "decode of 2 tokens on 4 sequences"
    )
    assert work_done(replace(part, now=replace(part.now, tokens=2.25, sequences=1.0))) == "decode of 2.25 tokens"


def test_the_sums_name_the_steps_that_they_are_of() -> None:
    text = diff_text(diff(made_run(1, STEADY, 40), made_run(2, STEADY, 40)))
    assert "wall clock of these steps " in text
