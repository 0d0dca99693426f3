"""Tests of the rates of a simulated server: how often noise exceeds their intervals, and which changes they show."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from cbtop.comparison.noise import half_of
from cbtop.comparison.phase_rates import IN_STEPS, TOKENS, PhaseRates, phase_rates, rates_together
from cbtop.comparison.rate_blocks import EndedSteps, RateBlocks
from cbtop.comparison.rate_diff import rate_diff
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind

DECODE, PREFILL = 1, 2
TABLE = NodeTable()
for number, name in ((DECODE, "decode"), (PREFILL, "prefill")):
    TABLE.add(Node(number, None, NodeKind.STEP, name))
STEPS_A_ROUND = 6  # The server answers a request with one prefill step and five decode steps.
WAIT_US = 3000.0


@cache
def served(seed: int, rounds: int = 300, slower: float = 1.0) -> tuple[PhaseRates, ...]:
    """Simulate a server that answers batches of one to eight prompts and waits a random time before each batch.

    Step times have noise of 3 % and wander by 1 % over tens of steps. Steps take `slower` times as long.
    """
    chance = np.random.default_rng(seed)
    batch = np.repeat(chance.integers(1, 9, rounds), STEPS_A_ROUND)
    is_prompt = np.arange(len(batch)) % STEPS_A_ROUND == 0
    wander = 0.01 * np.convolve(chance.standard_normal(len(batch)), np.full(40, 40**-0.5), "same")
    us = np.where(is_prompt, 800 * batch, 1000 + 80 * batch) * slower
    us = us * np.exp(0.03 * chance.standard_normal(len(batch)) + wander)
    waits = np.where(is_prompt, chance.exponential(WAIT_US, len(batch)), 20.0)
    end = np.cumsum(us + waits)
    start_ns, end_ns = (np.round(1e3 * column).astype(np.int64) for column in (end - us, end))
    node, tokens = np.where(is_prompt, PREFILL, DECODE), np.where(is_prompt, 64 * batch, batch)
    blocks = RateBlocks()
    nothing = np.full(len(batch), -1)
    blocks.take(EndedSteps(node, start_ns, end_ns, tokens, batch, nothing, nothing > 0), set())
    return phase_rates(blocks, TABLE, {}, is_shown_whole=False)


def outside_of(cases: int, bases: int, rate: str, slower: float = 1.0) -> tuple[int, int]:
    """Return how many comparisons report a lower rate of decode steps, and how many report a higher rate."""
    lower = higher = 0
    for at in range(cases):
        seeds = range(1000 + (bases + 1) * at, 1000 + (bases + 1) * (at + 1))
        *before, now = (served(seed, slower=slower if seed == seeds[-1] else 1.0) for seed in seeds)
        base = rates_together(before, bases) if bases > 1 else before[0]
        found = rate_diff(*(next(one for one in run if one.phase == "decode") for run in (base, now)), rate, (), 1)
        assert found
        lower += found.time_us.delta > found.time_us.half
        higher += -found.time_us.delta > found.time_us.half
    return lower, higher


@pytest.mark.parametrize("rate", [TOKENS, IN_STEPS])
def test_chance_moves_no_rate_of_a_server_out_of_its_interval(rate: str) -> None:
    assert outside_of(8, 1, rate) == (0, 0)
    assert outside_of(8, 1, rate, 3.0) == (8, 0)


@pytest.mark.slow
@pytest.mark.parametrize("bases", [1, 3, 6])
@pytest.mark.parametrize("rate", [TOKENS, IN_STEPS])
def test_of_a_thousand_comparisons_of_servers_at_most_ten_name_a_rate(rate: str, bases: int) -> None:
    lower, higher = outside_of(1000, bases, rate)
    named = {slower: outside_of(100, bases, rate, slower)[0] for slower in (1.1, 1.2, 1.5)}
    print(f"{rate}, {bases} base runs: {lower} lower, {higher} higher of 1,000; of 100 named: {named}")  # noqa: T201
    assert lower + higher <= 10


@pytest.mark.slow
@pytest.mark.parametrize("rate", [TOKENS, IN_STEPS])
def test_at_most_ten_of_a_thousand_servers_break_a_limit_at_their_true_rate(rate: str) -> None:
    figures = [
        next(one for one in served(seed) if one.phase == "decode").times_us[rate]
        for seed in range(10**5, 10**5 + 1000)
    ]
    true_us = float(np.mean([figure.mean for figure in figures]))
    off = [(figure.mean - true_us) / half_of(figure) for figure in figures]
    lower, higher = (sum(sign * one > 1 for one in off) for sign in (1, -1))
    print(f"{rate}: {lower} lower, {higher} higher of 1,000, intervals of 1 to {max(map(abs, off)):.2f}")  # noqa: T201
    assert lower <= 10
    assert higher <= 10
