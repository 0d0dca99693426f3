"""Q4_1: 32 weights of 4 bits that share a scale and a minimum.

ggml's block_q4_1, 20 bytes:

    d      2   scale, binary16
    m      2   minimum, binary16
    qs    16   nibbles; byte i holds weight i (low) and weight 16+i (high)

    weight[i] = d * q + m
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import load_halves, multiply, multiply_add, splat, to_floats
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, halves_of, of_halves
from cbtop.compute.quantization.fitting import fit_lines, levels_of
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.rows import nibbles, row_functions
from cbtop.compute.quantization.unpacking import NEAR_AHEAD, U, ask_ahead, four_bits_64

BLOCK_ELEMENTS = 32
BLOCK_BYTES = 20


def _unpack(blocks: Bytes) -> Floats:
    q = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)  # (blocks, 32)
    weights: Floats = of_halves(blocks[:, :2]) * q.astype(np.float32) + of_halves(blocks[:, 2:4])
    return weights


def _pack(blocks: Floats) -> Bytes:
    d, m = (halves_of(values[:, None]) for values in fit_lines(blocks, 15, is_minimum=False))
    q = levels_of(blocks, of_halves(d), of_halves(m), 0, 15)
    return np.concatenate([d, m, q[:, :16] | (q[:, 16:] << 4)], axis=1)


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    d, m = load_half(weights, row, base), load_half(weights, row, base + np.uint64(2))
    return multiply_add(to_floats(nibbles(weights, row, base + np.uint64(4), part)), splat(d), splat(m))


@jit_inlined
def _unpack_rows(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(20 * ROWS)
    ask_ahead(w, row, base, 5, NEAR_AHEAD)
    minimum = multiply(load_halves(w, row, base + U(2 * ROWS)), splat(np.float32(-1)))
    return (*four_bits_64(w, row, base + U(4 * ROWS)), load_halves(w, row, base), minimum)


INTERLEAVED = InterleavedLayout(units=((2, 2, (0,)), (4, 4, (4,))), unpack=_unpack_rows, largest=15)

PLANES = PlaneLayout(
    (4,),
    lambda blocks: np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1),
    ((0, 4),),
    r"""
struct Q4_1 {
    const uint8_t *low, *heads;
    __device__ Q4_1(const uint8_t* planes, int64_t weights) : low(planes), heads(behind(planes, weights / 2)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const { codes_of_4(low, unit, q); }
    __device__ __forceinline__ float4 scales(int64_t unit) const
    {
        uint32_t head = __ldg((const uint32_t*)heads + unit);
        float scale = of_half(head), minimum = of_half(head >> 16);
        return make_float4(scale, minimum, scale, minimum);
    }
};
""",
)

Q4_1 = BlockFormat(
    "Q4_1",
    3,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("q4_1", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
    planes=PLANES,
    interleaved=INTERLEAVED,
)
