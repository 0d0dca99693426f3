"""Tests of statistics from one pass over a tensor.

They equal NumPy's statistics of the whole tensor in float64 or wider.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from cbtop.profiler.traces.moments import CHUNK_ELEMENTS, TensorStats, tensor_stats

ANY_FLOAT = {
    np.float16: st.floats(width=16),
    np.float32: st.floats(width=32),
    # For larger numbers, the norm would exceed the range of float64.
    np.float64: st.floats(-1e306, 1e306) | st.sampled_from([np.nan, np.inf, -np.inf]),
}


@pytest.mark.parametrize("kind", ANY_FLOAT)
def test_any_tensor_has_the_moments_that_wider_arithmetic_gives_it(kind: type[np.floating]) -> None:
    @given(npst.arrays(kind, st.integers(0, 40), elements=ANY_FLOAT[kind]))
    def agree(tensor: np.ndarray) -> None:
        stats = tensor_stats(tensor)
        finite = tensor[np.isfinite(tensor)].astype(np.longdouble)
        assert (stats.count, stats.nan_count, stats.inf_count) == (
            tensor.size,
            np.isnan(tensor).sum(),
            np.isinf(tensor).sum(),
        )
        if not finite.size:
            assert stats == TensorStats(tensor.size, stats.nan_count, stats.inf_count)
            return
        assert (stats.min, stats.max) == (finite.min(), finite.max())
        rounding = 1e-14 * stats.largest + 1e-300
        assert stats.mean == pytest.approx(float(finite.mean()), rel=1e-12, abs=rounding)
        assert stats.std == pytest.approx(float(finite.std()), rel=1e-7, abs=rounding)
        assert stats.l2_norm == pytest.approx(float(np.sqrt((finite * finite).sum())), rel=1e-12)

    agree()


def test_a_small_spread_around_a_large_mean_survives() -> None:
    """A running sum of squares would lose the spread, because 1e8² + 1 equals 1e16."""
    values = 1e8 + np.random.default_rng(1).standard_normal(5 * CHUNK_ELEMENTS + 3)
    stats = tensor_stats(values)
    assert stats.std == pytest.approx(values.std(), rel=1e-9)
    assert stats.mean == pytest.approx(values.mean(), rel=1e-15)


def test_chunks_of_very_different_size_are_joined() -> None:
    values = np.concatenate(
        [np.full(CHUNK_ELEMENTS, 1e-200), np.full(CHUNK_ELEMENTS, -1e200), np.zeros(CHUNK_ELEMENTS)]
    )
    stats = tensor_stats(values)
    assert stats.mean == pytest.approx(-1e200 / 3)
    assert stats.std == pytest.approx(1e200 * np.sqrt(2) / 3)
    assert stats.l2_norm == pytest.approx(1e200 * np.sqrt(CHUNK_ELEMENTS))


def test_what_is_not_finite_is_counted_and_left_out_of_the_moments() -> None:
    stats = tensor_stats(np.array([[np.nan, 1.0, np.inf], [3.0, -np.inf, np.nan]], np.float32))
    assert stats == TensorStats(6, 2, 2, min=1.0, max=3.0, mean=2.0, std=1.0, l2_norm=pytest.approx(10**0.5))


def test_a_view_that_is_not_contiguous_is_read_as_it_looks() -> None:
    tensor = np.arange(12.0).reshape(3, 4)[:, ::2]
    assert tensor_stats(tensor).mean == tensor.mean()
