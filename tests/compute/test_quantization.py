"""Tests of all block formats: each is read as gguf reads it, and survives a round trip."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import example, given
from hypothesis import strategies as st

from cbtop.commands.demo import DESCRIPTION
from cbtop.compute.jit.compile import half_to_float
from cbtop.compute.kernels.linear import linear
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat, QuantizedMatrix
from cbtop.compute.quantization.floats import BF16
from cbtop.compute.quantization.nf4 import NF4

ALL_FORMATS = pytest.mark.parametrize("block_format", FORMATS.values(), ids=lambda f: f.name)

OF_GGML = [one for one in FORMATS.values() if one is not NF4]  # tests/compute/test_nf4.py compares that one


def each_format_once_with(values: Collection[Any]) -> list[Any]:
    """Return test parameters: each format with each of `values`.

    By default, each format runs with only one of the values. Formats use the values in turn.
    """
    rows = list(product(FORMATS.values(), enumerate(values)))
    return [
        pytest.param(
            one,
            value,
            id=f"{one.name}-{value}",
            marks=() if number == [*FORMATS].index(one.code) % len(values) else pytest.mark.slow,
        )
        for one, (number, value) in rows
    ]


# Largest relative error if a weight is rounded once to this format.
ROUNDING = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8}


def random_weights(seed: int, rows: int = 3, columns: int = 768) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)


def any_bytes(seed: int, rows: int, row_bytes: int) -> np.ndarray:
    """Return random bytes as weights. The array is read-only, as in a file.

    Numba would compile kernels separately for writable arrays.
    """
    data = np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    data.flags.writeable = False
    return data


# The package gguf does not read Q1_0. The test below this one does.
@pytest.mark.parametrize("block_format", [one for one in OF_GGML if one.name != "Q1_0"], ids=lambda one: one.name)
def test_bytes_mean_what_gguf_says(block_format: BlockFormat) -> None:
    data = any_bytes(5, 7, block_format.row_bytes(1024))
    with np.errstate(all="ignore"):
        expected = dequantize(data, GGMLQuantizationType(block_format.code))
        actual = block_format.dequantize(data)
    np.testing.assert_array_equal(actual, expected.reshape(actual.shape))


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    """Return the library of ggml."""
    module = pytest.importorskip("xllamacpp", reason="ggml is in xllamacpp: pip install xllamacpp")
    return ctypes.CDLL(str(next(Path(module.__file__).parent.glob("*.so"))))


@pytest.mark.parametrize("block_format", [one for one in OF_GGML if one.block_elements > 1], ids=lambda one: one.name)
def test_bytes_mean_what_ggml_says(block_format: BlockFormat, ggml: ctypes.CDLL) -> None:
    dequantize_row = getattr(ggml, f"dequantize_row_{block_format.name.lower().replace('_k', '_K')}")
    dequantize_row.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    data = any_bytes(6, 300, block_format.row_bytes(256))
    with np.errstate(all="ignore"):
        actual = block_format.dequantize(data)
    expected = np.empty_like(actual)
    dequantize_row(data.ctypes.data, expected.ctypes.data, expected.size)
    np.testing.assert_array_equal(actual, expected)


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


@ALL_FORMATS
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0.1, 1e3), rows=st.integers(1, 4), blocks=st.integers(1, 5))
def test_quantised_weights_come_back_nearly(
    block_format: BlockFormat, seed: int, scale: float, rows: int, blocks: int
) -> None:
    weights = random_weights(seed, rows, blocks * block_format.block_elements) * np.float32(scale)
    weights = np.clip(weights, -block_format.largest, block_format.largest)
    data = block_format.quantize(weights)
    assert data.shape == (rows, blocks * block_format.block_bytes)
    found = block_format.dequantize(data)
    if block_format.name in ROUNDING:
        assert (np.abs(found - weights) <= ROUNDING[block_format.name] * np.abs(weights)).all()
    else:
        bits = 8 * block_format.block_bytes / block_format.block_elements
        assert rms(found - weights) <= 3 * 2**-bits * np.abs(weights).max()


@pytest.fixture(scope="module")
def ggml_quantize(ggml: ctypes.CDLL) -> Callable[[BlockFormat, np.ndarray], np.ndarray]:
    """Return a function that calls ggml's own quantiser."""
    chunk = ggml.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def quantized(block_format: BlockFormat, weights: np.ndarray) -> np.ndarray:
        rows, columns = weights.shape
        data = np.empty((rows, block_format.row_bytes(columns)), np.uint8)
        size = chunk(block_format.code, weights.ctypes.data, data.ctypes.data, 0, rows, columns, None)
        assert size == data.nbytes
        return data

    return quantized


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda rng: rng.normal(0, 0.03, (32, 1024)),
    "heavy tails": lambda rng: rng.standard_t(4, (32, 1024)),
    "even": lambda rng: rng.uniform(-1, 1, (32, 1024)),
    "above zero": lambda rng: rng.uniform(0.5, 1, (32, 1024)),
    "below zero": lambda rng: rng.uniform(-1, -0.5, (32, 1024)),
    "blocks of many sizes": lambda rng: rng.normal(0, np.exp(rng.normal(size=(32, 32, 1))), (32, 32, 32)),
}


