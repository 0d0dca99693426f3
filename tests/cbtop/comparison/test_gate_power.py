"""Tests of what a gate finds: noise alone fails no gate, and planted changes are named at a known rate.

The curve in docs/gate.md: `python -m pytest -m slow -s -n 0 tests/cbtop/comparison/test_gate_power.py`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest

from cbtop.comparison.default_gate import confirmed, default_gate
from cbtop.comparison.judged import Outcome
from cbtop.comparison.part_diff import findable_percent
from cbtop.comparison.run_diff import diff, diff_of
from cbtop.comparison.run_sets import together
from cbtop.reports.run_diff import diff_json, diff_text
from tests.cbtop.comparison.made_runs import Noise, made_run
from tests.representatives import first_by_default

PLANTED = "DownProjection in Layer 4"
USUAL, LOUD = Noise(), Noise(call=0.2)
# Kinds of noise on different machines. Each run of a program has its own random times.
MACHINES = {
    "of a usual machine": USUAL,
    "without memory": Noise(memory=0.0),
    "a drifting clock": Noise(drift=0.06),
    "a noisy neighbour": Noise(neighbour=0.5),
    "a warm-up": Noise(warm_up=2.0),
    "a bimodal brick": Noise(bimodal=1.0),
}


@dataclass
class Tally:
    """Counts of comparisons by their first finding: the brick with the planted change, another brick, or nothing."""

    of: int = 0
    named: int = 0
    wrong: int = 0


def tally(comparisons: int, noise: Noise, steps: int = 240, slower: float = 1.0, first: int = 0) -> Tally:
    """Compare pairs of runs by the default gate. The second run of each pair has a planted change."""
    found = Tally(comparisons)
    for at in range(comparisons):
        base, now = made_run(first + 2 * at, noise, steps), made_run(first + 2 * at + 1, noise, steps, slower=slower)
        broken = [one.guilty for one in default_gate(diff(base, now)) if one.outcome is Outcome.BROKEN]
        found.named += broken[:1] == [PLANTED]
        found.wrong += bool(broken) and broken[:1] != [PLANTED]
    return found


@pytest.mark.parametrize("comparisons", [2, pytest.param(8, marks=pytest.mark.slow)])
@first_by_default("noise", MACHINES.values(), 3, ids=MACHINES)
def test_what_machines_do_breaks_no_gate(noise: Noise, comparisons: int) -> None:
    found = tally(comparisons, noise)
    assert (found.named, found.wrong) == (0, 0)


@pytest.mark.parametrize("comparisons", [1, pytest.param(4, marks=pytest.mark.slow)])
@first_by_default("name", MACHINES, 3)
def test_ten_percent_on_one_brick_of_one_layer_are_named_on_any_machine(name: str, comparisons: int) -> None:
    found = tally(comparisons, MACHINES[name], slower=1.1)
    assert (found.named, found.wrong) == (comparisons, 0)


@pytest.mark.slow
def test_the_gate_says_how_much_slower_than_others_a_brick_is_on_clock_drift() -> None:
    """The clock drifts by 6 % in each run, so a brick that is 10 % slower is found only relative to other bricks."""
    noise = MACHINES["a drifting clock"]
    found = diff(made_run(0, noise), made_run(1, noise, slower=1.1))
    (judged,) = [one for one in default_gate(found) if one.outcome is Outcome.BROKEN]
    assert judged.guilty == PLANTED
    ratio, half = re.search(r"^(\d\.\d+)× ± (\d\.\d+) relative to all others", judged.said).groups()  # type: ignore[union-attr]
    assert float(ratio) == pytest.approx(1.1, abs=0.02)
    assert float(half) < 0.04
    assert f"is {ratio}× ± {half} of before relative to all others" in diff_text(found)
    places = json.loads(diff_json(found))["parts"][0]["places"]
    (place,) = [one for one in places if one["verdict"] == "slower" and one["brick"]]
    assert place["beside_others_us"]["ratio"] == pytest.approx(float(ratio), abs=0.001)
    assert place["typical_us"]["ratio_half"] > 0.1 > place["beside_others_us"]["ratio_half"]


@pytest.mark.slow
def test_a_gate_says_how_small_a_change_it_finds() -> None:
    """A gate reports the smallest slowdown that it can find.

    This smallest slowdown grows with more variation and with fewer records. A drifting clock does not make it larger,
    because the drift affects all bricks alike.
    """
    findable = {}
    machines = {"usual": (USUAL, 240), "short": (USUAL, 80), "drift": (Noise(drift=0.06), 240), "loud": (LOUD, 240)}
    for name, (noise, steps) in machines.items():
        (part,) = diff(made_run(1, noise, steps), made_run(2, noise, steps)).parts
        known = sorted(findable_percent(one.change) or 0.0 for one in part.cells if one.change and one.p50)
        findable[name] = known[len(known) // 2]
    assert 3.0 < findable["usual"] < 5.0 < findable["short"]
    assert 3.0 < findable["drift"] < 6.0 < findable["loud"]


@pytest.mark.slow  # Not in the default run, because test_check.py tests that one base run fails no gate.
def test_learned_noise_tells_runs_that_differ_from_a_change() -> None:
    """Runs of the same program differ by 4 %. One base run mistakes this for a change, but six base runs do not."""
    noise = Noise(run=0.04)
    alone = learned = 0
    for at in range(4):
        bases = [made_run(100 * at + one, noise, 120) for one in range(6)]
        now = made_run(100 * at + 50, noise, 120)
        alone += any(one.outcome is Outcome.BROKEN for one in default_gate(diff(bases[0], now)))
        learned += any(one.outcome is Outcome.BROKEN for one in default_gate(diff(together(bases), now)))
    assert (alone > 0, learned) == (True, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MACHINES)
def test_at_most_one_in_a_hundred_comparisons_of_the_same_breaks_the_gate(name: str) -> None:
    found = tally(1000 if MACHINES[name] is USUAL else 200, MACHINES[name])
    print(f"{name}: {found.named + found.wrong} of {found.of} comparisons of the same break the gate")  # noqa: T201
    assert found.named + found.wrong <= found.of // 100


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("steps", [60, 120, 240, 480])
def test_only_the_brick_with_five_percent_is_named_in_95_of_100_comparisons(
    steps: int,
) -> None:
    row = []
    for percent in (2, 3, 4, 5, 7, 10):
        found = tally(100, USUAL, steps, 1 + percent / 100, first=10**6)
        row.append(f"+{percent} %: {found.named}")
        if steps >= 240 and percent >= 5:
            assert (found.named >= 0.95 * found.of, found.wrong) == (True, 0)
    print(f"{steps} steps: named of 100: {', '.join(row)}")  # noqa: T201


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_percent_are_named_by_six_base_runs_and_confirmed_by_another() -> None:
    """As in `cbtop demo --check`, a change counts only if both new runs show it."""
    noise, comparisons, row = Noise(run=0.005), 40, []
    for percent in (0, 2, 5):
        named = wrong = 0
        for at in range(comparisons):
            seeds = range(10**7 + 8 * at, 10**7 + 8 * at + 8)
            bases = [made_run(seed, noise, 300) for seed in seeds[:6]]
            first, second = (
                default_gate(diff_of(bases, [made_run(seed, noise, 300, slower=1 + percent / 100)]))
                for seed in seeds[6:]
            )
            broken = [one.guilty for one in confirmed(first, second) if one.outcome is Outcome.BROKEN]
            named += broken[:1] == [PLANTED]
            wrong += bool(broken) and broken[:1] != [PLANTED]
        row.append(f"+{percent} %: {named}")
        assert wrong == 0
        assert percent == 2 or named >= (0.95 * comparisons if percent else 0)
    print(f"confirmed, of six base runs: named of {comparisons}: {', '.join(row)}")  # noqa: T201
