"""Q5_0: 32 weights of 5 bits that share one scale.

ggml's block_q5_0, 22 bytes:

    d      2   scale, binary16
    qh     4   the highest bits; weight i has bit i of a little-endian word
    qs    16   the low nibbles; byte i holds weight i (low) and weight 16+i (high)

    weight[i] = d * (q - 16)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import load_halves, multiply, multiply_add, splat, to_floats
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, halves_of, of_halves
from cbtop.compute.quantization.fitting import fit_scales, levels_of
from cbtop.compute.quantization.five_bits import codes_of_five_bits, five_bits, pack_five_bits, unpack_five_bits
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.rows import row_functions
from cbtop.compute.quantization.unpacking import U, ask_ahead, five_bits_64

BLOCK_ELEMENTS = 32
BLOCK_BYTES = 22


def _unpack(blocks: Bytes) -> Floats:
    q = unpack_five_bits(blocks[:, 2:]).astype(np.float32)
    weights: Floats = of_halves(blocks[:, :2]) * (q - np.float32(16))
    return weights


def _pack(blocks: Floats) -> Bytes:
    d = halves_of(fit_scales(blocks, -16, 15)[:, None])
    return np.concatenate([d, pack_five_bits(levels_of(blocks, of_halves(d), None, -16, 15))], axis=1)


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    d = load_half(weights, row, base)
    q = five_bits(weights, row, base + np.uint64(2), part)
    return multiply_add(to_floats(q), splat(d), splat(np.float32(-16) * d))


@jit_inlined
def _unpack_rows(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(22 * ROWS)
    ask_ahead(w, row, base, 6)
    scale = load_halves(w, row, base)
    return (*five_bits_64(w, row, base + U(2 * ROWS)), scale, multiply(scale, splat(np.float32(16))))


INTERLEAVED = InterleavedLayout(units=((2, 1, (0,)), (4, 5, (2,))), unpack=_unpack_rows, largest=31)

PLANES = PlaneLayout(
    (4, 1),
    lambda blocks: codes_of_five_bits(blocks[:, 2:]),
    ((0, 2),),
    r"""
struct Q5_0 {
    const uint8_t *low, *high, *heads;
    __device__ Q5_0(const uint8_t* planes, int64_t weights)
        : low(planes), high(behind(low, weights / 2)), heads(behind(high, weights / 8)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const
    {
        codes_of_4(low, unit, q);
        add_codes_of_1(high, unit, 4, q);
    }
    __device__ __forceinline__ float4 scales(int64_t unit) const
    {
        float scale = of_half(__ldg((const uint16_t*)heads + unit));
        return make_float4(scale, -16 * scale, scale, -16 * scale);
    }
};
""",
)

Q5_0 = BlockFormat(
    "Q5_0",
    6,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("q5_0", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
    planes=PLANES,
    interleaved=INTERLEAVED,
)
