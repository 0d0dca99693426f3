"""F32, F16 and BF16: weights that are plain floats in the file.

A block has one element. BF16 is the upper half of a float32, F16 is IEEE binary16. (ggml_bf16_t, ggml_fp16_t)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cbtop.compute.jit.compile import copy_of, half_to_float, jit, jit_inlined, load_half
from cbtop.compute.jit.cpu import ASKS_TWICE, L1_AHEAD, L2_AHEAD, LOOKS_AHEAD
from cbtop.compute.jit.vectors import (
    LANES,
    add,
    load_bfloats,
    load_floats,
    load_halves,
    multiply_add,
    prefetch,
    prefetch_to_l2,
    splat,
    total_of,
)
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, halves_of, of_halves
from cbtop.compute.quantization.planes import PlaneLayout

# How far ahead to prefetch, in bytes, for floats of 2 and of 4 bytes. Measured shares of the read bandwidth:
#     Zen 2 (EPYC), F16 and BF16    0.63 with 4 KiB, 0.95 with 1 KiB, 0.97 to 1.02 with 768 bytes
#     Zen 2 (EPYC), F32             0.76 with 1 KiB, 0.93 with 256 bytes
#     Zen 4                         0.39 with 4 KiB, 0.9 to 1.0 if only the loaded bytes are prefetched, in order
# On a Zen 4, the code does not prefetch, because the processor does.
AHEAD, F32_AHEAD = (np.uint64(0 if LOOKS_AHEAD else L1_AHEAD if ASKS_TWICE else near) for near in (768, 256))


def _unpack_f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _pack_f32(blocks: Floats) -> Bytes:
    return blocks.astype("<f4").view(np.uint8)


def _unpack_bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _pack_bf16(blocks: Floats) -> Bytes:
    # Round to nearest, ties to even. NaN becomes a quiet NaN, because rounding its bits could give infinity or zero.
    bits = blocks.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    kept = np.where(np.isnan(blocks), bits | np.uint32(0x400000), rounded)
    return (kept >> np.uint32(16)).astype("<u2").view(np.uint8)


@jit
def _load_float(weights: Any, row: Any, at: Any) -> Any:
    return weights[row, at : at + np.uint64(4)].view(np.float32)[0]


@jit
def _bfloat_to_float(bits: Any) -> Any:
    return np.int32(np.int32(bits) << np.int32(16)).view(np.float32)


@jit
def _load_bfloat(weights: Any, row: Any, at: Any) -> Any:
    return _bfloat_to_float(weights[row, at : at + np.uint64(2)].view(np.uint16)[0])


# Each format has a copy of the code below. In the copy, the format's own functions and size replace the following
# ones.
_load_16, _load_one, _size_bytes = load_halves, load_half, np.uint64(2)


def _dot_row(weights: Any, row: Any, x: Any, sums: Any) -> Any:
    """Return the product of row `row` of uint8 (rows, row_bytes) and x[0].

    Four sums of sixteen lanes are used, so that additions need not wait for each other. On processors that prefetch
    too little, the loop also prefetches the next rows. Otherwise memory is read at 0.55 to 0.75 of its bandwidth.
    """
    columns, token, i = np.uint64(x.shape[1]), np.uint64(0), np.uint64(0)
    a, b, c, d = splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0))
    p, q, r = np.uint64(LANES), np.uint64(2 * LANES), np.uint64(3 * LANES)
    while i + np.uint64(4 * LANES) <= columns:
        for line in range(_size_bytes):  # 64 floats take as many lines of 64 bytes as one float has bytes
            at = i * _size_bytes + np.uint64(64) * np.uint64(line)
            prefetch(weights, row, at + AHEAD)
            if ASKS_TWICE:
                prefetch_to_l2(weights, row, at + np.uint64(L2_AHEAD))
        a = multiply_add(_load_16(weights, row, i * _size_bytes), load_floats(x, token, i), a)
        b = multiply_add(_load_16(weights, row, (i + p) * _size_bytes), load_floats(x, token, i + p), b)
        c = multiply_add(_load_16(weights, row, (i + q) * _size_bytes), load_floats(x, token, i + q), c)
        d = multiply_add(_load_16(weights, row, (i + r) * _size_bytes), load_floats(x, token, i + r), d)
        i += np.uint64(4 * LANES)
    total = total_of(add(add(a, b), add(c, d)))
    while i < columns:
        total += _load_one(weights, row, i * _size_bytes) * x[token, i]
        i += np.uint64(1)
    return total


def _dot_row_of(name: str, load_16: Any, load_one: Any, size_bytes: int, ahead: np.uint64 = AHEAD) -> Any:
    own = {"_load_16": load_16, "_load_one": load_one, "_size_bytes": np.uint64(size_bytes), "AHEAD": ahead}
    return jit_inlined(copy_of(_dot_row, f"dot_row_{name}", **own))


dot_row_f32 = _dot_row_of("f32", load_floats, _load_float, 4, F32_AHEAD)
dot_row_f16 = _dot_row_of("f16", load_halves, load_half, 2)
dot_row_bf16 = _dot_row_of("bf16", load_bfloats, _load_bfloat, 2)


@jit
def dequantize_row_f32(weights: Any, row: Any, out: Any, out_row: Any) -> None:
    """Write row `row` as float32 into out[out_row]."""
    values = weights[row].view(np.float32)
    for i in range(np.uint64(values.shape[0])):
        out[out_row, i] = values[i]


@jit
def dequantize_row_f16(weights: Any, row: Any, out: Any, out_row: Any) -> None:
    """Write row `row` as float32 into out[out_row]."""
    values = weights[row].view(np.uint16)
    for i in range(np.uint64(values.shape[0])):
        out[out_row, i] = half_to_float(values[i])


@jit
def dequantize_row_bf16(weights: Any, row: Any, out: Any, out_row: Any) -> None:
    """Write row `row` as float32 into out[out_row]."""
    values = weights[row].view(np.uint16)
    for i in range(np.uint64(values.shape[0])):
        out[out_row, i] = _bfloat_to_float(values[i])


PLANES_F32 = PlaneLayout(
    (),
    None,
    ((0, 4),),
    r"""
