"""F32, F16 and BF16: weights that are plain floats in the file.

One element a block. BF16 is the upper half of a float32, F16 is IEEE binary16. (ggml_bf16_t, ggml_fp16_t)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cbtop.compute.jit.compile import half_to_float, jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import LANES, add, load_floats, load_halves, multiply_add, splat, total_of
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, halves_of, of_halves


def _unpack_f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _pack_f32(blocks: Floats) -> Bytes:
    return blocks.astype("<f4").view(np.uint8)


def _unpack_bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _pack_bf16(blocks: Floats) -> Bytes:
    # To nearest, ties to even; a NaN stays one, quiet: rounding could carry it into infinity or zero.
    bits = blocks.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    kept = np.where(np.isnan(blocks), bits | np.uint32(0x400000), rounded)
    return (kept >> np.uint32(16)).astype("<u2").view(np.uint8)


@jit_inlined
def dot_row_f32(weights: Any, row: Any, x: Any, sums: Any) -> Any:
    """Row `row` of uint8 (rows, row_bytes) times x[0]; `sums` are not needed."""
    values = weights[row].view(np.float32)
    total = np.float32(0)
    for i in range(np.uint64(values.shape[0])):
        total += values[i] * x[0, i]
    return total


@jit
def dequantize_row_f32(weights: Any, row: Any, out: Any, out_row: Any) -> None:
    """Row `row` as float32 into out[out_row]."""
    values = weights[row].view(np.float32)
    for i in range(np.uint64(values.shape[0])):
        out[out_row, i] = values[i]


@jit_inlined
def dot_row_f16(weights: Any, row: Any, x: Any, sums: Any) -> Any:
    """Row `row` of uint8 (rows, row_bytes) times x[0]; `sums` are not needed."""
    columns = np.uint64(x.shape[1])
    even, odd = splat(np.float32(0)), splat(np.float32(0))
    token, step, i = np.uint64(0), np.uint64(LANES), np.uint64(0)
    while i + step + step <= columns:
        even = multiply_add(load_halves(weights, row, i + i), load_floats(x, token, i), even)
        i += step
        odd = multiply_add(load_halves(weights, row, i + i), load_floats(x, token, i), odd)
        i += step
    total = total_of(add(even, odd))
    while i < columns:
        total += load_half(weights, row, i + i) * x[token, i]
        i += np.uint64(1)
    return total


@jit
def dequantize_row_f16(weights: Any, row: Any, out: Any, out_row: Any) -> None:
    """Row `row` as float32 into out[out_row]."""
    values = weights[row].view(np.uint16)
    for i in range(np.uint64(values.shape[0])):
        out[out_row, i] = half_to_float(values[i])


@jit
def _bfloat_to_float(bits: Any) -> Any:
    return np.int32(np.int32(bits) << np.int32(16)).view(np.float32)


@jit_inlined
def dot_row_bf16(weights: Any, row: Any, x: Any, sums: Any) -> Any:
    """Row `row` of uint8 (rows, row_bytes) times x[0]; `sums` are not needed."""
    values = weights[row].view(np.uint16)
    total = np.float32(0)
    for i in range(np.uint64(values.shape[0])):
        total += _bfloat_to_float(values[i]) * x[0, i]
    return total


@jit
def dequantize_row_bf16(weights: Any, row: Any, out: Any, out_row: Any) -> None:
    """Row `row` as float32 into out[out_row]."""
    values = weights[row].view(np.uint16)
    for i in range(np.uint64(values.shape[0])):
        out[out_row, i] = _bfloat_to_float(values[i])


F32 = BlockFormat("F32", 0, 1, 4, _unpack_f32, _pack_f32, dequantize_row_f32, dot_row_f32, largest=math.inf)
F16 = BlockFormat("F16", 1, 1, 2, of_halves, halves_of, dequantize_row_f16, dot_row_f16)
BF16 = BlockFormat("BF16", 30, 1, 2, _unpack_bf16, _pack_bf16, dequantize_row_bf16, dot_row_bf16, largest=math.inf)
