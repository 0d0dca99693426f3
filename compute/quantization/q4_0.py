"""Q4_0: 32 weights of 4 bits that share one scale.

ggml's block_q4_0, 18 bytes:

    d      2   scale, binary16
    qs    16   nibbles; byte i holds weight i (low) and weight 16+i (high)

    weight[i] = d * (q - 8)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import load_halves, multiply, multiply_add, splat, to_floats
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, halves_of, of_halves
from cbtop.compute.quantization.fitting import fit_scales, levels_of
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.rows import nibbles, row_functions
from cbtop.compute.quantization.unpacking import NEAR_AHEAD, U, ask_ahead, four_bits_64

BLOCK_ELEMENTS = 32
BLOCK_BYTES = 18


def _unpack(blocks: Bytes) -> Floats:
    q = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)  # (blocks, 32)
    weights: Floats = of_halves(blocks[:, :2]) * (q.astype(np.float32) - np.float32(8))
    return weights


def _pack(blocks: Floats) -> Bytes:
    d = halves_of(fit_scales(blocks, -8, 7)[:, None])
    q = levels_of(blocks, of_halves(d), None, -8, 7)
    return np.concatenate([d, q[:, :16] | (q[:, 16:] << 4)], axis=1)


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    d = load_half(weights, row, base)
    q = nibbles(weights, row, base + np.uint64(2), part)
    return multiply_add(to_floats(q), splat(d), splat(np.float32(-8) * d))


@jit_inlined
def _unpack_rows(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(18 * ROWS)
    ask_ahead(w, row, base, 5, NEAR_AHEAD)
    scale = load_halves(w, row, base)
    return (*four_bits_64(w, row, base + U(2 * ROWS)), scale, multiply(scale, splat(np.float32(8))))


INTERLEAVED = InterleavedLayout(units=((2, 1, (0,)), (4, 4, (2,))), unpack=_unpack_rows, largest=15)

PLANES = PlaneLayout(
    (4,),
    lambda blocks: np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1),
    ((0, 2),),
    r"""
struct Q4_0 {
    const uint8_t *low, *heads;
    __device__ Q4_0(const uint8_t* planes, int64_t weights) : low(planes), heads(behind(planes, weights / 2)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const { codes_of_4(low, unit, q); }
    __device__ __forceinline__ float4 scales(int64_t unit) const
    {
        float scale = of_half(__ldg((const uint16_t*)heads + unit));
        return make_float4(scale, -8 * scale, scale, -8 * scale);
    }
};
""",
)

Q4_0 = BlockFormat(
    "Q4_0",
    2,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("q4_0", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
    planes=PLANES,
    interleaved=INTERLEAVED,
)
