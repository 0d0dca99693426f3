"""Tests of LayerNorm: its result equals torch's, and has mean 0 and variance 1 for any row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cbtop.compute.kernels.base import floats
from cbtop.compute.kernels.layer_norm import LAYER_NORM

NO_BIAS = np.zeros(0, np.float32)


def normed(x: Any, weight: Any, bias: Any, epsilon: float = 1e-5) -> np.ndarray:
    out = np.zeros_like(x)
    LAYER_NORM.implementation(x, weight, bias, epsilon, out)
    return out


def rows_of(columns: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(columns)
    x = floats(rng, 3, columns)
    x[0] *= np.float32(1e-3)
    return x, floats(rng, columns), floats(rng, columns)


def test_a_layer_norm_without_a_bias_agrees_with_its_reference() -> None:
    x, weight, _ = rows_of(515)
    expected = np.zeros_like(x)
    LAYER_NORM.reference(x, weight, NO_BIAS, 1e-5, expected)
    np.testing.assert_allclose(normed(x, weight, NO_BIAS), expected, atol=1e-5)


@pytest.mark.slow  # torch takes two seconds to load
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("columns", [2, 64, 515])
def test_a_layer_norm_is_torchs(columns: int, has_bias: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    x, weight, bias = rows_of(columns)
    given = [torch.from_numpy(one).double() for one in (x, weight, bias)]
    of_torch = torch.nn.functional.layer_norm(given[0], (columns,), given[1], given[2] if has_bias else None, 1e-5)
    found, expected = normed(x, weight, bias if has_bias else NO_BIAS), of_torch.numpy()
    np.testing.assert_allclose(found, expected, atol=LAYER_NORM.contract.tolerance * np.abs(expected).max())


@pytest.mark.parametrize("shift", [-100, 100])
def test_what_is_added_to_a_whole_row_changes_nothing(shift: float) -> None:
    x, weight, bias = rows_of(515)
    x = np.round(x * 64) / np.float32(64)  # Round the numbers, so that adding `shift` causes no rounding error.
    np.testing.assert_allclose(normed(x + np.float32(shift), weight, bias), normed(x, weight, bias), atol=2e-5)


def test_a_row_of_one_value_is_the_bias() -> None:
    _, weight, bias = rows_of(64)
    np.testing.assert_array_equal(normed(np.full((2, 64), 3, np.float32), weight, bias), [bias, bias])
