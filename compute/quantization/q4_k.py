"""Q4_K: 256 weights of 4 bits in eight sub-blocks, each with a 6-bit scale and a 6-bit minimum.

ggml's block_q4_K, 144 bytes:

    d         2   scale of the scales, binary16
    dmin      2   scale of the minima, binary16
    scales   12   eight scales and eight minima of 6 bits: bytes 0-3 hold scales 0-3 in their low 6 bits,
                  bytes 4-7 minima 0-3, bytes 8-11 the low 4 bits of scales 4-7 (low nibble) and minima 4-7
                  (high nibble); the top 2 bits of bytes 0-3 and 4-7 are those of scales and minima 4-7
    qs      128   nibbles; byte 32j+i holds weight 64j+i (low) and weight 64j+32+i (high)

    weight[32s+i] = d * scale[s] * q - dmin * minimum[s]
"""

# What makes the product quick: the eight scales are unpacked in 32-bit words and taken out of the inner loop,
# which handles all eight sub-blocks side by side and leaves one horizontal sum for 256 weights. The minima
# meet only the sum of x over a sub-block, which is the same for all rows: `sums`, computed once.

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.kernels.jit import jit, load_half, load_word
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, nearest

BLOCK_ELEMENTS = 256
BLOCK_BYTES = 144
SUB_BLOCK_ELEMENTS = 32
LARGEST_6_BIT = np.float32(63)
LARGEST_4_BIT = np.float32(15)


def _dequantize(data: Bytes) -> Floats:
    blocks = np.ascontiguousarray(data).reshape(-1, BLOCK_BYTES)
    d = blocks[:, 0:2].copy().view("<f2").astype(np.float32)  # (blocks, 1)
    dmin = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1).astype(np.float32)  # (blocks, 8)
    minimum = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1).astype(np.float32)
    packed = blocks[:, 16:].reshape(-1, 4, 1, 32)
    q = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32).astype(np.float32)
    weights: Floats = (d * scale)[:, :, None] * q - (dmin * minimum)[:, :, None]
    return weights.reshape(data.shape[0], -1)


def _quantize(weights: Floats) -> Bytes:
    blocks = weights.reshape(-1, 8, SUB_BLOCK_ELEMENTS)
    lowest = np.minimum(blocks.min(axis=2), 0)  # (blocks, 8): the format has no positive minimum
    span = np.maximum(blocks.max(axis=2) - lowest, 0)
    d = (span.max(axis=1, keepdims=True) / (LARGEST_4_BIT * LARGEST_6_BIT)).astype("<f2")
    dmin = (-lowest.min(axis=1, keepdims=True) / LARGEST_6_BIT).astype("<f2")
    scale = _steps(span / LARGEST_4_BIT, d.astype(np.float32))
    minimum = _steps(-lowest, dmin.astype(np.float32))
    step = d.astype(np.float32) * scale
    offset = dmin.astype(np.float32) * minimum
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    scaled = (blocks + offset[:, :, None]) * inverse[:, :, None]
    q = np.clip(np.floor(scaled + np.float32(0.5)), 0, LARGEST_4_BIT).astype(np.uint8)

    out = np.empty((len(blocks), BLOCK_BYTES), np.uint8)
    out[:, 0:2], out[:, 2:4] = d.view(np.uint8), dmin.view(np.uint8)
    out[:, 4:8] = scale[:, :4] | ((scale[:, 4:] >> 4) << 6)
    out[:, 8:12] = minimum[:, :4] | ((minimum[:, 4:] >> 4) << 6)
    out[:, 12:16] = (scale[:, 4:] & 15) | ((minimum[:, 4:] & 15) << 4)
    out[:, 16:] = (q[:, 0::2] | (q[:, 1::2] << 4)).reshape(-1, 128)
    return out.reshape(weights.shape[0], -1)


def _steps(values: Floats, unit: Floats) -> Bytes:
    """`values` (blocks, 8) in whole units (blocks, 1), 0 to 63."""
    inverse = np.divide(np.float32(1), unit, out=np.zeros_like(unit), where=unit > 0)
    steps: Bytes = np.clip(nearest(values * inverse), 0, LARGEST_6_BIT).astype(np.uint8)
    return steps


