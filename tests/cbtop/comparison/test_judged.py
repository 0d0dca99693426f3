"""Tests of the results of thresholds: which results pass, which are sure, and which have no baseline."""

from __future__ import annotations

import pytest

from cbtop.comparison.judged import Judged, Outcome, must_be_sure


@pytest.mark.parametrize(("outcome", "passes", "is_sure"), zip(Outcome, (1, 1, 0, 0), (1, 0, 0, 0), strict=True))
def test_unsure_passes_unless_a_threshold_must_be_sure(outcome: Outcome, passes: int, is_sure: int) -> None:
    one = Judged("rule", "decode", outcome, "1.0×")
    assert (one.where, one.passes) == (("", 1), bool(passes))
    (sure,) = must_be_sure([one])
    assert sure.passes is bool(is_sure)
    assert (sure == one) is (outcome is not Outcome.UNSURE)
