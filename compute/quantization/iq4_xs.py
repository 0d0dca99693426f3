"""IQ4_XS: 256 weights of 4 bits that select uneven levels, in eight sub-blocks with a signed 6-bit scale each.

ggml's block_iq4_xs, 136 bytes:

    d           2   scale of the scales, binary16
    scales_h    2   the high 2 bits of the scales; scale s has bits 2s and 2s+1 of a little-endian word
    scales_l    4   the low 4 bits: byte i has scales 2i (low nibble) and 2i+1 (high nibble)
    qs        128   nibbles; byte 16s+i holds weight 32s+i (low) and weight 32s+16+i (high)

    weight[32s+i] = d * (scale[s] - 32) * level[q] (see uneven_levels.py)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import load_bytes, load_halves, multiply, splat
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, of_halves
from cbtop.compute.quantization.fitting import in_units
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.rows import byte, row_functions
from cbtop.compute.quantization.uneven_levels import fit_uneven, pack_uneven, uneven, unpack_uneven
from cbtop.compute.quantization.unpacking import U, ask_ahead, less_32, uneven_levels_64

BLOCK_ELEMENTS = 256
BLOCK_BYTES = 136
SUB_BLOCK_ELEMENTS = 32
HIGH_OFFSET, LOW_OFFSET, QS_OFFSET = 2, 4, 8


def _unpack(blocks: Bytes) -> Floats:
    packed_low, packed_high = blocks[:, LOW_OFFSET:QS_OFFSET, None], blocks[:, HIGH_OFFSET:LOW_OFFSET, None]
    low = (packed_low >> np.array([0, 4], np.uint8)) & 15  # (blocks, 4, 2)
    high = (packed_high >> np.array([0, 2, 4, 6], np.uint8)) & 3  # (blocks, 2, 4)
    scale = (low.reshape(-1, 8) | (high.reshape(-1, 8) << 4)).astype(np.float32) - np.float32(32)
    levels = unpack_uneven(blocks[:, QS_OFFSET:].reshape(-1, 16)).reshape(-1, 8, SUB_BLOCK_ELEMENTS)
    weights: Floats = (of_halves(blocks[:, :HIGH_OFFSET]) * scale)[:, :, None] * levels
    return weights.reshape(len(blocks), -1)


def _pack(weights: Floats) -> Bytes:
    blocks = weights.reshape(-1, SUB_BLOCK_ELEMENTS)
    d, scales = in_units(fit_uneven(blocks).reshape(-1, 8), -32, 31)
    qs = pack_uneven(blocks, of_halves(d) * scales).reshape(-1, 128)
    scale = (scales + 32).astype(np.uint8)
    high = (scale >> 4).reshape(-1, 2, 4)
    high = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    low = (scale[:, 0::2] & 15) | ((scale[:, 1::2] & 15) << 4)
    return np.concatenate([d, high, low, qs], axis=1)


@jit
def _scale(weights: Any, row: Any, base: Any, s: Any) -> Any:
    """Return scale `s` of the block that begins at weights[row, base]."""
    low = byte(weights, row, base + np.uint64(LOW_OFFSET) + (s >> np.uint64(1)))
    low = np.int32(np.int32(low >> np.int32((s & np.uint64(1)) << np.uint64(2))) & np.int32(15))
    high = byte(weights, row, base + np.uint64(HIGH_OFFSET) + (s >> np.uint64(2)))
    high = np.int32(np.int32(high >> np.int32((s & np.uint64(3)) << np.uint64(1))) & np.int32(3))
    return np.float32(np.int32(np.int32(low | np.int32(high << np.int32(4))) - np.int32(32)))


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    s = part >> np.uint64(1)
    scale = load_half(weights, row, base) * _scale(weights, row, base, s)
    qs = base + np.uint64(QS_OFFSET) + s * np.uint64(16)
    return multiply(uneven(weights, row, qs, part & np.uint64(1)), splat(scale))


@jit_inlined
def _unpack_rows(w: Any, row: Any, step: Any, part: Any) -> Any:
    base, half = (step >> U(1)) * U(136 * ROWS), step & U(1)
    place = half * U(4) + part
    ask_ahead(w, row, base + place * U(17 * ROWS), 5)
    high = load_bytes(w, row, base + U(2 * ROWS) + half * U(ROWS))
    low = load_bytes(w, row, base + U(4 * ROWS) + (place >> U(1)) * U(ROWS))
    level = less_32(low, np.int32(4) * np.int32(part & U(1)), high, np.int32(2) * np.int32(part))
    scale = multiply(load_halves(w, row, base), level)
    levels = uneven_levels_64(w, row, base + U(8 * ROWS) + place * U(16 * ROWS))
    return (*levels, scale, multiply(scale, splat(np.float32(128))))


INTERLEAVED = InterleavedLayout(units=((2, 1, (0,)), (1, 6, (2,)), (4, 32, (8,))), unpack=_unpack_rows, largest=241)


def _codes(blocks: Any) -> Any:
    qs = blocks[:, QS_OFFSET:].reshape(-1, 8, 16)
    return np.concatenate([qs & 15, qs >> 4], axis=2).reshape(len(blocks), -1)


PLANES = PlaneLayout(
    (4,),
    _codes,
    ((0, QS_OFFSET),),
    r"""
struct IQ4_XS {
    const uint8_t *low, *heads;
    __device__ IQ4_XS(const uint8_t* planes, int64_t weights) : low(planes), heads(behind(planes, weights / 2)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const { levels_of_4(low, unit, q); }
    __device__ __forceinline__ float4 scales(int64_t unit) const
    {
        uint2 head = __ldg((const uint2*)heads + unit / 8);
        int s = unit % 8;
        int level = (head.y >> 4 * s & 15) | (head.x >> 16 + 2 * s & 3) << 4;
        float scale = of_half(head.x) * (float)(level - 32);
        return make_float4(scale, 0, scale, 0);
    }
};
""",
)

IQ4_XS = BlockFormat(
    "IQ4_XS",
    23,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("iq4_xs", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
    planes=PLANES,
    interleaved=INTERLEAVED,
)
