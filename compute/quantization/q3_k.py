"""Q3_K: 256 weights of 3 bits in sixteen sub-blocks, each with a signed 6-bit scale.

ggml's block_q3_K, 110 bytes; each half h (128 weights) has 32 bytes of qs:

    hmask    32   the highest bits; weight 128h+32j+i has bit 4h+j of byte i
    qs       64   the low bits; byte i of the half's 32 holds weights i, 32+i, 64+i and 96+i, two bits each
    scales   12   sixteen scales of 6 bits, plus 32: byte i of the first eight holds the low 4 bits of scales i (low
                  nibble) and 8+i (high nibble), byte 8+i the high 2 bits of scales i, 4+i, 8+i and 12+i
    d         2   scale of the scales, binary16

    weight[i] = d * (scale[i // 16] - 32) * (q - 4)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.bytes64 import load_64, shifted, with_upper_bits
from cbtop.compute.jit.compile import jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import (
    bits_and,
    bits_or,
    load_bytes,
    load_halves,
    multiply,
    multiply_add,
    shift_left,
    shift_right,
    splat,
    to_floats,
)
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, of_halves
from cbtop.compute.quantization.fitting import fit_scales, in_units, levels_of
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import Factors, InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.rows import byte, row_functions
from cbtop.compute.quantization.two_bits import pack_two_bits, two_bits, unpack_two_bits
from cbtop.compute.quantization.unpacking import U, less_32, of_sixteen_columns, two_bits_64

BLOCK_ELEMENTS = 256
BLOCK_BYTES = 110
TURN_BYTES = 3 * 64  # bytes of a part (turn) of a block in interleaved rows, see BlockColumns
SUB_BLOCK_ELEMENTS = 16
QS_OFFSET, SCALES_OFFSET, D_OFFSET = 32, 96, 108


def _unpack(blocks: Bytes) -> Floats:
    packed = blocks[:, SCALES_OFFSET:D_OFFSET]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)  # (blocks, 16)
    high = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3  # (blocks, 4, 4)
    scale = (low | (high.reshape(-1, 16) << 4)).astype(np.float32) - np.float32(32)
    highest = (blocks[:, None, :QS_OFFSET] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # (blocks, 8, 32)
    q = unpack_two_bits(blocks[:, QS_OFFSET:SCALES_OFFSET]) | (highest.reshape(-1, BLOCK_ELEMENTS) << 2)
    level = q.reshape(-1, 16, SUB_BLOCK_ELEMENTS).astype(np.float32) - np.float32(4)
    weights: Floats = (of_halves(blocks[:, D_OFFSET:]) * scale)[:, :, None] * level
    return weights.reshape(len(blocks), -1)


def _pack(weights: Floats) -> Bytes:
    blocks = weights.reshape(-1, SUB_BLOCK_ELEMENTS)
    d, scales = in_units(fit_scales(blocks, -4, 3).reshape(-1, 16), -32, 31)
    q = levels_of(blocks, of_halves(d) * scales, None, -4, 3).reshape(-1, BLOCK_ELEMENTS)
    highest = np.packbits((q >> 2).reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)
    scale = (scales + 32).astype(np.uint8)
    high = (scale >> 4).reshape(-1, 4, 4)
    high = high[:, 0] | (high[:, 1] << 2) | (high[:, 2] << 4) | (high[:, 3] << 6)
    low = (scale[:, :8] & 15) | ((scale[:, 8:] & 15) << 4)
    return np.concatenate([highest, pack_two_bits(q & np.uint8(3)), low, high, d], axis=1)


@jit
def _scale(weights: Any, row: Any, offset: Any, part: Any) -> Any:
    """Return the scale of sub-block `part`, from the scales at weights[row, offset]."""
    low = byte(weights, row, offset + (part & np.uint64(7)))
    low = np.int32(np.int32(low >> np.int32((part >> np.uint64(3)) << np.uint64(2))) & np.int32(15))
    high = byte(weights, row, offset + np.uint64(8) + (part & np.uint64(3)))
    high = np.int32(np.int32(high >> np.int32((part >> np.uint64(2)) << np.uint64(1))) & np.int32(3))
    return np.float32(np.int32(np.int32(low | np.int32(high << np.int32(4))) - np.int32(32)))


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    scale = load_half(weights, row, base + np.uint64(D_OFFSET))
    scale *= _scale(weights, row, base + np.uint64(SCALES_OFFSET), part)
    column = (part & np.uint64(1)) << np.uint64(4)
    highest = shift_right(load_bytes(weights, row, base + column), np.int32(part >> np.uint64(1)))
    low = two_bits(weights, row, base + np.uint64(QS_OFFSET), part)
    q = bits_or(low, shift_left(bits_and(highest, np.int32(1)), np.int32(2)))
    return multiply_add(to_floats(q), splat(scale), splat(np.float32(-4) * scale))


@jit_inlined
def _four(w: Any, row: Any, at: Any, half: Any, part: Any) -> Any:
    """Do the same as `two_bits_64`, and add the highest bits."""
    # Shift `high` first by an amount that all parts share, and then only by constants. On AVX2, a shift by an amount
    # that is known only at run time takes more instructions.
    high = shifted(load_64(w, row, at + U(128)), np.int32(4) * np.int32(half))
    return with_upper_bits(two_bits_64(w, row, at, half, part), high, np.int32(part) + np.int32(2), np.int32(4))


@jit_inlined
def _factors_of_16(w: Any, row: Any, base: Any, place: Any) -> Any:
    """Return scale and minimum of 16 columns of the block at `base`.

    The minimum is 4 * scale, because 4 is the value of the highest bit.
    """
    at = base + U(96 * ROWS)
    low = load_bytes(w, row, at + (place & U(7)) * U(ROWS))
    high = load_bytes(w, row, at + (U(8) + (place & U(3))) * U(ROWS))
    level = less_32(low, np.int32(4) * np.int32(place >> U(3)), high, np.int32(2) * np.int32(place >> U(2)))
    scale = multiply(load_halves(w, row, base + U(108 * ROWS)), level)
    return scale, multiply(scale, splat(np.float32(4)))


_unpack_rows, _BLOCK = of_sixteen_columns("q3_k", BLOCK_BYTES, TURN_BYTES, _four, _factors_of_16)

INTERLEAVED = InterleavedLayout(
    units=((4, 8, (32, 64, 0)), (1, 12, (96,)), (2, 1, (108,))),
    unpack=_unpack_rows,
    largest=7,
    factors=Factors.OF_16,
    block=_BLOCK,
)


def _codes(blocks: Any) -> Any:
    qs = blocks[:, QS_OFFSET:SCALES_OFFSET].reshape(-1, 2, 32)
    low = np.stack([qs >> 2 * quarter & 3 for quarter in range(4)], axis=2).reshape(-1, 8, 32)
    high = np.stack([blocks[:, :QS_OFFSET] >> s & 1 for s in range(8)], axis=1)
    return (low | high << 2).reshape(len(blocks), -1)


PLANES = PlaneLayout(
    (2, 1),
    _codes,
    ((SCALES_OFFSET, D_OFFSET), (D_OFFSET, BLOCK_BYTES)),
    r"""
