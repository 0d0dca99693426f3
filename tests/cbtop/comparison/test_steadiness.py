"""Tests of drift and of long calls. Both fail a gate with three base runs, and are only named with fewer base runs.

Noise fails no gate.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from cbtop.comparison.default_gate import default_gate
from cbtop.comparison.judged import Judged, Outcome
from cbtop.comparison.noise import Change
from cbtop.comparison.run_diff import diff_of
from cbtop.comparison.runs import Run
from cbtop.comparison.steadiness import drift_text, steadiness
from tests.cbtop.comparison.made_runs import STEADY, Noise, made_run, steady
from tests.cbtop.comparison.test_gate_power import MACHINES

DRIFT, TAILS = "decode: no more drift beyond noise", "decode: no longer p99 beyond noise"
BEFORE = [1, 2, 3]


def judged_of(bases: Sequence[Run], now: Run) -> dict[str, Judged]:
    return {one.rule: one for one in default_gate(diff_of(bases, [now])) if one.rule in (DRIFT, TAILS)}


@pytest.mark.parametrize(("base_runs", "outcome"), [(1, Outcome.UNKNOWN), (3, Outcome.BROKEN)])
def test_drift_inside_a_run_is_said_with_its_figure_and_the_baselines(base_runs: int, outcome: Outcome) -> None:
    bases = [made_run(seed, STEADY) for seed in BEFORE[:base_runs]]
    found = judged_of(bases, made_run(4, replace(STEADY, late=0.3)))
    assert (found[DRIFT].outcome, found[DRIFT].guilty) == (outcome, "drift inside the run")
    assert found[DRIFT].said.startswith("the last third of decode steps takes 1.30 ± 0.")
    assert " times the first third; in the baseline 1.00" in found[DRIFT].said
    assert found[TAILS].outcome is Outcome.HOLDS


@pytest.mark.parametrize(("base_runs", "outcome"), [(1, Outcome.UNKNOWN), (3, Outcome.BROKEN)])
def test_a_longer_p99_is_said_with_its_brick_and_its_median(base_runs: int, outcome: Outcome) -> None:
    bases = [made_run(seed, STEADY) for seed in BEFORE[:base_runs]]
    found = judged_of(bases, made_run(4, replace(STEADY, tail=9.0)))
    assert (found[TAILS].outcome, found[TAILS].guilty, found[TAILS].brick) == (outcome, *["DownProjection"] * 2)
    assert found[TAILS].about == "decode: DownProjection"
    assert re.match(
        r"p99 25\d\.\d µs → 2\.\d+ ms, 9\.\d+× ± 0\.\d+, while its median call takes 1\.0\d+×", found[TAILS].said
    )
    assert found[DRIFT].outcome is Outcome.HOLDS


def test_a_base_run_that_is_too_short_for_drift_breaks_nothing_with_two_others() -> None:
    late = made_run(4, replace(STEADY, late=0.3))
    bases = [made_run(seed, STEADY, 240 if seed < 3 else 56) for seed in BEFORE]
    assert judged_of(bases, late)[DRIFT].outcome is Outcome.UNKNOWN
    assert judged_of([*bases, made_run(5, STEADY)], late)[DRIFT].outcome is Outcome.BROKEN


@pytest.mark.parametrize(
    ("before", "now", "half", "outcome"),
    [
        (1.0, 1.02, 0.05, Outcome.HOLDS),
        (1.0, 1.06, 0.05, Outcome.UNSURE),
        (1.0, 1.2, 0.3, Outcome.UNSURE),
        (1.0, 1.25, 0.3, Outcome.UNSURE),
        (1.0, 1.26, 0.3, Outcome.UNKNOWN),
        (1.0, 1.09, 0.3, Outcome.HOLDS),
        (1.0, 1.0, 1.0, Outcome.HOLDS),
        (1.0, 1.0, 1.01, Outcome.UNSURE),
        (1.0, 0.7, 0.05, Outcome.HOLDS),
        (0.7, 1.0, 0.05, Outcome.HOLDS),
        (1.0, 1.26, 0.2, Outcome.BROKEN),
        (10.0, 10.5, 0.5, Outcome.HOLDS),
        (10.0, 11.0, 3.0, Outcome.HOLDS),
        (10.0, 11.0, 0.5, Outcome.UNSURE),
    ],
)
def test_drift_within_its_interval_is_unsure_and_from_a_quarter_unknown(
    before: float, now: float, half: float, outcome: Outcome
) -> None:
    (part,) = steady().parts
    assert part.drift is not None
    drift = replace(part.drift, change=Change(before, now, half), base_ratios=(before,) * 3)
    (judged,) = [one for one, _ in steadiness(replace(part, drift=drift)) if one.rule == DRIFT]
    assert judged.outcome is outcome
    assert drift_text(part, drift) == (
        f"the last third of decode steps takes {now:.2f} ± {half:.2f} times the first third; "
        f"in the baseline {before:.2f}"
    )


def test_what_a_file_of_an_older_version_lacks_is_not_judged() -> None:
    def older(run: Run) -> Run:
        (part,) = run.parts
        places = {place: replace(times, p99=None) for place, times in part.places.items()}
        return replace(run, parts=(replace(part, thirds=(), places=places),))

    assert judged_of([older(made_run(seed, STEADY)) for seed in BEFORE], made_run(4, STEADY)) == {}


ODD = {
    "pauses in 0.5 % of steps": Noise(pauses=2e-4),
    "pauses in 1 % of steps": Noise(pauses=4e-4),
    "runs that differ": Noise(run=0.04),
    "a slow wander": Noise(machine=0.03, memory=0.98),
}


def pool(noise: Noise, first: int, runs: int) -> list[Run]:
    """Return runs of the same program. Sets drawn from them share runs, so the sets are not independent."""
    made = made_run.__wrapped__  # Call `made_run` without its cache, which would keep all runs in memory.
    return [made(first + at, noise, 420) for at in range(runs)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*MACHINES, *ODD])
def test_at_most_one_in_a_hundred_runs_of_the_same_drifts_or_has_longer_calls(name: str) -> None:
    """Compare runs of the same program 200 times with three base runs, and 200 times with six.

    The runs are drawn from a pool of 160.
    """
    runs, draw = pool((MACHINES | ODD)[name], 2 * 10**7, 160), Random(1)
    for base_runs in (3, 6):
        outcomes = Counter[tuple[str, Outcome]]()
        for _ in range(200):
            *bases, now = draw.sample(runs, base_runs + 1)
            outcomes.update((judged.rule, judged.outcome) for judged in judged_of(bases, now).values())
        drift, tails = ([outcomes[rule, one] for one in Outcome] for rule in (DRIFT, TAILS))
        print(f"{name}, {base_runs} base runs: drift {drift}, p99 {tails} of 200 {[*Outcome]}")  # noqa: T201
        assert max(outcomes[rule, Outcome.BROKEN] for rule in (DRIFT, TAILS)) <= 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MACHINES)
def test_drift_and_long_calls_are_named_on_any_machine(name: str) -> None:
    noise, draw = MACHINES[name], Random(1)
    runs = pool(noise, 3 * 10**7, 30)
    late, tail = (pool(planted, 4 * 10**7, 20) for planted in (replace(noise, late=0.3), replace(noise, tail=9.0)))
    for base_runs in (3, 6):
        found = []
        for rule, planted in ((DRIFT, late), (TAILS, tail)):
            judged = [judged_of(draw.sample(runs, base_runs), now).get(rule) for now in planted]
            found.append(len([one for one in judged if one and one.outcome is Outcome.BROKEN]))
        print(f"{name}, {base_runs} base runs: of 20 drifts {found[0]} are named, of 20 long tails {found[1]}")  # noqa: T201
        # In two cases, fewer than 18 may be named: random drift of three base runs can hide the planted drift, and a
        # noisy neighbour causes long calls by itself.
        assert found[0] >= 18 or (name, base_runs) == ("a drifting clock", 3)
        assert found[1] >= 18 or name == "a noisy neighbour"


def test_drift_and_p99_are_about_their_batch() -> None:
    (part,) = steady().parts
    found = [judged for judged, _ in steadiness(replace(part, batch_name="decode, batch 6"))]
    assert [one.about for one in found] == ["decode, batch 6"] * 2
