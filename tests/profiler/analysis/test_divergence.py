"""Tests of fingerprints of a run.

They distinguish a wrong value from rounding, and name the first position that differs.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.analysis import divergence
from cbtop.profiler.analysis.divergence import DivergenceInfo, Fingerprints

RNG = np.random.default_rng(5)
TENSOR = RNG.standard_normal(3000).astype(np.float32)


def run_of(*tensors: np.ndarray) -> Fingerprints:
    """Return the fingerprints of a run with one brick. `tensors` has the output of the brick in each layer."""
    run = Fingerprints()
    for layer, tensor in enumerate(tensors):
        run.record("DownProjection", layer, 7, tensor)
    return run


def changed(place: int, value: float) -> np.ndarray:
    copy = TENSOR.copy()
    copy[place] = value
    return copy


def test_equal_runs_do_not_diverge() -> None:
    assert run_of(TENSOR, TENSOR).find_divergence(run_of(TENSOR, TENSOR)) is None


@given(st.integers(0, 2999), st.sampled_from([0.5, -0.5, 5.0]))
def test_one_wrong_value_anywhere_in_a_tensor_is_found(place: int, off: float) -> None:
    wrong = changed(place, TENSOR[place] + off)
    found = run_of(TENSOR, wrong, TENSOR).find_divergence(run_of(TENSOR, TENSOR, TENSOR))
    assert found is not None
    assert (found.brick, found.layer, found.position) == ("DownProjection", 1, 7)


@given(st.integers(0, 1 << 30))
def test_adding_in_another_order_is_no_divergence(seed: int) -> None:
    """A float32 product that adds its terms in another order differs only by rounding."""
    weights = np.random.default_rng(seed).standard_normal((300, 256)).astype(np.float32)
    order = np.random.default_rng(seed + 1).permutation(256)
    one = weights @ TENSOR[:256]
    other = np.cumsum(weights[:, order] * TENSOR[:256][order], axis=1, dtype=np.float32)[:, -1]
    assert not np.array_equal(one, other)
    assert run_of(other).find_divergence(run_of(one)) is None


def test_what_differs_is_given_with_both_values() -> None:
    found = run_of(changed(0, 99.0)).find_divergence(run_of(changed(0, 1.0)))
    assert found == DivergenceInfo("DownProjection", 0, 7, "value[0]", 1.0, 99.0)
    # This element is not sampled, so only the mean differs.
    found = run_of(changed(1, 99.0)).find_divergence(run_of(changed(1, 1.0)))
    assert found is not None
    assert found.quantity == "mean"


@pytest.mark.parametrize(("value", "quantity"), [(math.nan, "nan_count"), (-math.inf, "inf_count")])
def test_a_value_that_is_no_number_is_a_divergence(value: float, quantity: str) -> None:
    found = run_of(changed(1, value)).find_divergence(run_of(TENSOR))
    assert found is not None
    assert (found.quantity, found.expected, found.actual) == (quantity, 0, 1)
    assert run_of(changed(1, value)).find_divergence(run_of(changed(1, value))) is None


def test_a_brick_that_never_ran_is_a_divergence() -> None:
    found = run_of(TENSOR).find_divergence(run_of(TENSOR, TENSOR))
    assert found == DivergenceInfo("DownProjection", 1, 7, "recorded", 1.0, None)


def test_two_bricks_of_one_name_in_a_layer_are_told_apart() -> None:
    runs = Fingerprints(), Fingerprints()
    for run, second in zip(runs, (TENSOR, TENSOR + 1), strict=True):
        run.record("RmsNorm", 0, 0, TENSOR)
        run.record("RmsNorm", 0, 0, second)
    assert runs[0].find_divergence(runs[1]) is not None
    assert len(runs[0]) == 2


def test_a_long_run_is_bounded_and_says_what_it_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "MAX_FINGERPRINTS", 2)
    run = run_of(TENSOR, TENSOR, TENSOR)
    assert (len(run), run.dropped) == (2, 1)
    run.clear()
    assert (len(run), run.dropped) == (0, 0)
