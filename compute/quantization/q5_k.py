"""Q5_K: 256 weights of 5 bits in eight sub-blocks, each with a 6-bit scale and a 6-bit minimum.

ggml's block_q5_K, 176 bytes:

    d         2   scale of the scales, binary16
    dmin      2   scale of the minima, binary16
    scales   12   eight scales and eight minima of 6 bits (see six_bits.py)
    qh       32   the highest bits; weight 32s+i has bit s of byte i
    qs      128   the low nibbles; byte 32j+i holds weight 64j+i (low) and weight 64j+32+i (high)

    weight[32s+i] = d * scale[s] * q - dmin * minimum[s]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.bytes64 import load_64
from cbtop.compute.jit.compile import jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import (
    bits_and,
    bits_or,
    load_bytes,
    multiply_add,
    shift_left,
    shift_right,
    splat,
    to_floats,
)
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, of_halves
from cbtop.compute.quantization.fitting import fit_lines, in_units, levels_of
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import BlockColumns, InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.rows import nibbles, row_functions
from cbtop.compute.quantization.six_bits import byte_of, minima_of, pack_six_bits, scales_of, unpack_six_bits
from cbtop.compute.quantization.unpacking import (
    U,
    ask_out_of_order,
    high_with,
    low_with,
    six_bit_factors,
    with_uppers,
)

BLOCK_ELEMENTS = 256
BLOCK_BYTES = 176
TURN_BYTES = 5 * 64  # bytes of a part (turn) of a block in interleaved rows, see BlockColumns
SUB_BLOCK_ELEMENTS = 32
SCALES_OFFSET, QH_OFFSET, QS_OFFSET = 4, 16, 48


def _unpack(blocks: Bytes) -> Floats:
    d, dmin = of_halves(blocks[:, 0:2]), of_halves(blocks[:, 2:4])  # (blocks, 1)
    scale, minimum = unpack_six_bits(blocks[:, SCALES_OFFSET:QH_OFFSET])
    qs = blocks[:, QS_OFFSET:].reshape(-1, 4, 1, SUB_BLOCK_ELEMENTS)
    low = np.concatenate([qs & 15, qs >> 4], axis=2).reshape(-1, 8, SUB_BLOCK_ELEMENTS)
    high = (blocks[:, None, QH_OFFSET:QS_OFFSET] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    q = (low | (high << 4)).astype(np.float32)
    weights: Floats = (d * scale)[:, :, None] * q - (dmin * minimum)[:, :, None]
    return weights.reshape(len(blocks), -1)


def _pack(weights: Floats) -> Bytes:
    blocks = weights.reshape(-1, SUB_BLOCK_ELEMENTS)
    scales, offsets = fit_lines(blocks, 31, is_minimum=True)
    d, scales = in_units(scales.reshape(-1, 8), 0, 63)
    dmin, minima = in_units(-offsets.reshape(-1, 8), 0, 63)
    q = levels_of(blocks, of_halves(d) * scales, -of_halves(dmin) * minima, 0, 31).reshape(-1, 8, SUB_BLOCK_ELEMENTS)
    high = np.packbits(q >> 4, axis=1, bitorder="little").reshape(-1, SUB_BLOCK_ELEMENTS)
    low = q & 15
    low = (low[:, 0::2] | (low[:, 1::2] << 4)).reshape(-1, 128)
    return np.concatenate([d, dmin, pack_six_bits(scales, minima), high, low], axis=1)


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    sub_block, column = part >> np.uint64(1), (part & np.uint64(1)) << np.uint64(4)
    scales = scales_of(weights, row, base + np.uint64(SCALES_OFFSET))
    minima = minima_of(weights, row, base + np.uint64(SCALES_OFFSET))
    scale = load_half(weights, row, base) * byte_of(scales, sub_block)
    minimum = load_half(weights, row, base + np.uint64(2)) * byte_of(minima, sub_block)
    qs = base + np.uint64(QS_OFFSET) + (sub_block >> np.uint64(1)) * np.uint64(32) + column
    low = nibbles(weights, row, qs, sub_block & np.uint64(1))
    high = shift_right(load_bytes(weights, row, base + np.uint64(QH_OFFSET) + column), np.int32(sub_block))
    q = bits_or(low, shift_left(bits_and(high, np.int32(1)), np.int32(4)))
    return multiply_add(to_floats(q), splat(scale), splat(-minimum))


@jit_inlined
def _factors(w: Any, row: Any, base: Any, part: Any) -> Any:
    """Return the scale and the minimum of 32 columns of the block at `base`."""
    return six_bit_factors(w, row, base + U(160 * ROWS), part >> U(2), part & U(3))


@jit_inlined
def _unpack_rows(w: Any, row: Any, step: Any, part: Any) -> Any:
    base, half = (step >> U(1)) * U(176 * ROWS), step & U(1)
    low, high = base + (half * U(2) + (part >> U(1))) * U(64), base + U(4 * 64)
    low_shift, high_shift = np.int32(4) * np.int32(part & U(1)), np.int32(half * U(4) + part)
    ask_out_of_order(w, row, base + (half * U(4) + part) * U(22 * ROWS), 6)
    return (
        *with_uppers(w, row, low, high, U(TURN_BYTES), low_shift, high_shift, np.int32(16)),
        *_factors(w, row, base, half * U(4) + part),
    )


@jit_inlined
def _four_columns(w: Any, row: Any, at: Any) -> Any:
    """Return eight vectors of four columns each, as described in `BlockColumns.four_columns`."""
    a, b = load_64(w, row, at), load_64(w, row, at + U(64))
    c, d = load_64(w, row, at + U(128)), load_64(w, row, at + U(192))
    high = load_64(w, row, at + U(256))
    return (
        low_with(a, high, 0, 16),
        high_with(a, high, 1, 16),
        low_with(b, high, 2, 16),
        high_with(b, high, 3, 16),
        low_with(c, high, 4, 16),
        high_with(c, high, 5, 16),
        low_with(d, high, 6, 16),
        high_with(d, high, 7, 16),
    )


INTERLEAVED = InterleavedLayout(
    units=((4, 8, (48, 80, 112, 144, 16)), (2, 2, (0,)), (1, 12, (4,))),
    unpack=_unpack_rows,
    largest=31,
    block=BlockColumns(TURN_BYTES, _four_columns, _factors),
)


def _codes(blocks: Any) -> Any:
    qs = blocks[:, QS_OFFSET:].reshape(-1, 4, 32)
    low = np.stack([qs & 15, qs >> 4], axis=2).reshape(-1, 8, 32)
    qh = blocks[:, QH_OFFSET:QS_OFFSET]
    high = np.stack([qh >> s & 1 for s in range(8)], axis=1)
    return (low | high << 4).reshape(len(blocks), -1)


PLANES = PlaneLayout(
    (4, 1),
    _codes,
    ((0, QH_OFFSET),),
    r"""
struct Q5_K {
    const uint8_t *low, *high, *heads;
    __device__ Q5_K(const uint8_t* planes, int64_t weights)
        : low(planes), high(behind(low, weights / 2)), heads(behind(high, weights / 8)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const
    {
        codes_of_4(low, unit, q);
        add_codes_of_1(high, unit, 4, q);
    }
    __device__ __forceinline__ float4 scales(int64_t unit) const { return lines_of_six_bits(heads, unit); }
};
""",
)

Q5_K = BlockFormat(
    "Q5_K",
    13,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("q5_k", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
    planes=PLANES,
    interleaved=INTERLEAVED,
)
