"""Tests of what a comparison finds: noise alone changes no brick, and planted changes of calls are found.

This command prints the tables in docs/statistics.md:

`python -m pytest -m slow -s -n 0 tests/cbtop/comparison/test_simulated_power.py`

Each program is simulated once. Its comparisons share these runs, so they are not independent.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest

from cbtop.comparison.default_gate import default_gate, known_to_scatter
from cbtop.comparison.judged import Outcome
from cbtop.comparison.run_diff import RunDiff, diff_of
from cbtop.comparison.runs import Run
from tests.cbtop.comparison.made_runs import Noise, place_of
from tests.cbtop.comparison.simulator import USUAL, Planted, Program, SimulatedBrick, simulated
from tests.cbtop.comparison.test_simulated import broken_quantiles, named

RATES = (3, 10, 30, 50, 70, 97, 100)  # Each simulated brick runs in this percentage of the steps.
RARE = tuple(SimulatedBrick(f"In {percent} %", 120.0, rate=percent / 100) for percent in RATES)
OFTEN = SimulatedBrick("In 30 %", 120.0, rate=0.3, us_a_token=20.0)
BY_RATE, EXPERTS = Program((*USUAL, *RARE)), Program(USUAL, experts=2, of_experts=8)
PROGRAMS = {
    "bricks of every rate": (BY_RATE, Noise()),
    "60 steps of them": (Program((*USUAL, *RARE), steps=60), Noise()),
    "2 of 8 experts": (EXPERTS, Noise()),
    "1 to 4 calls": (Program((*USUAL, SimulatedBrick("Several", 60.0, most=4))), Noise()),
    "batches of 1, 8 and 9": (Program((*USUAL, OFTEN), batches=(1, 8, 9), steps=480), Noise()),
    "prefill and decode": (Program((*USUAL, OFTEN), prefill=0.3, prefill_tokens=16, steps=360), Noise()),
    "one step in four recorded": (Program((*USUAL, *RARE[2:5]), sample_every=4, steps=960), Noise()),
    "calls that vary by 20 %": (BY_RATE, Noise(call=0.2)),
    "a noisy neighbour": (BY_RATE, Noise(neighbour=0.5)),
    "a drifting clock": (BY_RATE, Noise(drift=0.06)),
    "runs that differ by 2 %": (BY_RATE, Noise(run=0.02)),
}
# With these kinds of noise, a single base run does not show how much runs vary.
UNKNOWN_TO_ONE_RUN = ("a noisy neighbour", "a drifting clock", "runs that differ by 2 %")
POOL, COMPARISONS, PLANTED_RUNS = 60, 100, 20


@cache
def pool(name: str, runs: int = POOL) -> list[Run]:
    program, noise = PROGRAMS[name]
    return [simulated(program, seed, noise) for seed in range(runs)]


def alarms(found: RunDiff) -> list[str]:
    """Return the names of the reports that wrongly find a difference between two runs of the same program."""
    gate = known_to_scatter(default_gate(found), found.base.runs)
    told = {
        "gate": any(one.outcome is Outcome.BROKEN for one in gate),
        "diff": bool(named(found)),
        "p50 or p99": bool(broken_quantiles(found)),
        "not compared": not found.parts,
    }
    return [judge for judge, is_alarm in told.items() if is_alarm]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PROGRAMS)
def test_at_most_one_in_a_hundred_comparisons_of_one_program_finds_a_change(name: str) -> None:
    runs, rng = pool(name), random.Random(1)
    for bases in (1, 6):
        told: Counter[str] = Counter()
        for _ in range(COMPARISONS // 2):
            *base, now = rng.sample(runs, bases + 1)
            told.update(alarms(diff_of(base, [now])))
        print(f"{name}, {bases} base: of {COMPARISONS // 2}: {dict(told) or 'none'}")  # noqa: T201
        if name not in UNKNOWN_TO_ONE_RUN:
            assert sum(told.values()) <= COMPARISONS // 100
        assert told["gate"] <= COMPARISONS // 100


def tally(program: Program, bases: int, planted: Planted, true: float, what: str) -> str:
    """Compare PLANTED_RUNS runs that have the change `planted` with base runs.

    Returns a line of text: how many comparisons named the changed brick, and how many named other bricks.
    """
    name = "2 of 8 experts" if program is EXPERTS else "bricks of every rate"
    rng, found, within, wrong, known = random.Random(2), 0, 0, 0, 0
    for run in _changed(program, planted):
        (part,) = (diff := diff_of(rng.sample(pool(name), bases), [run])).parts
        place = place_of(part, planted.name or planted.brick)
        bricks = {where.split(" in Layer")[0] for where, _ in named(diff) if not where.startswith("Layer")}
        found += place.verdict == ("slower" if true > 1 else "faster")
        wrong += bool(bricks - {planted.name or planted.brick})
        told = place.call if what == "call" else place.calls
        if told and told.before:
            known += 1
            within += abs(told.now - told.before * true) <= told.half
    assert wrong <= PLANTED_RUNS // 20
    assert within >= 0.95 * known
    return f"{found}"


@cache
def _changed(program: Program, planted: Planted) -> list[Run]:
    return [simulated(program, 10**6 + seed, planted=planted) for seed in range(PLANTED_RUNS)]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("percent", [3, 10, 30, 100])
def test_a_longer_call_is_found_in_a_brick_of_any_rate(percent: int) -> None:
    row = []
    for call in (1.1, 1.2, 1.5, 0.8):
        planted = Planted(f"In {percent} %", call=call)
        row.append(f"{call}: {' and '.join(tally(BY_RATE, bases, planted, call, 'call') for bases in (1, 6))}")
    print(f"call of a brick in {percent} % of steps, named of {PLANTED_RUNS} by 1 and 6 base: {', '.join(row)}")  # noqa: T201


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("percent", [10, 30])
def test_more_and_fewer_calls_a_step_are_found(percent: int) -> None:
    row = []
    for rate in (1.5, 2.0, 3.0, 0.5):
        planted = Planted(f"In {percent} %", rate=rate)
        row.append(f"{rate}: {' and '.join(tally(BY_RATE, bases, planted, rate, 'calls') for bases in (1, 6))}")
    print(f"calls a step of {percent} %, named of {PLANTED_RUNS} by 1 and 6 base: {', '.join(row)}")  # noqa: T201


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_longer_call_of_an_expert_and_of_a_renamed_brick_are_found() -> None:
    for program, planted in (
        (EXPERTS, Planted("Expert 2", call=1.1)),
        (EXPERTS, Planted("Expert 2", call=0.8)),
        (BY_RATE, Planted("In 30 %", call=1.3, name="Another")),
        (BY_RATE, Planted("Attention", call=1.2, name="Another")),
    ):
        counts = [tally(program, bases, planted, planted.call, "call") for bases in (1, 6)]
        print(f"{planted}: named of {PLANTED_RUNS} by 1 and 6 base: {' and '.join(counts)}")  # noqa: T201
        assert min(map(int, counts)) >= 0.95 * PLANTED_RUNS
