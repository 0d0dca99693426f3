"""Q6_K: 256 weights of 6 bits in sixteen sub-blocks, each with a signed 8-bit scale.

ggml's block_q6_K, 210 bytes; each half h (128 weights) has 64 bytes of ql and 32 of qh:

    ql      128   low 4 bits: byte l of the half's 64 holds weights l (low nibble) and 64+l (high nibble)
    qh       64   high 2 bits: byte l of the half's 32 holds weights l, 32+l, 64+l and 96+l, two bits each
    scales   16   int8, one for 16 weights
    d         2   scale of the scales, binary16

    weight[i] = d * scales[i // 16] * (q - 32)
"""

# The product is fast for three reasons: the sixteen scales of a block are one vector and each sub-block is one
# vector, all sums stay in vectors until the row ends, and the -32 is multiplied only once per sub-block, by the sum
# of x over the sub-block. All rows share these sums of x (`sums`).

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.bytes64 import load_64
from cbtop.compute.jit.compile import jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import (
    add,
    bits_and,
    bits_or,
    lane,
    load_bytes,
    load_floats,
    load_halves,
    load_signed_bytes,
    multiply,
    multiply_add,
    prefetch,
    shift_left,
    shift_right,
    splat,
    to_floats,
    total_of,
)
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, of_halves
from cbtop.compute.quantization.fitting import fit_scales, in_units, levels_of
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import BlockColumns, Factors, InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.unpacking import U, ask_out_of_order, high_with, low_with, with_uppers

BLOCK_ELEMENTS = 256
BLOCK_BYTES = 210
QH_OFFSET = 128
SCALES_OFFSET = 192
D_OFFSET = 208
TURN_BYTES = 6 * 64  # bytes of a part (turn) of a block in interleaved rows, see BlockColumns
SUB_BLOCK_ELEMENTS = 16
LOW_NIBBLE, HIGH_PAIR = np.int32(0x0F), np.int32(0x30)
PREFETCH_BYTES = np.uint64(2048)


