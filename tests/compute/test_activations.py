"""The public activation functions are those of torch, and the conversions of float16 those of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cbtop.compute import activations
from cbtop.compute.kernels.activation import GEGLU, SWIGLU

NAMES = ("silu", "gelu", "sigmoid", "relu", "tanh")
VALUES = np.concatenate([np.linspace(-30, 30, 6_001), np.logspace(-30, 4, 500), -np.logspace(-30, 1.9, 500), [0.0]])


def of_torch(name: str, values: Any) -> Any:
    """Return torch's function of `values`, arrays of NumPy."""
    torch = pytest.importorskip("torch", reason="torch is not installed: make torch")
    options = {"approximate": "tanh"} if name == "gelu" else {}
    return getattr(torch.nn.functional, name)(torch.from_numpy(values), **options).numpy()


@pytest.mark.parametrize("name", NAMES)
def test_an_activation_is_that_of_torch(name: str) -> None:
    values = VALUES.astype(np.float32)
    expected = of_torch(name, values.astype(np.float64))
    found = getattr(activations, name)(values)
    assert found.dtype == np.float32
    # Near -9, the 1 + tanh of torch has no digits left of gelu, which is less than 1e-11 there.
    np.testing.assert_allclose(found, expected, rtol=2e-6 if name == "gelu" else 5e-7, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinities_give_what_torch_gives(name: str) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    found = getattr(activations, name)(values)
    np.testing.assert_allclose(found, of_torch(name, values), rtol=1e-6)


def test_any_shape_and_a_number_are_taken() -> None:
    x = np.arange(-6, 6, dtype=np.float64).reshape(3, 4)
    np.testing.assert_array_equal(activations.relu(x[:, ::2]), np.maximum(x[:, ::2], 0))
    assert activations.sigmoid(0).shape == ()
    assert float(activations.sigmoid(0)) == 0.5
    assert activations.tanh([]).shape == (0,)


@pytest.mark.parametrize(("kernel", "name"), [(SWIGLU, "silu"), (GEGLU, "gelu")])
def test_kernels_compute_the_same_bits(kernel: Any, name: str) -> None:
    gate = VALUES.astype(np.float32).reshape(1, -1)
    out = np.empty_like(gate)
    kernel.implementation(gate, np.ones_like(gate), out)
    np.testing.assert_array_equal(out, getattr(activations, name)(gate))


def test_all_float16_values_are_converted_exactly_and_back() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = bits.view(np.float16)
    wide = activations.f16_to_f32(bits)
    np.testing.assert_array_equal(wide, halves.astype(np.float32))
    np.testing.assert_array_equal(activations.f16_to_f32(halves), wide)
    back = activations.f32_to_f16(wide)
    finite = np.isfinite(halves)
    np.testing.assert_array_equal(back.view(np.uint16)[finite], bits[finite])
    assert np.isnan(back[~finite]).all()


def test_float32_is_rounded_to_the_nearest_float16() -> None:
    values = np.random.default_rng(1).uniform(-65_500, 65_500, 10_000).astype(np.float32)
    values = np.concatenate([values, values / 1e9, np.float32([65_519, 65_520, 2.0**-25, 3 * 2.0**-25])])
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    expected[np.isinf(expected)] = np.nan
    np.testing.assert_array_equal(activations.f32_to_f16(values), expected)


def test_other_types_are_no_float16() -> None:
    with pytest.raises(TypeError, match="an array of float64; float16, or its bits in uint16, is expected"):
        activations.f16_to_f32([1.0])
