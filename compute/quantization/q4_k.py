"""Q4_K: 256 weights of 4 bits in eight sub-blocks, each with a 6-bit scale and a 6-bit minimum.

ggml's block_q4_K, 144 bytes:

    d         2   scale of the scales, binary16
    dmin      2   scale of the minima, binary16
    scales   12   eight scales and eight minima of 6 bits (see six_bits.py)
    qs      128   nibbles; byte 32j+i holds weight 64j+i (low) and weight 64j+32+i (high)

    weight[32s+i] = d * scale[s] * q - dmin * minimum[s]
"""

# The product is fast for three reasons: scales and minima are unpacked together in 64-bit words and converted as one
# vector, all sums stay in vectors until the row ends, and a minimum is multiplied only once per sub-block, by the sum
# of x over the sub-block. All rows share these sums of x (`sums`). One thread reads 6.3 GB/s of quantised weights on
# rows of 768, 8.4 on rows of 3840, and 7.8 from DRAM (2.6 GHz Xeon with AVX-512). Plain loops reach 3.5 from DRAM and
# 5.7 from cache.

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import (
    LANES,
    add,
    bits_and,
    bytes_of,
    halves,
    lane,
    load_bytes,
    load_floats,
    multiply,
    multiply_add,
    prefetch,
    shift_right,
    splat,
    to_floats,
    total_of,
)
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, of_halves
from cbtop.compute.quantization.fitting import fit_lines, in_units, levels_of
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.six_bits import byte_of, minima_of, pack_six_bits, scales_of, unpack_six_bits
from cbtop.compute.quantization.unpacking import U, ask_ahead, nibbles_64, six_bit_factors

BLOCK_ELEMENTS = 256
BLOCK_BYTES = 144
SUB_BLOCK_ELEMENTS = 32
LARGEST_6_BIT, LARGEST_4_BIT = 63, 15
LOW_NIBBLE, NIBBLE_BITS = np.int32(15), np.int32(4)
# How far ahead to prefetch. Distances of 1 to 4 KiB are equally fast. Without prefetching, DRAM is read at half the
# speed.
PREFETCH_BYTES = np.uint64(2048)


def _unpack(blocks: Bytes) -> Floats:
    d = blocks[:, 0:2].copy().view("<f2").astype(np.float32)  # (blocks, 1)
    dmin = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    scale, minimum = unpack_six_bits(blocks[:, 4:16])
    packed = blocks[:, 16:].reshape(-1, 4, 1, 32)
    q = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32).astype(np.float32)
    weights: Floats = (d * scale)[:, :, None] * q - (dmin * minimum)[:, :, None]
    return weights.reshape(len(blocks), -1)


def _pack(weights: Floats) -> Bytes:
    blocks = weights.reshape(-1, SUB_BLOCK_ELEMENTS)
    scales, offsets = fit_lines(blocks, LARGEST_4_BIT, is_minimum=True)
    d, scales = in_units(scales.reshape(-1, 8), 0, LARGEST_6_BIT)
    dmin, minima = in_units(-offsets.reshape(-1, 8), 0, LARGEST_6_BIT)
    q = levels_of(blocks, of_halves(d) * scales, -of_halves(dmin) * minima, 0, LARGEST_4_BIT).reshape(-1, 8, 32)

    out = np.empty((len(q), BLOCK_BYTES), np.uint8)
    out[:, 0:2], out[:, 2:4], out[:, 4:16] = d, dmin, pack_six_bits(scales, minima)
    out[:, 16:] = (q[:, 0::2] | (q[:, 1::2] << 4)).reshape(-1, 128)
    return out


