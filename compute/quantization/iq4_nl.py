"""IQ4_NL: 32 weights of 4 bits that select uneven levels and share one scale.

ggml's block_iq4_nl, 18 bytes:

    d      2   scale, binary16
    qs    16   nibbles; byte i holds weight i (low) and weight 16+i (high)

    weight[i] = d * level[q] (see uneven_levels.py)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import load_halves, multiply, splat
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, halves_of, of_halves
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.rows import row_functions
from cbtop.compute.quantization.uneven_levels import fit_uneven, pack_uneven, uneven, unpack_uneven
from cbtop.compute.quantization.unpacking import U, ask_ahead, uneven_levels_64

BLOCK_ELEMENTS = 32
BLOCK_BYTES = 18


def _unpack(blocks: Bytes) -> Floats:
    weights: Floats = of_halves(blocks[:, :2]) * unpack_uneven(blocks[:, 2:])
    return weights


def _pack(blocks: Floats) -> Bytes:
    d = halves_of(fit_uneven(blocks)[:, None])
    return np.concatenate([d, pack_uneven(blocks, of_halves(d))], axis=1)


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    return multiply(uneven(weights, row, base + np.uint64(2), part), splat(load_half(weights, row, base)))


@jit_inlined
def _unpack_rows(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(18 * ROWS)
    ask_ahead(w, row, base, 5)
    scale = load_halves(w, row, base)
    return (*uneven_levels_64(w, row, base + U(2 * ROWS)), scale, multiply(scale, splat(np.float32(128))))


INTERLEAVED = InterleavedLayout(units=((2, 1, (0,)), (4, 4, (2,))), unpack=_unpack_rows, largest=241)

PLANES = PlaneLayout(
    (4,),
    lambda blocks: np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1),
    ((0, 2),),
    r"""
struct IQ4_NL {
    const uint8_t *low, *heads;
    __device__ IQ4_NL(const uint8_t* planes, int64_t weights) : low(planes), heads(behind(planes, weights / 2)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const { levels_of_4(low, unit, q); }
    __device__ __forceinline__ float4 scales(int64_t unit) const
    {
        float scale = of_half(__ldg((const uint16_t*)heads + unit));
        return make_float4(scale, 0, scale, 0);
    }
};
""",
)

IQ4_NL = BlockFormat(
    "IQ4_NL",
    20,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("iq4_nl", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
    planes=PLANES,
    interleaved=INTERLEAVED,
)
