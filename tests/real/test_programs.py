"""Tests of the repetition: a pair of programs runs again if other processes may have caused a wrong result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.viewmodels.verdict import About, Severity, Subject, Verdict
from tests.cbtop import samples
from tests.real.programs import Outcome, Run


def verdict(id_: str) -> Verdict:
    return Verdict(id_, Severity.WARNING, "", (), "", Subject(About.STEPS, "decode"))


class Played(Run):
    """A Run that starts no program.

    It returns the given verdicts one after another, as if the machine were quiet.
    """

    def __init__(self, *ids: Sequence[str]) -> None:
        super().__init__(Path())
        self.left = list(ids)

    def __call__(self, script: str, kind: str, overhead: str = "") -> Outcome:
        view = replace(samples.LIVE, verdicts=tuple(verdict(one) for one in self.left.pop(0)))
        return Outcome(view, (view,), "", "", Path(), is_shared=False)


@pytest.mark.parametrize(
    ("runs", "warnings"),
    [
        ([["outlier-mean"], []], set()),
        # The third run has the warning again, so it did not come by chance.
        ([["bimodal-latency"], ["outlier-mean"], ["outlier-mean"]], {"outlier-mean"}),
        ([["odd-layer"]], {"odd-layer"}),
        ([["odd-layer", "outlier-mean"]], {"odd-layer", "outlier-mean"}),
    ],
)
def test_a_healthy_twin_is_run_again_if_its_warnings_may_be_of_neighbours(
    runs: list[list[str]], warnings: set[str]
) -> None:
    played = Played(*runs)
    assert played.healthy("a").warnings == warnings
    assert played.left == []


@pytest.mark.parametrize(
    ("runs", "warnings"),
    [
        ([["outlier-mean"]], {"outlier-mean"}),
        ([["outlier-mean", "bimodal-latency"], ["outlier-mean"]], {"outlier-mean"}),
        ([[]], set()),  # nothing was hidden
        ([["outlier-mean", "odd-layer"]], {"outlier-mean", "odd-layer"}),
    ],
)
def test_a_faulty_twin_is_run_again_if_another_warning_may_be_of_neighbours(
    runs: list[list[str]], warnings: set[str]
) -> None:
    played = Played(*runs)
    assert played.faulty("a", "outlier-mean").warnings == warnings
    assert played.left == []
