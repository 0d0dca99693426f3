"""Q2_K: 256 weights of 2 bits in sixteen sub-blocks, each with a 4-bit scale and a 4-bit minimum.

ggml's block_q2_K, 84 bytes:

    scales   16   byte s holds scale s (low nibble) and minimum s (high nibble)
    qs       64   byte i of each half's 32 holds weights i, 32+i, 64+i and 96+i of the half, two bits each
    d         2   scale of the scales, binary16
    dmin      2   scale of the minima, binary16

    weight[16s+i] = d * scale[s] * q - dmin * minimum[s]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import (
    bits_and,
    load_bytes,
    load_halves,
    multiply,
    multiply_add,
    shift_right,
    splat,
    to_floats,
)
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, of_halves
from cbtop.compute.quantization.fitting import fit_lines, in_units, levels_of
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import Factors, InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.rows import byte, row_functions
from cbtop.compute.quantization.two_bits import codes_of_two_bits, pack_two_bits, two_bits, unpack_two_bits
from cbtop.compute.quantization.unpacking import U, of_sixteen_columns, two_bits_64

BLOCK_ELEMENTS = 256
BLOCK_BYTES = 84
TURN_BYTES = 2 * 64  # bytes of a part (turn) of a block in interleaved rows, see BlockColumns
SUB_BLOCK_ELEMENTS = 16
QS_OFFSET, D_OFFSET, DMIN_OFFSET = 16, 80, 82


def _unpack(blocks: Bytes) -> Floats:
    d, dmin = of_halves(blocks[:, D_OFFSET:DMIN_OFFSET]), of_halves(blocks[:, DMIN_OFFSET:])  # (blocks, 1)
    scale, minimum = blocks[:, :QS_OFFSET] & 15, blocks[:, :QS_OFFSET] >> 4  # (blocks, 16)
    q = unpack_two_bits(blocks[:, QS_OFFSET:D_OFFSET]).reshape(-1, 16, SUB_BLOCK_ELEMENTS).astype(np.float32)
    weights: Floats = (d * scale.astype(np.float32))[:, :, None] * q - (dmin * minimum.astype(np.float32))[:, :, None]
    return weights.reshape(len(blocks), -1)


def _pack(weights: Floats) -> Bytes:
    blocks = weights.reshape(-1, SUB_BLOCK_ELEMENTS)
    scales, offsets = fit_lines(blocks, 3, is_minimum=True)
    d, scales = in_units(scales.reshape(-1, 16), 0, 15)
    dmin, minima = in_units(-offsets.reshape(-1, 16), 0, 15)
    q = levels_of(blocks, of_halves(d) * scales, -of_halves(dmin) * minima, 0, 3).reshape(-1, BLOCK_ELEMENTS)
    packed = scales.astype(np.uint8) | (minima.astype(np.uint8) << 4)
    return np.concatenate([packed, pack_two_bits(q), d, dmin], axis=1)


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    packed = byte(weights, row, base + part)
    scale = np.float32(np.int32(packed & np.int32(15)))
    scale *= load_half(weights, row, base + np.uint64(D_OFFSET))
    minimum = np.float32(np.int32(packed >> np.int32(4)))
    minimum *= load_half(weights, row, base + np.uint64(DMIN_OFFSET))
    q = two_bits(weights, row, base + np.uint64(QS_OFFSET), part)
    return multiply_add(to_floats(q), splat(scale), splat(-minimum))


@jit_inlined
def _factors_of_16(w: Any, row: Any, base: Any, place: Any) -> Any:
    """Return the scale and the minimum of 16 columns of the block at `base`."""
    both, at = load_bytes(w, row, base + U(64 * ROWS) + place * U(ROWS)), base + U(80 * ROWS)
    scale, minimum = to_floats(bits_and(both, np.int32(15))), to_floats(shift_right(both, np.int32(4)))
    return multiply(load_halves(w, row, at), scale), multiply(load_halves(w, row, at + U(2 * ROWS)), minimum)


_unpack_rows, _BLOCK = of_sixteen_columns("q2_k", BLOCK_BYTES, TURN_BYTES, two_bits_64, _factors_of_16)

INTERLEAVED = InterleavedLayout(
    units=((4, 8, (16, 48)), (1, 16, (0,)), (2, 2, (80,))),
    unpack=_unpack_rows,
    largest=3,
    factors=Factors.OF_16,
    block=_BLOCK,
)


PLANES = PlaneLayout(
    (2,),
    lambda blocks: codes_of_two_bits(blocks[:, QS_OFFSET:D_OFFSET]),
    ((0, QS_OFFSET), (D_OFFSET, BLOCK_BYTES)),
    r"""
struct Q2_K {
    const uint8_t *low, *levels, *heads;
    __device__ Q2_K(const uint8_t* planes, int64_t weights)
        : low(planes), levels(behind(low, weights / 4)), heads(behind(levels, weights / 16)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const { codes_of_2(low, unit, q); }
    __device__ __forceinline__ float4 scales(int64_t unit) const
    {
        uint32_t head = __ldg((const uint32_t*)heads + unit / 8);
        uint32_t two = __ldg((const uint16_t*)levels + unit);
        float d = of_half(head), dmin = -of_half(head >> 16);
        float first = d * (float)(two & 15), last = d * (float)(two >> 8 & 15);
        return make_float4(first, dmin * (float)(two >> 4 & 15), last, dmin * (float)(two >> 12));
    }
};
""",
)

Q2_K = BlockFormat(
    "Q2_K",
    10,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("q2_k", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
    planes=PLANES,
    interleaved=INTERLEAVED,
    has_budget=False,
)
