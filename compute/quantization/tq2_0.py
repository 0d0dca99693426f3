"""TQ2_0: 256 weights of 2 bits that share one scale. Files use three of the four levels.

ggml's block_tq2_0, 66 bytes; each half h (128 weights) has 32 bytes of qs:

    qs    64   byte i of the half's 32 holds weights i, 32+i, 64+i and 96+i, two bits each
    d      2   scale, binary16

    weight[i] = d * (q - 1)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import load_halves, multiply_add, splat, to_floats
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, halves_of, of_halves
from cbtop.compute.quantization.fitting import fit_scales, levels_of
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.rows import row_functions
from cbtop.compute.quantization.two_bits import codes_of_two_bits, pack_two_bits, two_bits, unpack_two_bits
from cbtop.compute.quantization.unpacking import U, ask_ahead, two_bits_64

BLOCK_ELEMENTS = 256
BLOCK_BYTES = 66
D_OFFSET = 64


def _unpack(blocks: Bytes) -> Floats:
    q = unpack_two_bits(blocks[:, :D_OFFSET]).astype(np.float32)
    weights: Floats = of_halves(blocks[:, D_OFFSET:]) * (q - np.float32(1))
    return weights


def _pack(blocks: Floats) -> Bytes:
    d = halves_of(fit_scales(blocks, -1, 1)[:, None])
    return np.concatenate([pack_two_bits(levels_of(blocks, of_halves(d), None, -1, 1)), d], axis=1)


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    d = load_half(weights, row, base + np.uint64(D_OFFSET))
    return multiply_add(to_floats(two_bits(weights, row, base, part)), splat(d), splat(-d))


@jit_inlined
def _unpack_rows(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = (step >> U(1)) * U(66 * ROWS)
    at = base + (step & U(1)) * U(512)
    ask_ahead(w, row, at + part * U(132), 3)
    scale = load_halves(w, row, base + U(D_OFFSET * ROWS))
    return (
        two_bits_64(w, row, at, 0, part),
        two_bits_64(w, row, at + U(64), 0, part),
        two_bits_64(w, row, at + U(128), 0, part),
        two_bits_64(w, row, at + U(192), 0, part),
        two_bits_64(w, row, at + U(256), 0, part),
        two_bits_64(w, row, at + U(320), 0, part),
        two_bits_64(w, row, at + U(384), 0, part),
        two_bits_64(w, row, at + U(448), 0, part),
        scale,
        scale,
    )


INTERLEAVED = InterleavedLayout(units=((4, 16, (0,)), (2, 1, (D_OFFSET,))), unpack=_unpack_rows, largest=3)

PLANES = PlaneLayout(
    (2,),
    lambda blocks: codes_of_two_bits(blocks[:, :D_OFFSET]),
    ((D_OFFSET, BLOCK_BYTES),),
    r"""
struct TQ2_0 {
    const uint8_t *low, *heads;
    __device__ TQ2_0(const uint8_t* planes, int64_t weights) : low(planes), heads(behind(planes, weights / 4)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const { codes_of_2(low, unit, q); }
    __device__ __forceinline__ float4 scales(int64_t unit) const
    {
        float d = of_half(__ldg((const uint16_t*)heads + unit / 8));
        return make_float4(d, -d, d, -d);
    }
};
""",
)

TQ2_0 = BlockFormat(
    "TQ2_0",
    35,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("tq2_0", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
    planes=PLANES,
    interleaved=INTERLEAVED,
    has_budget=False,
)