@jit
def sum_sub_blocks_q4_k(x: Any, sums: Any) -> None:
    """Write sixteen floats per block for `dot_row_q4_k`: eight zeros, then the sum of x[0] over each sub-block."""
    for block in range(np.uint64(x.shape[1] // BLOCK_ELEMENTS)):
        for s in range(np.uint64(8)):
            total = np.float32(0)
            first = block * np.uint64(BLOCK_ELEMENTS) + s * np.uint64(SUB_BLOCK_ELEMENTS)
            for i in range(np.uint64(SUB_BLOCK_ELEMENTS)):
                total += x[0, first + i]
            sums[0, block * np.uint64(LANES) + s] = np.float32(0)
            sums[0, block * np.uint64(LANES) + np.uint64(8) + s] = total


@jit
def _add_pair(weights: Any, row: Any, qs: Any, x: Any, first: Any, low: Any, high: Any, total: Any) -> Any:
    """Return total + 32 low nibbles . x[0, first:] * low + 32 high nibbles . x[0, first + 32:] * high."""
    one, two = load_bytes(weights, row, qs), load_bytes(weights, row, qs + np.uint64(16))
    lows = multiply(to_floats(bits_and(one, LOW_NIBBLE)), load_floats(x, np.uint64(0), first))
    lows = multiply_add(
        to_floats(bits_and(two, LOW_NIBBLE)), load_floats(x, np.uint64(0), first + np.uint64(16)), lows
    )
    highs = multiply(to_floats(shift_right(one, NIBBLE_BITS)), load_floats(x, np.uint64(0), first + np.uint64(32)))
    highs = multiply_add(
        to_floats(shift_right(two, NIBBLE_BITS)), load_floats(x, np.uint64(0), first + np.uint64(48)), highs
    )
    return multiply_add(highs, high, multiply_add(lows, low, total))


@jit_inlined
def dot_row_q4_k(weights: Any, row: Any, x: Any, sums: Any) -> Any:
    """Return the product of row `row` of uint8 (rows, row_bytes) and x[0]. `sums` are from `sum_sub_blocks_q4_k`."""
    even, odd = splat(np.float32(0)), splat(np.float32(0))
    for block in range(np.uint64(weights.shape[1] // BLOCK_BYTES)):
        base = block * np.uint64(BLOCK_BYTES)
        prefetch(weights, row, base + PREFETCH_BYTES)
        prefetch(weights, row, base + PREFETCH_BYTES + np.uint64(64))
        d = load_half(weights, row, base)
        dmin = load_half(weights, row, base + np.uint64(2))
        scales = scales_of(weights, row, base + np.uint64(4))
        minima = minima_of(weights, row, base + np.uint64(4))
        # Lanes 0-7: d * scale; lanes 8-15: -dmin * minimum.
        factors = multiply(to_floats(bytes_of(scales, minima)), halves(d, -dmin))
        even = multiply_add(factors, load_floats(sums, np.uint64(0), block * np.uint64(LANES)), even)
        qs, first = base + np.uint64(16), block * np.uint64(BLOCK_ELEMENTS)
        low, high = lane(factors, np.uint64(0)), lane(factors, np.uint64(1))
        even = _add_pair(weights, row, qs, x, first, low, high, even)
        low, high = lane(factors, np.uint64(2)), lane(factors, np.uint64(3))
        odd = _add_pair(weights, row, qs + np.uint64(32), x, first + np.uint64(64), low, high, odd)
        low, high = lane(factors, np.uint64(4)), lane(factors, np.uint64(5))
        even = _add_pair(weights, row, qs + np.uint64(64), x, first + np.uint64(128), low, high, even)
        low, high = lane(factors, np.uint64(6)), lane(factors, np.uint64(7))
        odd = _add_pair(weights, row, qs + np.uint64(96), x, first + np.uint64(192), low, high, odd)
    return total_of(add(even, odd))


@jit
def dequantize_row_q4_k(weights: Any, row: Any, out: Any, out_row: Any) -> None:
    """Write row `row` as float32 into out[out_row]."""
    for block in range(np.uint64(weights.shape[1] // BLOCK_BYTES)):
        base = block * np.uint64(BLOCK_BYTES)
        d = load_half(weights, row, base)
        dmin = load_half(weights, row, base + np.uint64(2))
        scales = scales_of(weights, row, base + np.uint64(4))
        minima = minima_of(weights, row, base + np.uint64(4))
        for pair in range(np.uint64(4)):
            low_scale, low_minimum = d * byte_of(scales, 2 * pair), dmin * byte_of(minima, 2 * pair)
            high_scale, high_minimum = d * byte_of(scales, 2 * pair + 1), dmin * byte_of(minima, 2 * pair + 1)
            qs = base + np.uint64(16) + pair * np.uint64(32)
            first = block * np.uint64(BLOCK_ELEMENTS) + pair * np.uint64(64)
            for i in range(np.uint64(32)):
                q = np.int32(weights[row, qs + i])
                low, high = np.int32(q & np.int32(15)), np.int32(q >> np.int32(4))
                out[out_row, first + i] = low_scale * np.float32(low) - low_minimum
                out[out_row, first + np.uint64(32) + i] = high_scale * np.float32(high) - high_minimum


@jit_inlined
def _unpack_rows(w: Any, row: Any, step: Any, part: Any) -> Any:
    base, half = (step >> U(1)) * U(144 * ROWS), step & U(1)
    at = base + U(16 * ROWS) + half * U(1024) + (part >> U(1)) * U(512)
    shift = np.int32(4) * np.int32(part & U(1))
    ask_ahead(w, row, base + (half * U(4) + part) * U(18 * ROWS), 5)
    return (
        nibbles_64(w, row, at, shift),
        nibbles_64(w, row, at + U(64), shift),
        nibbles_64(w, row, at + U(128), shift),
        nibbles_64(w, row, at + U(192), shift),
        nibbles_64(w, row, at + U(256), shift),
        nibbles_64(w, row, at + U(320), shift),
        nibbles_64(w, row, at + U(384), shift),
        nibbles_64(w, row, at + U(448), shift),
        *six_bit_factors(w, row, base, half, part),
    )


INTERLEAVED = InterleavedLayout(units=((2, 2, (0,)), (1, 12, (4,)), (4, 32, (16,))), unpack=_unpack_rows, largest=15)


def _codes(blocks: Any) -> Any:
    nibbles = blocks[:, 16:].reshape(-1, 4, 32)
    return np.stack([nibbles & 15, nibbles >> 4], axis=2).reshape(len(blocks), -1)


PLANES = PlaneLayout(
    (4,),
    _codes,
    ((0, 16),),
    r"""
struct Q4_K {
    const uint8_t *low, *heads;
    __device__ Q4_K(const uint8_t* planes, int64_t weights) : low(planes), heads(behind(planes, weights / 2)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const { codes_of_4(low, unit, q); }
    __device__ __forceinline__ float4 scales(int64_t unit) const { return lines_of_six_bits(heads, unit); }
};
""",
    at_once=1,
)

Q4_K = BlockFormat(
    "Q4_K",
    12,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    dequantize_row_q4_k,
    dot_row_q4_k,
    sum_sub_blocks_q4_k,
    planes=PLANES,
    interleaved=INTERLEAVED,
)
