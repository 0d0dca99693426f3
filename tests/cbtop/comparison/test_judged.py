"""The result of a threshold passes or fails, and parts that only the new run has are results, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cbtop.comparison.judged import Judged, Outcome, must_be_sure, not_in_baseline
from cbtop.comparison.run_diff import RunDiff
from cbtop.comparison.runs import TooShort
from tests.cbtop.comparison.made_runs import made_run


@pytest.mark.parametrize(("outcome", "passes", "is_sure"), zip(Outcome, (1, 1, 0, 0), (1, 0, 0, 0), strict=True))
def test_unsure_passes_unless_a_threshold_must_be_sure(outcome: Outcome, passes: int, is_sure: int) -> None:
    one = Judged("rule", "decode", outcome, "1.0×")
    assert (one.where, one.passes) == (("", 1), bool(passes))
    (sure,) = must_be_sure([one])
    assert sure.passes is bool(is_sure)
    assert (sure == one) is (outcome is not Outcome.UNSURE)


@pytest.mark.parametrize(("alone_us", "is_named"), [(10.0, False), (10.5, True)])
def test_what_only_the_new_run_has_is_named_above_a_tenth_of_its_time(alone_us: float, is_named: bool) -> None:
    alone = TooShort("prefill", 3, 20, alone_us)
    now = replace(made_run(1), parts=(), too_short=(alone, TooShort("decode", 19, 20, 100 - alone_us)))
    found = RunDiff(made_run(2), now, alone_short=(alone,))
    said = "too few prefill steps to be compared, 3 of 20 needed, and what it alone has takes 10 % of its time"
    judged = not_in_baseline(found)
    assert [one.said for one in judged] == [said.replace("10 %", f"{alone_us:.1f} %")] * is_named
    assert {(one.rule, one.about, one.outcome) for one in judged} == (
        {("prefill: is compared", "prefill", Outcome.UNKNOWN)} if is_named else set()
    )
    assert {one.rule for one in not_in_baseline(found, "step<=2x")} == ({"step<=2x"} if is_named else set())