struct F32 : OfFloats {
    static const int IN_16_BYTES = 4;
    const float* rows;
    __device__ F32(const uint8_t* planes, int64_t) : rows((const float*)planes) {}
    __device__ __forceinline__ void load(int64_t weight, float w[4]) const
    {
        uint4 a = load_once(rows + weight);
        w[0] = __uint_as_float(a.x); w[1] = __uint_as_float(a.y);
        w[2] = __uint_as_float(a.z); w[3] = __uint_as_float(a.w);
    }
    __device__ __forceinline__ float one(int64_t weight) const { return __ldg(rows + weight); }
};
""",
)


def _of_16_bits(name: str, to_float: str) -> PlaneLayout:
    source = r"""
struct NAME : OfFloats {
    static const int IN_16_BYTES = 8;
    const uint16_t* rows;
    __device__ NAME(const uint8_t* planes, int64_t) : rows((const uint16_t*)planes) {}
    __device__ __forceinline__ void load(int64_t weight, float w[8]) const
    {
        uint4 a = load_once(rows + weight);
        const uint32_t pairs[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[2 * i] = TO_FLOAT(pairs[i]);
            w[2 * i + 1] = TO_FLOAT(pairs[i] >> 16);
        }
    }
    __device__ __forceinline__ float one(int64_t weight) const { return TO_FLOAT(__ldg(rows + weight)); }
};
"""
    return PlaneLayout((), None, ((0, 2),), source.replace("NAME", name).replace("TO_FLOAT", to_float))


PLANES_F16, PLANES_BF16 = _of_16_bits("F16", "of_half"), _of_16_bits("BF16", "of_bf16")

F32 = BlockFormat(
    "F32", 0, 1, 4, _unpack_f32, _pack_f32, dequantize_row_f32, dot_row_f32, largest=math.inf, planes=PLANES_F32
)
F16 = BlockFormat("F16", 1, 1, 2, of_halves, halves_of, dequantize_row_f16, dot_row_f16, planes=PLANES_F16)
BF16 = BlockFormat(
    "BF16",
    30,
    1,
    2,
    _unpack_bf16,
    _pack_bf16,
    dequantize_row_bf16,
    dot_row_bf16,
    largest=math.inf,
    planes=PLANES_BF16,
)
