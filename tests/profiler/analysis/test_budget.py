"""Tests of budgets: a budget stores one number and derives all other numbers.

Budgets of bricks in sequence add up.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis.budget import ByteBudget, TokenBudget, ceiling

amounts = st.floats(1e-3, 1e6)


@given(amounts)
def test_latency_and_throughput_are_inverse(us_per_token: float) -> None:
    budget = TokenBudget(us_per_token)
    assert TokenBudget.from_throughput(budget.tokens_per_sec).us_per_token == pytest.approx(us_per_token)
    assert ByteBudget.from_latency(ByteBudget(us_per_token).us_per_page()).gb_per_sec == pytest.approx(us_per_token)


def test_fifty_microseconds_are_twenty_thousand_tokens_a_second() -> None:
    assert TokenBudget(50).tokens_per_sec == 20_000
    assert ByteBudget(25).us_per_page() == pytest.approx(0.16384)


@given(amounts, amounts)
def test_a_budget_is_met_exactly_when_no_more_than_all_of_it_is_used(wanted: float, measured: float) -> None:
    assert TokenBudget(wanted).is_met(measured) == (TokenBudget(wanted).utilization(measured) <= 1)
    assert ByteBudget(wanted).is_met(measured) == (ByteBudget(wanted).utilization(measured) <= 1)


def test_a_byte_budget_becomes_a_token_budget() -> None:
    # Reading 82 MB of weights per token at 20 GB/s takes 4,100 µs.
    assert ByteBudget(20).to_token_budget(82e6).us_per_token == pytest.approx(4100)


def test_the_ceiling_of_sequential_bricks_is_the_inverse_of_the_sum() -> None:
    together = ceiling([TokenBudget(1.5), TokenBudget(6), TokenBudget(2.5)])
    assert together.us_per_token == 10
    assert together.tokens_per_sec == 100_000


@pytest.mark.parametrize("make", [TokenBudget, ByteBudget, TokenBudget.from_throughput, ByteBudget.from_latency])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_nothing_and_less_is_no_budget(make: type[TokenBudget], value: float) -> None:
    with pytest.raises(ValueError, match="above zero"):
        make(value)


def test_no_bricks_have_no_ceiling() -> None:
    with pytest.raises(ValueError, match="above zero"):
        ceiling([])
