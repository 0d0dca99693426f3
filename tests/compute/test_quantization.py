"""Every block format against gguf's own reading of it, and there and back again."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

from cbtop.compute.jit.compile import half_to_float
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat

ALL_FORMATS = pytest.mark.parametrize("block_format", FORMATS.values(), ids=lambda f: f.name)

# The largest rounding error of each, relative to the largest weight of its block.
STEPS = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 1 / 127, "Q4_K": 1 / 12, "Q6_K": 1 / 28}


def random_weights(seed: int, rows: int = 3, columns: int = 768) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)


@ALL_FORMATS
def test_bytes_mean_what_gguf_says(block_format: BlockFormat) -> None:
    rng = np.random.default_rng(5)
    data = rng.integers(0, 256, (7, block_format.row_bytes(1024)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(data, GGMLQuantizationType(block_format.code))
        actual = block_format.dequantize(data)
    np.testing.assert_array_equal(actual, expected.reshape(actual.shape))


@ALL_FORMATS
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0.1, 1e3))
def test_quantised_weights_come_back_within_a_step(block_format: BlockFormat, seed: int, scale: float) -> None:
    weights = random_weights(seed) * np.float32(scale)
    data = block_format.quantize(weights)
    assert data.shape == (3, block_format.row_bytes(768))
    error = np.abs(block_format.dequantize(data) - weights).reshape(-1, 256).max(axis=1)
    largest = np.abs(weights).reshape(-1, 256).max(axis=1)
    assert (error <= STEPS[block_format.name] * largest).all()


@ALL_FORMATS
def test_zeros_stay_zeros(block_format: BlockFormat) -> None:
    data = block_format.quantize(np.zeros((2, 256), np.float32))
    assert not block_format.dequantize(data).any()


def test_every_finite_half_is_converted_exactly() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = bits.view(np.float16)
    for value, half in zip(bits[np.isfinite(halves)], halves[np.isfinite(halves)], strict=True):
        assert half_to_float(value) == np.float32(half)