@pytest.mark.parametrize(("block_format", "distribution"), each_format_once_with(DISTRIBUTIONS))
def test_the_error_is_at_most_two_percent_over_ggmls(
    block_format: BlockFormat,
    distribution: str,
    ggml_quantize: Callable[[BlockFormat, np.ndarray], np.ndarray],
) -> None:
    weights = DISTRIBUTIONS[distribution](np.random.default_rng(11)).astype(np.float32).reshape(32, 1024)
    if block_format not in OF_GGML:
        pytest.skip("ggml has no such format")
    theirs = rms(block_format.dequantize(ggml_quantize(block_format, weights)) - weights)
    ours = rms(block_format.dequantize(block_format.quantize(weights)) - weights)
    assert ours <= 1.02 * theirs


@ALL_FORMATS
def test_zeros_stay_zeros(block_format: BlockFormat) -> None:
    data = block_format.quantize(np.zeros((2, 256), np.float32))
    assert not block_format.dequantize(data).any()


@ALL_FORMATS
def test_rows_that_are_no_whole_blocks_are_refused(block_format: BlockFormat) -> None:
    columns, row_bytes = block_format.block_elements, block_format.block_bytes
    if row_bytes > 1:
        with pytest.raises(ValueError, match=rf"{block_format.name}: bytes are uint8 \(3, {row_bytes + 1}\)"):
            block_format.dequantize(np.zeros((3, row_bytes + 1), np.uint8))
    if columns > 1:
        with pytest.raises(ValueError, match=rf"weights are float32 .*\(rows, a multiple of {columns}\) is wanted"):
            block_format.quantize(np.zeros((3, columns + 1), np.float32))
    with pytest.raises(ValueError, match=rf"rows of {row_bytes} bytes for {2 * columns} columns"):
        QuantizedMatrix(block_format, np.zeros((3, row_bytes), np.uint8), 2 * columns)
    with pytest.raises(ValueError, match="bytes are int8"):
        block_format.dequantize(np.zeros((3, row_bytes), np.int8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights are float64"):
        block_format.quantize(np.zeros((3, columns)))  # type: ignore[arg-type]


@ALL_FORMATS
def test_matrices_whose_rows_do_not_lie_one_after_the_other_are_refused(block_format: BlockFormat) -> None:
    weights = random_weights(1, 3, 512)
    data = block_format.quantize(weights)
    for order in (np.asfortranarray, lambda matrix: np.concatenate([matrix, matrix])[::2]):
        with pytest.raises(ValueError, match=r"do not lie one after the other; give np\.ascontiguousarray"):
            block_format.dequantize(order(data))
        with pytest.raises(ValueError, match="do not lie one after the other"):
            block_format.quantize(order(weights))
        with pytest.raises(ValueError, match="do not lie one after the other"):
            QuantizedMatrix(block_format, order(data), 512)


@pytest.mark.parametrize(("block_format", "value"), each_format_once_with([np.nan, np.inf, -np.inf, 1e30]))
def test_a_weight_that_a_format_cannot_hold_is_refused_or_kept(block_format: BlockFormat, value: float) -> None:
    weights = random_weights(2, 3, 256)
    weights[1, 5] = value
    if block_format.largest < np.inf:
        with pytest.raises(ValueError, match=rf"{block_format.name}: the weight of row 1 and column 5 is .*finite"):
            block_format.quantize(weights)
    else:
        np.testing.assert_allclose(block_format.dequantize(block_format.quantize(weights))[1, 5], value, rtol=2**-8)


@ALL_FORMATS
@given(exponent=st.integers(-149, 15), seed=st.integers(0, 2**32 - 1))
# With this seed, the largest weight is a little more than half of the smallest number in binary16.
@example(exponent=-24, seed=345977955)
# With this seed, one of the scales is a little more than half of the smallest number in binary16.
@example(exponent=-17, seed=1022)
def test_weights_of_any_size_come_back_finite_and_no_larger(
    block_format: BlockFormat, exponent: int, seed: int
) -> None:
    weights = np.ldexp(random_weights(seed, 2, 256) / 8, exponent).astype(np.float32)
    weights = np.clip(weights, -block_format.largest, block_format.largest)
    found = block_format.dequantize(block_format.quantize(weights))
    assert np.isfinite(found).all()
    # Half of the smallest number of a format is rounded up to the smallest number, so its value doubles.
    most = 1.5 if exponent > (-4 if block_format.name == "NVFP4" else -14) else 2.001
    assert np.abs(found).max() <= most * np.abs(weights).max()


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF80FFFF])
def test_a_nan_stays_one_in_bf16(bits: int) -> None:
    weights = np.array([[bits]], np.uint32).view(np.float32)
    assert np.isnan(BF16.dequantize(BF16.quantize(weights))).all()


