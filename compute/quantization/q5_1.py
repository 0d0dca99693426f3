"""Q5_1: 32 weights of 5 bits that share a scale and a minimum.

ggml's block_q5_1, 24 bytes:

    d      2   scale, binary16
    m      2   minimum, binary16
    qh     4   the highest bits; weight i has bit i of a little-endian word
    qs    16   the low nibbles; byte i holds weight i (low) and weight 16+i (high)

    weight[i] = d * q + m
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import load_halves, multiply, multiply_add, splat, to_floats
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, halves_of, of_halves
from cbtop.compute.quantization.fitting import fit_lines, levels_of
from cbtop.compute.quantization.five_bits import codes_of_five_bits, five_bits, pack_five_bits, unpack_five_bits
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.rows import row_functions
from cbtop.compute.quantization.unpacking import U, ask_ahead, five_bits_64

BLOCK_ELEMENTS = 32
BLOCK_BYTES = 24


def _unpack(blocks: Bytes) -> Floats:
    q = unpack_five_bits(blocks[:, 4:]).astype(np.float32)
    weights: Floats = of_halves(blocks[:, :2]) * q + of_halves(blocks[:, 2:4])
    return weights


def _pack(blocks: Floats) -> Bytes:
    d, m = (halves_of(values[:, None]) for values in fit_lines(blocks, 31, is_minimum=False))
    return np.concatenate([d, m, pack_five_bits(levels_of(blocks, of_halves(d), of_halves(m), 0, 31))], axis=1)


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    d, m = load_half(weights, row, base), load_half(weights, row, base + np.uint64(2))
    return multiply_add(to_floats(five_bits(weights, row, base + np.uint64(4), part)), splat(d), splat(m))


@jit_inlined
def _unpack_rows(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(24 * ROWS)
    ask_ahead(w, row, base, 6)
    minimum = multiply(load_halves(w, row, base + U(2 * ROWS)), splat(np.float32(-1)))
    return (*five_bits_64(w, row, base + U(4 * ROWS)), load_halves(w, row, base), minimum)


INTERLEAVED = InterleavedLayout(units=((2, 2, (0,)), (4, 5, (4,))), unpack=_unpack_rows, largest=31)

PLANES = PlaneLayout(
    (4, 1),
    lambda blocks: codes_of_five_bits(blocks[:, 4:]),
    ((0, 4),),
    r"""
struct Q5_1 {
    const uint8_t *low, *high, *heads;
    __device__ Q5_1(const uint8_t* planes, int64_t weights)
        : low(planes), high(behind(low, weights / 2)), heads(behind(high, weights / 8)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const
    {
        codes_of_4(low, unit, q);
        add_codes_of_1(high, unit, 4, q);
    }
    __device__ __forceinline__ float4 scales(int64_t unit) const
    {
        uint32_t head = __ldg((const uint32_t*)heads + unit);
        float scale = of_half(head), minimum = of_half(head >> 16);
        return make_float4(scale, minimum, scale, minimum);
    }
};
""",
)

Q5_1 = BlockFormat(
    "Q5_1",
    7,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("q5_1", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
    planes=PLANES,
    interleaved=INTERLEAVED,
)