@jit
def sum_sub_blocks(x: Any, token: Any, sums: Any) -> None:
    """sums[0, s] = the sum of x[token, 32s : 32s+32], for the minima of `dot_row_q4_k`."""
    for s in range(np.uint64(x.shape[1] // SUB_BLOCK_ELEMENTS)):
        total = np.float32(0)
        for i in range(np.uint64(SUB_BLOCK_ELEMENTS)):
            total += x[token, s * np.uint64(SUB_BLOCK_ELEMENTS) + i]
        sums[0, s] = total


@jit
def _scales(weights: Any, row: Any, base: Any) -> Any:
    """The eight 6-bit scales of a block, a byte each in one uint64."""
    a = load_word(weights, row, base + np.uint64(4))
    c = load_word(weights, row, base + np.uint64(12))
    high = np.uint32(
        np.uint32(c & np.uint32(0x0F0F0F0F)) | np.uint32(np.uint32(a >> np.uint32(2)) & np.uint32(0x30303030))
    )
    return np.uint64(np.uint32(a & np.uint32(0x3F3F3F3F))) | (np.uint64(high) << np.uint64(32))


@jit
def _minima(weights: Any, row: Any, base: Any) -> Any:
    """The eight 6-bit minima of a block, a byte each in one uint64."""
    b = load_word(weights, row, base + np.uint64(8))
    c = load_word(weights, row, base + np.uint64(12))
    high = np.uint32(
        np.uint32(np.uint32(c >> np.uint32(4)) & np.uint32(0x0F0F0F0F))
        | np.uint32(np.uint32(b >> np.uint32(2)) & np.uint32(0x30303030))
    )
    return np.uint64(np.uint32(b & np.uint32(0x3F3F3F3F))) | (np.uint64(high) << np.uint64(32))


@jit
def _byte(word: Any, index: Any) -> Any:
    """Byte `index` of a uint64 as float32."""
    return np.float32(np.int32((word >> np.uint64(8 * index)) & np.uint64(0xFF)))


@jit
def dot_row_q4_k(weights: Any, row: Any, x: Any, token: Any, sums: Any) -> Any:
    """Row `row` of uint8 (rows, row_bytes) times x[token]; `sums` as `sum_sub_blocks` leaves them."""
    total = np.float32(0)
    total_minima = np.float32(0)
    for block in range(np.uint64(weights.shape[1] // BLOCK_BYTES)):
        base = block * np.uint64(BLOCK_BYTES)
        d = load_half(weights, row, base)
        dmin = load_half(weights, row, base + np.uint64(2))
        scales = _scales(weights, row, base)
        minima = _minima(weights, row, base)
        s0, s1, s2, s3 = (
            d * _byte(scales, 0),
            d * _byte(scales, 1),
            d * _byte(scales, 2),
            d * _byte(scales, 3),
        )
        s4, s5, s6, s7 = (
            d * _byte(scales, 4),
            d * _byte(scales, 5),
            d * _byte(scales, 6),
            d * _byte(scales, 7),
        )
        block_minima = np.float32(0)
        for s in range(8):
            block_minima += _byte(minima, s) * sums[0, block * np.uint64(8) + np.uint64(s)]
        total_minima += dmin * block_minima

        qs = base + np.uint64(16)
        first = block * np.uint64(BLOCK_ELEMENTS)
        for i in range(np.uint64(32)):
            q0 = np.int32(weights[row, qs + i])
            q1 = np.int32(weights[row, qs + np.uint64(32) + i])
            q2 = np.int32(weights[row, qs + np.uint64(64) + i])
            q3 = np.int32(weights[row, qs + np.uint64(96) + i])
            total += (
                s0 * np.float32(np.int32(q0 & np.int32(15))) * x[token, first + i]
                + s1 * np.float32(np.int32(q0 >> np.int32(4))) * x[token, first + np.uint64(32) + i]
                + s2 * np.float32(np.int32(q1 & np.int32(15))) * x[token, first + np.uint64(64) + i]
                + s3 * np.float32(np.int32(q1 >> np.int32(4))) * x[token, first + np.uint64(96) + i]
                + s4 * np.float32(np.int32(q2 & np.int32(15))) * x[token, first + np.uint64(128) + i]
                + s5 * np.float32(np.int32(q2 >> np.int32(4))) * x[token, first + np.uint64(160) + i]
                + s6 * np.float32(np.int32(q3 & np.int32(15))) * x[token, first + np.uint64(192) + i]
                + s7 * np.float32(np.int32(q3 >> np.int32(4))) * x[token, first + np.uint64(224) + i]
            )
    return total - total_minima


@jit
def dequantize_row_q4_k(weights: Any, row: Any, out: Any, out_row: Any) -> None:
    """Row `row` as float32 into out[out_row]."""
    for block in range(np.uint64(weights.shape[1] // BLOCK_BYTES)):
        base = block * np.uint64(BLOCK_BYTES)
        d = load_half(weights, row, base)
        dmin = load_half(weights, row, base + np.uint64(2))
        scales = _scales(weights, row, base)
        minima = _minima(weights, row, base)
        for pair in range(np.uint64(4)):
            low_scale, low_minimum = d * _byte(scales, 2 * pair), dmin * _byte(minima, 2 * pair)
            high_scale, high_minimum = d * _byte(scales, 2 * pair + 1), dmin * _byte(minima, 2 * pair + 1)
            qs = base + np.uint64(16) + pair * np.uint64(32)
            first = block * np.uint64(BLOCK_ELEMENTS) + pair * np.uint64(64)
            for i in range(np.uint64(32)):
                q = np.int32(weights[row, qs + i])
                low, high = np.int32(q & np.int32(15)), np.int32(q >> np.int32(4))
                out[out_row, first + i] = low_scale * np.float32(low) - low_minimum
                out[out_row, first + np.uint64(32) + i] = high_scale * np.float32(high) - high_minimum


Q4_K = BlockFormat("Q4_K", 12, BLOCK_ELEMENTS, BLOCK_BYTES, _dequantize, _quantize)