def _unpack(blocks: Bytes) -> Floats:
    ql = blocks[:, :QH_OFFSET].reshape(-1, 2, 1, 64)
    low = np.concatenate([ql & 15, ql >> 4], axis=2).reshape(-1, 2, 4, 32)
    qh = blocks[:, QH_OFFSET:SCALES_OFFSET].reshape(-1, 2, 1, 32)
    high = (qh >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3  # the shape of the array is (blocks, 2, 4, 32)
    q = (low | (high << 4)).reshape(-1, 16, SUB_BLOCK_ELEMENTS).astype(np.float32) - np.float32(32)
    d = blocks[:, D_OFFSET:].copy().view("<f2").astype(np.float32)  # (blocks, 1)
    scales = blocks[:, SCALES_OFFSET:D_OFFSET].view(np.int8).astype(np.float32)
    weights: Floats = (d * scales)[:, :, None] * q
    return weights.reshape(len(blocks), -1)


def _pack(weights: Floats) -> Bytes:
    blocks = weights.reshape(-1, SUB_BLOCK_ELEMENTS)
    d, scales = in_units(fit_scales(blocks, -32, 31).reshape(-1, 16), -128, 127)
    q = levels_of(blocks, of_halves(d) * scales, None, -32, 31).reshape(-1, 2, 4, 32)

    out = np.empty((len(q), BLOCK_BYTES), np.uint8)
    low = q & 15
    out[:, :QH_OFFSET] = (low[:, :, :2] | (low[:, :, 2:] << 4)).reshape(-1, 128)
    high = q >> 4
    packed = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    out[:, QH_OFFSET:SCALES_OFFSET] = packed.reshape(-1, 64)
    out[:, SCALES_OFFSET:D_OFFSET] = scales.astype(np.int8).view(np.uint8)
    out[:, D_OFFSET:] = d
    return out


@jit
def _scale(weights: Any, row: Any, offset: Any) -> Any:
    return np.float32(np.int8(weights[row, offset]))


@jit
def _weight(low: Any, high: Any) -> Any:
    """Return a weight from its four low bits and its two high bits. `high` is already shifted to the mask 0x30."""
    return np.float32(np.int32(np.int32(low | high) - np.int32(32)))


@jit
def sum_sub_blocks_q6_k(x: Any, sums: Any) -> None:
    """Write sixteen floats per block for `dot_row_q6_k`: the sum of x[0] over each sub-block."""
    for s in range(np.uint64(x.shape[1] // SUB_BLOCK_ELEMENTS)):
        total = np.float32(0)
        for i in range(np.uint64(SUB_BLOCK_ELEMENTS)):
            total += x[0, s * np.uint64(SUB_BLOCK_ELEMENTS) + i]
        sums[0, s] = total


@jit
def _add(low: Any, high: Any, x: Any, first: Any, factor: Any, total: Any) -> Any:
    """Return total + (low | high) . x[0, first : first + 16] * factor."""
    q = to_floats(bits_or(low, bits_and(high, HIGH_PAIR)))
    return multiply_add(multiply(q, load_floats(x, np.uint64(0), first)), factor, total)


@jit
def _add_quarter(
    weights: Any, row: Any, ql: Any, qh: Any, x: Any, first: Any, factors: Any, scale: Any, total: Any
) -> Any:
    """Return total + the products of the four sub-blocks that share 16 bytes of qh.

    The sub-blocks begin 32 columns apart. Their scales are the lanes `scale`, `scale` + 2, and so on.
    """
    a, b = load_bytes(weights, row, ql), load_bytes(weights, row, ql + np.uint64(32))
    h = load_bytes(weights, row, qh)
    four, two = np.int32(4), np.int32(2)
    total = _add(bits_and(a, LOW_NIBBLE), shift_left(h, four), x, first, lane(factors, scale), total)
    factor = lane(factors, scale + np.uint64(2))
    total = _add(bits_and(b, LOW_NIBBLE), shift_left(h, two), x, first + np.uint64(32), factor, total)
    factor = lane(factors, scale + np.uint64(4))
    total = _add(shift_right(a, four), h, x, first + np.uint64(64), factor, total)
    factor = lane(factors, scale + np.uint64(6))
    return _add(shift_right(b, four), shift_right(h, two), x, first + np.uint64(96), factor, total)


@jit_inlined
def dot_row_q6_k(weights: Any, row: Any, x: Any, sums: Any) -> Any:
    """Return the product of row `row` of uint8 (rows, row_bytes) and x[0]. `sums` are from `sum_sub_blocks_q6_k`."""
    left, right = splat(np.float32(0)), splat(np.float32(0))
    offset = splat(np.float32(-32))
    for block in range(np.uint64(weights.shape[1] // BLOCK_BYTES)):
        base = block * np.uint64(BLOCK_BYTES)
        prefetch(weights, row, base + PREFETCH_BYTES)
        prefetch(weights, row, base + PREFETCH_BYTES + np.uint64(64))
        prefetch(weights, row, base + PREFETCH_BYTES + np.uint64(128))
        d = load_half(weights, row, base + np.uint64(D_OFFSET))
        scales = to_floats(load_signed_bytes(weights, row, base + np.uint64(SCALES_OFFSET)))
        factors = multiply(scales, splat(d))
        of_block = load_floats(sums, np.uint64(0), block * np.uint64(16))
        left = multiply_add(multiply(factors, offset), of_block, left)
        ql, qh = base, base + np.uint64(QH_OFFSET)
        first, column, half = block * np.uint64(BLOCK_ELEMENTS), np.uint64(16), np.uint64(128)
        left = _add_quarter(weights, row, ql, qh, x, first, factors, np.uint64(0), left)
        right = _add_quarter(weights, row, ql + column, qh + column, x, first + column, factors, np.uint64(1), right)
        ql, qh, first = ql + np.uint64(64), qh + np.uint64(32), first + half
        left = _add_quarter(weights, row, ql, qh, x, first, factors, np.uint64(8), left)
        right = _add_quarter(weights, row, ql + column, qh + column, x, first + column, factors, np.uint64(9), right)
    return total_of(add(left, right))


@jit
def dequantize_row_q6_k(weights: Any, row: Any, out: Any, out_row: Any) -> None:
    """Write row `row` as float32 into out[out_row]."""
    for block in range(np.uint64(weights.shape[1] // BLOCK_BYTES)):
        base = block * np.uint64(BLOCK_BYTES)
        d = load_half(weights, row, base + np.uint64(D_OFFSET))
        for sub_block in range(np.uint64(16)):
            scale = d * _scale(weights, row, base + np.uint64(SCALES_OFFSET) + sub_block)
            half, inside = sub_block >> np.uint64(3), sub_block & np.uint64(7)
            quarter, column = inside >> np.uint64(1), (inside & np.uint64(1)) * np.uint64(16)
            ql = base + half * np.uint64(64) + (quarter & np.uint64(1)) * np.uint64(32) + column
            qh = base + np.uint64(QH_OFFSET) + half * np.uint64(32) + column
            low_shift = np.int32((quarter >> np.uint64(1)) * np.uint64(4))
            high_shift = np.int32(quarter * np.uint64(2))
            first = block * np.uint64(BLOCK_ELEMENTS) + sub_block * np.uint64(SUB_BLOCK_ELEMENTS)
            for i in range(np.uint64(SUB_BLOCK_ELEMENTS)):
                low = np.int32(np.int32(np.int32(weights[row, ql + i]) >> low_shift) & np.int32(15))
                high = np.int32(np.int32(np.int32(weights[row, qh + i]) >> high_shift) & np.int32(3))
                out[out_row, first + i] = scale * _weight(low, np.int32(high << np.int32(4)))


@jit_inlined
def _factor_of_16(w: Any, row: Any, base: Any, place: Any) -> Any:
    """Return the scale of 16 columns of the block at `base`."""
    scales = load_signed_bytes(w, row, base + U(192 * ROWS) + place * U(ROWS))
    return multiply(load_halves(w, row, base + U(208 * ROWS)), to_floats(scales))


@jit_inlined
def _factors(w: Any, row: Any, base: Any, part: Any) -> Any:
    """Return both scales of 32 columns, one for each 16."""
    return _factor_of_16(w, row, base, part * U(2)), _factor_of_16(w, row, base, part * U(2) + U(1))


@jit_inlined
def _unpack_rows(w: Any, row: Any, step: Any, part: Any) -> Any:
    base, half = (step >> U(1)) * U(210 * ROWS), step & U(1)
    low, high = base + (half * U(3) + (part & U(1))) * U(64), base + (half * U(3) + U(2)) * U(64)
    low_shift, high_shift = np.int32(4) * np.int32(part >> U(1)), np.int32(2) * np.int32(part)
    ask_out_of_order(w, row, base + (half * U(4) + part) * U(420), 7)
    return (
        *with_uppers(w, row, low, high, U(TURN_BYTES), low_shift, high_shift, np.int32(48)),
        *_factors(w, row, base, half * U(4) + part),
    )


@jit_inlined
def _four_columns(w: Any, row: Any, at: Any) -> Any:
    """Return eight vectors of four columns each, as described in `BlockColumns.four_columns`."""
    a, b, first = load_64(w, row, at), load_64(w, row, at + U(64)), load_64(w, row, at + U(128))
    c, d, second = load_64(w, row, at + U(192)), load_64(w, row, at + U(256)), load_64(w, row, at + U(320))
    return (
        low_with(a, first, 0, 48),
        low_with(b, first, 2, 48),
        high_with(a, first, 4, 48),
        high_with(b, first, 6, 48),
        low_with(c, second, 0, 48),
        low_with(d, second, 2, 48),
        high_with(c, second, 4, 48),
        high_with(d, second, 6, 48),
    )


INTERLEAVED = InterleavedLayout(
    units=((4, 8, (0, 32, 128, 64, 96, 160)), (1, 16, (192,)), (2, 1, (208,))),
    unpack=_unpack_rows,
    largest=63,
    factors=Factors.LESS_32,
    block=BlockColumns(TURN_BYTES, _four_columns, _factors, _factor_of_16),
)


def _codes(blocks: Any) -> Any:
    ql = blocks[:, :QH_OFFSET].reshape(-1, 2, 1, 64)
    low = np.concatenate([ql & 15, ql >> 4], axis=2).reshape(-1, 2, 4, 32)
    qh = blocks[:, QH_OFFSET:SCALES_OFFSET].reshape(-1, 2, 32)
    high = np.stack([qh >> 2 * quarter & 3 for quarter in range(4)], axis=2)
    return (low | high << 4).reshape(len(blocks), -1)


PLANES = PlaneLayout(
    (4, 2),
    _codes,
    ((SCALES_OFFSET, D_OFFSET), (D_OFFSET, BLOCK_BYTES)),
    r"""
struct Q6_K {
    const uint8_t *low, *high, *levels, *heads;
    __device__ Q6_K(const uint8_t* planes, int64_t weights)
        : low(planes), high(behind(low, weights / 2)), levels(behind(high, weights / 4)),
          heads(behind(levels, weights / 16)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const
    {
        codes_of_4(low, unit, q);
        add_codes_of_2(high, unit, 4, q);
    }
    __device__ __forceinline__ float4 scales(int64_t unit) const
    {
        float d = of_half(__ldg((const uint16_t*)heads + unit / 8));
        char2 two = __ldg((const char2*)levels + unit);
        float first = d * two.x, last = d * two.y;
        return make_float4(first, -32 * first, last, -32 * last);
    }
};
""",
)

Q6_K = BlockFormat(
    "Q6_K",
    14,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    dequantize_row_q6_k,
    dot_row_q6_k,
    sum_sub_blocks_q6_k,
    planes=PLANES,
    interleaved=INTERLEAVED,
)
