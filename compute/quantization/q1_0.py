"""Q1_0: 128 weights of 1 bit that share one scale.

ggml's block_q1_0, 18 bytes:

    d      2   scale, binary16
    qs    16   bits; byte i holds weights 8i to 8i+7, the first in its lowest bit

    weight[i] = d if the bit is 1, otherwise -d
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.bytes64 import load_64, masked, with_fifth_bits
from cbtop.compute.jit.compile import jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import bits_of, load_halves, load_words, multiply, multiply_add, splat, to_floats
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, halves_of, of_halves
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.rows import byte, row_functions
from cbtop.compute.quantization.unpacking import U, ask_ahead

BLOCK_ELEMENTS = 128
BLOCK_BYTES = 18


def _codes(blocks: Any) -> Any:
    return np.stack([blocks[:, 2:] >> bit & 1 for bit in range(8)], axis=2).reshape(len(blocks), -1)


def _unpack(blocks: Bytes) -> Floats:
    d = of_halves(blocks[:, :2])
    return np.where(_codes(blocks), d, -d)


def _pack(blocks: Floats) -> Bytes:
    d = halves_of(np.abs(blocks).mean(axis=1, keepdims=True))  # the least squared error
    return np.concatenate([d, np.packbits(blocks >= 0, axis=1, bitorder="little")], axis=1)


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    d, at = load_half(weights, row, base), base + np.uint64(2) + part + part
    bits = np.int32(byte(weights, row, at) | np.int32(byte(weights, row, at + np.uint64(1)) << np.int32(8)))
    return multiply_add(to_floats(bits_of(np.uint32(bits))), splat(np.float32(2) * d), splat(-d))


@jit_inlined
def _unpack_rows(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(18 * ROWS)
    ask_ahead(w, row, base + part * U(72), 2)
    at = base + U(2 * ROWS) + part * U(64)
    words, zeros = load_words(w, row, at), masked(load_64(w, row, at), np.int32(0))
    scale = load_halves(w, row, base)
    return (
        with_fifth_bits(zeros, words, np.int32(0)),
        with_fifth_bits(zeros, words, np.int32(4)),
        with_fifth_bits(zeros, words, np.int32(8)),
        with_fifth_bits(zeros, words, np.int32(12)),
        with_fifth_bits(zeros, words, np.int32(16)),
        with_fifth_bits(zeros, words, np.int32(20)),
        with_fifth_bits(zeros, words, np.int32(24)),
        with_fifth_bits(zeros, words, np.int32(28)),
        multiply(scale, splat(np.float32(1 / 8))),  # a fifth bit is 16, and the levels are 2 apart
        scale,
    )


INTERLEAVED = InterleavedLayout(units=((2, 1, (0,)), (4, 4, (2,))), unpack=_unpack_rows, largest=16)

PLANES = PlaneLayout(
    (1,),
    _codes,
    ((0, 2),),
    r"""
struct Q1_0 {
    const uint8_t *low, *heads;
    __device__ Q1_0(const uint8_t* planes, int64_t weights) : low(planes), heads(behind(planes, weights / 8)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const
    {
#pragma unroll
        for (int g = 0; g < 8; g++) q[g] = 0;
        add_codes_of_1(low, unit, 0, q);
    }
    __device__ __forceinline__ float4 scales(int64_t unit) const
    {
        float d = of_half(__ldg((const uint16_t*)heads + unit / 4));
        return make_float4(2 * d, -d, 2 * d, -d);
    }
};
""",
)

Q1_0 = BlockFormat(
    "Q1_0",
    41,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("q1_0", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
    planes=PLANES,
    interleaved=INTERLEAVED,
    has_budget=False,
)
