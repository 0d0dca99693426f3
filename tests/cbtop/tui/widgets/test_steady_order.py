"""Tests of the order of rows: the order stays the same if the numbers of rows change a little.

A row moves only below rows with clearly larger numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.client import DEFAULT_WINDOW_S
from cbtop.client.store import Store
from cbtop.tui.views.brick_columns import brick_columns
from cbtop.tui.widgets import steady_order as module
from cbtop.tui.widgets.steady_order import (
    STEADY_MARGIN,
    STEADY_REDRAWS,
    SteadyOrder,
    redraws_apart,
    steady_order,
)
from cbtop.viewmodels.bricks import BrickRow
from cbtop.viewmodels.source import source_view
from tests.cbtop.recorded import Clock, apply, profiler_in, said_at, source_of

# Mean µs per call, as in a decoder: three bricks within 5 % of each other, then two pairs of similar bricks, then
# small bricks.
COSTS_US = {
    "GateProjection": 200, "UpProjection": 200, "DownProjection": 210, "QkvProjection": 150, "AttentionScore": 145,
    "OutputProjection": 100, "LmHead": 95, "Activation": 33, "RmsNorm": 30, "Residual": 30, "RotaryEmbedding": 20,
}  # fmt: skip
WATCHED_S, REDRAW_S, STEPS_A_SECOND = 60, 0.5, 10


def noisy_minute(directory: Path, seed: int) -> list[tuple[BrickRow, ...]]:
    """Return the rows of each redraw in one minute.

    The minute begins when the window of the last seconds is full. The noise of the times is the same all the time,
    and a few calls are long.
    """
    chance, clock = random.Random(seed), Clock()
    profiler = profiler_in(directory, clock, 1 << 22)

    def step() -> None:
        begin_ns = clock.now_ns
        with profiler.step("decode", 1):
            for name, us in COSTS_US.items():
                with profiler.brick(name, 1):
                    long = chance.uniform(3, 20) if chance.random() < 0.01 else 1
                    clock.sleep_us(us * chance.lognormvariate(0, 0.3) * long)
        clock.now_ns = max(clock.now_ns, begin_ns + 10**9 // STEPS_A_SECOND)

    step()
    source, store = source_of(directory), Store()
    source.poll()
    apply(store, said_at(source.snapshot(), clock.now_ns))
    redraws = []
    for _ in range(round((DEFAULT_WINDOW_S + WATCHED_S) / REDRAW_S)):
        for _ in range(round(STEPS_A_SECOND * REDRAW_S)):
            step()
        source.poll()
        apply(store, said_at(source.delta(), clock.now_ns))
        redraws.append(source_view(store.sources[source.key], window=True).bricks)
    return redraws[-round(WATCHED_S / REDRAW_S) :]


def swaps(before: Sequence[object], after: Sequence[object]) -> int:
    """Return how much the order of the first eight rows has changed.

    This is the number of pairs whose order has changed, plus the number of rows that have left the first eight.
    """
    stayed = [key for key in before[:8] if key in after[:8]]
    at = {key: place for place, key in enumerate(after)}
    turned = sum(at[one] > at[other] for index, one in enumerate(stayed) for other in stayed[index + 1 :])
    return turned + len(set(before[:8]) - set(after[:8]))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_at_most_one_of_the_top_eight_swaps_in_a_noisy_stationary_minute(tmp_path: Path, seed: int) -> None:
    columns = {column.title: column for column in brick_columns(100.0, budgets=False, checks=False)}
    redraws = noisy_minute(tmp_path, seed)
    for title in ("wall %", "µs/tok", "incl p50", "incl p95", "incl p99", "incl max"):
        sort_key = columns[title].sort_key
        assert sort_key is not None
        values: list[dict[object, float | str]] = [{row.key: sort_key(row) for row in rows} for rows in redraws]
        order, orders = SteadyOrder(), []
        for each in values:
            order.take(each, descending=True, apart=redraws_apart(columns[title]))
            orders.append(order.keys)
        exact = [sorted(each, key=each.__getitem__, reverse=True) for each in values]
        assert sum(swaps(*pair) for pair in pairwise(orders)) <= 1, title
        assert sum(swaps(*pair) for pair in pairwise(exact)) > 2, f"{title}: there was nothing to keep still"


def test_a_row_must_be_ahead_for_a_while_and_longer_by_figures_of_few_calls() -> None:
    columns = {column.title: column for column in brick_columns(100.0, budgets=False, checks=False)}
    took = {}
    for title in ("wall %", "incl p50", "incl p99", "incl max", "incl min"):
        order, apart = SteadyOrder(), redraws_apart(columns[title])
        order.take({"a": 100, "b": 90}, descending=True, apart=apart)
        redraws = 0
        while order.keys == ["a", "b"]:
            order.take({"a": 100, "b": 140}, descending=True, apart=apart)
            redraws += 1
        took[title] = redraws
    assert took["wall %"] == took["incl p50"] == STEADY_REDRAWS
    assert took["incl p99"] == took["incl max"] == took["incl min"] > 5 * STEADY_REDRAWS


def test_of_very_many_rows_little_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_VALUES", 100)
    order = SteadyOrder()
    for _ in range(STEADY_REDRAWS):
        order.take(dict.fromkeys(range(30), 1.0), descending=True)
    assert sum(map(len, order._redraws)) <= 100
    assert order.keys == list(range(30))


def test_rows_close_together_do_not_change_places() -> None:
    assert steady_order(["a", "b", "c"], [{"a": 100, "b": 105, "c": 90}], descending=True) == ["a", "b", "c"]


def test_a_row_moves_up_if_clearly_ahead_in_each_redraw_and_not_on_a_flicker() -> None:
    before, now = {"a": 100, "b": 101, "c": 90}, {"a": 100, "b": 101, "c": 140}
    assert steady_order(["a", "b", "c"], [before, now], descending=True) == ["a", "b", "c"]
    assert steady_order(["a", "b", "c"], [now, now], descending=True) == ["c", "a", "b"]
    assert steady_order(["a", "b"], [{"a": 100, "b": 50}], descending=False) == ["b", "a"]


def test_new_rows_find_their_place_and_old_ones_go() -> None:
    assert steady_order(["a", "gone"], [{"a": 10, "new": 20}], descending=True) == ["new", "a"]


def test_a_row_measured_at_last_does_not_wait_behind_the_unmeasured_ones() -> None:
    assert steady_order(["a", "b"], [{"a": -1, "b": -1}, {"a": 1, "b": 9}], descending=True) == ["b", "a"]
    assert steady_order(["a", "b"], [{"a": -1, "b": -1}, {"a": -1, "b": 9}], descending=True) == ["b", "a"]


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), max_size=12), st.booleans())
def test_no_row_stands_behind_one_it_is_clearly_ahead_of(values: dict[object, float | str], descending: bool) -> None:
    order = steady_order(list(values), [values], descending=descending)
    assert sorted(map(str, order)) == sorted(map(str, values))
    for index, key in enumerate(order):
        for later in order[index + 1 :]:
            ahead, behind = (values[key], values[later]) if descending else (values[later], values[key])
            assert isinstance(ahead, float)
            assert isinstance(behind, float)
            assert ahead >= behind * (1 - STEADY_MARGIN) - 1e-9