struct Q3_K {
    const uint8_t *low, *high, *levels, *heads;
    __device__ Q3_K(const uint8_t* planes, int64_t weights)
        : low(planes), high(behind(low, weights / 4)), levels(behind(high, weights / 8)),
          heads(behind(levels, weights / 256 * 12)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const
    {
        codes_of_2(low, unit, q);
        add_codes_of_1(high, unit, 2, q);
    }
    __device__ __forceinline__ float4 scales(int64_t unit) const
    {
        int s = unit % 8;  // scales 2 s and 2 s + 1
        const uint8_t* block = levels + unit / 8 * 12;
        uint32_t least = __ldg((const uint16_t*)(block + 2 * s % 8)) >> s / 4 * 4;
        uint32_t most = __ldg((const uint16_t*)(block + 8 + 2 * s % 4)) >> s / 2 * 2;
        float d = of_half(__ldg((const uint16_t*)heads + unit / 8));
        float first = d * (float)((int)(least & 15 | (most & 3) << 4) - 32);
        float last = d * (float)((int)(least >> 8 & 15 | (most >> 8 & 3) << 4) - 32);
        return make_float4(first, -4 * first, last, -4 * last);
    }
};
""",
)

Q3_K = BlockFormat(
    "Q3_K",
    11,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("q3_k", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
    planes=PLANES,
    interleaved=INTERLEAVED,
    has_budget=False,
)
