"""Tests of runs that change their batch size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cbtop.comparison.default_gate import default_gate
from cbtop.comparison.judged import Outcome
from cbtop.comparison.noise import Figure, figures, learned
from cbtop.comparison.other_batch import other_batch
from cbtop.comparison.run_diff import diff
from cbtop.comparison.threshold_grammar import parse
from cbtop.comparison.thresholds import judge
from tests.cbtop.comparison.made_runs import STEADY, made_run, wander
from tests.representatives import first_by_default

(PART,) = made_run(1, STEADY, 40).parts


def tokens_of(batches: NDArray[np.float64]) -> Figure:
    """Return the mean tokens per step and its error, computed from blocks of four steps."""
    return figures(batches.reshape(-1, 4).sum(axis=1)[:, None], np.full(len(batches) // 4, 4.0))[0]


def always(tokens: float) -> Figure:
    return Figure(tokens, 0.0, 10)


@pytest.mark.parametrize("name", ["tokens", "sequences"])
def test_a_batch_that_differs_by_over_two_percent_is_named(name: str) -> None:
    def of(amount: float | None) -> str:
        before, now = (
            replace(PART, **{f"{name}_a_step": None if one is None else always(one)}) for one in (32.0, amount)
        )
        return other_batch(before, now, 1)

    assert of(39.0) == f"39.00 {name} a step, 32.00 before"
    assert of(31.0) == f"31.00 {name} a step, 32.00 before"
    assert [of(amount) for amount in (32.0, 32.5, None)] == ["", "", ""]


@pytest.mark.parametrize("memory", [0.0, 0.9])
@first_by_default("bases", [1, 3, 6])
def test_batches_of_random_size_are_told_apart_in_one_of_fifty_pairs(memory: float, bases: int) -> None:
    rng = np.random.default_rng(7)
    apart = 0
    for _ in range(200):
        walks = np.clip(35.5 + 2.2 * wander(rng, 240, bases + 1, memory), 32, 39).round()
        each = [tokens_of(walk) for walk in walks.T]
        before = each[1] if bases == 1 else learned([each[1:]])[0]
        sides = (replace(PART, tokens_a_step=one) for one in (before, each[0]))
        apart += bool(other_batch(*sides, 1))
    assert apart <= 4


def test_a_part_of_another_batch_is_unknown_and_is_only_judged_by_limits() -> None:
    base, now = made_run(1, STEADY), made_run(2, STEADY)
    (part,), (other,) = base.parts, now.parts
    verify = replace(part, phase="verify", tokens_a_step=always(32.0))
    base = replace(base, parts=(part, verify))
    now = replace(now, parts=(other, replace(verify, tokens_a_step=always(39.0))))
    found = diff(base, now)
    said = "verify: another batch: 39.00 tokens a step, 32.00 before"
    assert said in found.notes
    for judged in (judge(parse("step<=1.05x"), found), default_gate(found)):
        unknown = [one for one in judged if one.outcome is Outcome.UNKNOWN]
        assert {one.about for one in unknown} == {"verify"}
        assert all(said in one.said for one in unknown)
    (limit,) = judge(parse("verify.step<=1s"), found)
    assert (limit.outcome, limit.about) == (Outcome.HOLDS, "verify: step")
