"""Tests of the verdicts on commits in `cbtop bisect`, with simulated runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cbtop.comparison.bisect_verdict import Assessment, CommitVerdict, Wanted, assess, said_of, verdict_of, wanted_of
from cbtop.comparison.judged import Judged, Outcome
from cbtop.comparison.runs import Run
from cbtop.comparison.threshold_grammar import parse
from tests.cbtop.comparison.made_runs import Noise, made_run
from tests.representatives import first_by_default

QUIET = Noise(memory=0, machine=0.003, brick=0.003, call=0.01, pauses=0)
DOWN = "DownProjection in Layer 4"


def runs(first: int, number: int = 3, **changed: object) -> list[Run]:
    return [made_run(first + at, QUIET, 40, **changed) for at in range(number)]  # type: ignore[arg-type]


def assessed(*thresholds: str, **changed: object) -> Assessment:
    """Compare three runs with three base runs of a steady program. Returns the comparison."""
    return assess(runs(0), runs(10, **changed), [parse(one) for one in thresholds], anyway=False)


def wanted(*thresholds: str, **changed: object) -> Wanted:
    found = wanted_of(assessed(*thresholds, **changed))
    assert found is not None
    return found


def verdict(assessment: Assessment, of: Wanted, *, is_last: bool = False) -> CommitVerdict:
    return verdict_of(assessment, of, is_last=is_last)


@pytest.mark.slow
def test_a_run_that_is_not_slower_has_no_breakage() -> None:
    assert wanted_of(assessed()) is None


def test_a_commit_is_bad_if_it_breaks_what_bad_breaks() -> None:
    bad = wanted(slower=1.5)
    assert bad.slowdown is not None
    assert (bad.slowdown.name, bad.slowdown.ratio) == (DOWN, pytest.approx(1.5, rel=0.02))
    assert verdict(assessed(slower=1.3), bad) is CommitVerdict.BAD
    assert said_of(assessed(slower=1.3), bad).startswith(f"{DOWN}: 1.")


def test_a_commit_is_good_only_if_half_of_the_slowdown_is_excluded() -> None:
    """If the interval of a change is wide, the commit gets no verdict, whatever the centre of the interval is."""
    bad = wanted(slower=1.5)
    assert verdict(assessed(), bad) is CommitVerdict.GOOD
    noisy = Noise(memory=0, machine=0.003, brick=0.003, call=0.01, pauses=0, run=0.05)
    bases, news = ([made_run(at + first, noisy, 40) for at in range(3)] for first in (20, 30))
    wide = assess(bases, news, [], anyway=False)
    assert not wide.broken
    assert verdict(wide, bad, is_last=True) is CommitVerdict.UNCLEAR


@pytest.mark.slow
def test_another_slowdown_is_not_that_of_bad() -> None:
    bad = wanted(slower=1.5)
    waits = assessed(between_steps_us=3000.0)
    assert waits.broken
    assert verdict(waits, bad) is CommitVerdict.GOOD
    other_brick = assessed(cached_from=0, us_a_position=5.0)
    assert verdict(other_brick, bad) is not CommitVerdict.BAD


@pytest.mark.slow
def test_a_wait_between_steps_is_found_by_the_typical_step() -> None:
    bad = wanted(between_steps_us=3000.0)
    assert bad.slowdown is not None
    assert bad.slowdown.name == "typical decode step"
    assert verdict(assessed(between_steps_us=2500.0), bad) is CommitVerdict.BAD
    assert verdict(assessed(), bad) is CommitVerdict.GOOD
    assert said_of(assessed(), bad).startswith("typical decode step: 1.0")


@first_by_default(("wait_us", "name"), [(200.0, "typical decode step"), (100.0, DOWN)])
def test_the_larger_part_of_a_longer_step_decides(wait_us: float, name: str) -> None:
    """Two parts of the step take longer: DownProjection by 120 µs, and the wait between steps by `wait_us`."""
    bad = wanted(slower=1.5, between_steps_us=30 + wait_us)
    assert bad.slowdown is not None
    assert bad.slowdown.name == name
    assert {brick for _, brick in bad.keys} >= {"DownProjection"}


@pytest.mark.parametrize(
    ("guilty", "expected"),
    [("DownProjection in Layer 1", CommitVerdict.BAD), ("RmsNorm in Layer 4", CommitVerdict.UNCLEAR)],
)
def test_a_longer_step_is_that_of_bad_if_the_same_brick_is_its_cause(guilty: str, expected: CommitVerdict) -> None:
    found = assessed(slower=1.5)
    (step,) = [one for one in found.broken if "no longer step" in one.rule]
    bad = wanted(slower=1.5)
    assert verdict(replace(found, judged=(replace(step, guilty=guilty),)), bad) is expected


def test_a_slowdown_shared_by_places_is_bad_by_its_rule_alone() -> None:
    bad = Wanted(frozenset({("rule", "no single brick; most Attention")}), None)
    found = assessed()
    shares = replace(found, judged=(Judged("rule", "decode", Outcome.BROKEN, "", "no single brick; most RmsNorm"),))
    assert verdict(shares, bad) is CommitVerdict.BAD
    assert said_of(shares, bad) == "no single brick; most RmsNorm: "
    other = replace(found, judged=(Judged("other", "decode", Outcome.BROKEN, "", "no single brick; most Attention"),))
    # The gate has no result for the rule that the bisection searches for.
    assert verdict(other, bad) is CommitVerdict.UNCLEAR
    holds = replace(other, judged=(*other.judged, Judged("rule", "decode", Outcome.HOLDS, "")))
    assert verdict(holds, bad) is CommitVerdict.GOOD


def test_an_unsure_threshold_passes_after_all_rounds_only() -> None:
    limit = "DownProjection@4.p50<=1.2x"
    bad = wanted(limit, slower=1.5)
    assert bad.slowdown is None
    assert verdict(assessed(limit, slower=1.5), bad) is CommitVerdict.BAD
    unsure = assessed(limit, slower=1.2)
    assert [one.outcome for one in unsure.judged] == [Outcome.UNSURE]
    assert verdict(unsure, bad) is CommitVerdict.UNCLEAR
    assert verdict(unsure, bad, is_last=True) is CommitVerdict.GOOD
    unknown = replace(unsure, judged=(replace(unsure.judged[0], outcome=Outcome.UNKNOWN),))
    assert verdict(unknown, bad, is_last=True) is CommitVerdict.UNCLEAR


def test_a_threshold_is_broken_by_the_same_place() -> None:
    limit = "ffn<=1.2x"
    bad = wanted(limit, in_layer=None, slower=1.5)
    other = assessed(limit, in_layer=None, slower=1.5)
    other = replace(other, judged=tuple(replace(one, about="decode: UpProjection") for one in other.judged))
    assert verdict(other, bad) is not CommitVerdict.BAD


def test_runs_that_cannot_be_compared_are_unclear_with_the_reason() -> None:
    bad = wanted(slower=1.5)
    lossy = [replace(run, lost=run.seen) for run in runs(10)]
    found = assess(runs(0), lossy, [], anyway=False)
    assert verdict(found, bad, is_last=True) is CommitVerdict.UNCLEAR
    assert "of the records were lost" in said_of(found, bad)


def test_a_commit_without_the_slow_brick_is_unclear() -> None:
    bad = wanted(slower=1.5)
    gone = assessed(rename="Another")
    assert verdict(gone, bad, is_last=True) is CommitVerdict.UNCLEAR
    assert said_of(gone, bad) == f"{DOWN}: it has none"