@ALL_FORMATS
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 3), blocks=st.integers(1, 4))
def test_compiled_code_reads_any_bytes_as_the_reference_does(
    block_format: BlockFormat, seed: int, rows: int, blocks: int
) -> None:
    data = any_bytes(seed, rows, blocks * block_format.block_bytes)
    with np.errstate(all="ignore"):
        expected = block_format.dequantize(data)
    found = np.zeros_like(expected)
    for row in range(rows):
        block_format.dequantize_row(data, np.uint64(row), found, np.uint64(row))
    # The quantiser of ggml may write infinity as NaN, and subnormal numbers as zero.
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found), finite)
    np.testing.assert_allclose(found[finite], expected[finite], rtol=1e-6, atol=2.0**-126)


@ALL_FORMATS
@pytest.mark.parametrize("tokens", [1, 6])
def test_no_finite_product_is_made_of_weights_that_are_no_numbers(block_format: BlockFormat, tokens: int) -> None:
    rows, columns = 2000, block_format.block_elements
    data = any_bytes(9, rows, block_format.block_bytes)
    with np.errstate(all="ignore"):
        broken = ~np.isfinite(block_format.dequantize(data)).all(axis=1)
    assert broken.any() == (block_format.name != "NVFP4")  # in which every byte is a finite number
    out, scratch = np.zeros((tokens, rows), np.float32), np.zeros((1, max(columns, 16)), np.float32)
    linear(block_format.code, data, np.zeros(0, np.float32), np.ones((tokens, columns), np.float32), out, scratch)
    assert not np.isfinite(out[:, broken]).any()


def test_the_help_names_every_format_in_order() -> None:
    assert f"{', '.join(block_format.name for block_format in FORMATS.values())})" in DESCRIPTION


def test_every_half_is_converted_exactly() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    found = np.array([half_to_float(value) for value in bits], np.float32)
    np.testing.assert_array_equal(found, bits.view(np.float16).astype(np.float32))
