"""NVFP4: 64 weights of 4 bits that are floating-point numbers, in four sub-blocks with a scale of 8 bits each.

ggml's block_nvfp4, 36 bytes; each sub-block s (16 weights) has 8 bytes of qs:

    d      4   scales, floating-point numbers of 8 bits without a sign (UE4M3)
    qs    32   nibbles; byte j of the sub-block's 8 holds weight j (low) and weight 8+j (high)

    weight[i] = d[i // 16] / 2 * level[q] (see fp4_levels.py)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.byte_scales import of_ue4m3
from cbtop.compute.jit.compile import jit, jit_inlined, load_word
from cbtop.compute.jit.vectors import bytes_of, load_bytes, multiply, splat
from cbtop.compute.quantization.base import BlockFormat, Bytes, Flags, Floats
from cbtop.compute.quantization.fp4_levels import LARGEST, LEVELS, fit_fp4, fp4, fp4_64
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import Factors, InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.rows import row_functions
from cbtop.compute.quantization.unpacking import U, ask_ahead

BLOCK_ELEMENTS = 64
BLOCK_BYTES = 36
SUB_BLOCK_ELEMENTS = 16
QS_OFFSET = 4
NAN = 0x7F  # ggml reads this code as 0
_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)


def _scales() -> Floats:
    """Return half of the number that each byte represents. The highest bit is ignored."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    numbers = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(1 + mantissa / 8, exponent - 7))
    numbers[NAN] = 0
    halves: Floats = (numbers / 2).astype(np.float32)
    return halves


_SCALES = _scales()


def _codes(blocks: Any) -> Any:
    qs = blocks[:, QS_OFFSET:].reshape(-1, 4, 8)
    return np.concatenate([qs & 15, qs >> 4], axis=2).reshape(len(blocks), -1)


def _unpack(blocks: Bytes) -> Floats:
    levels = LEVELS[0][_codes(blocks)].reshape(-1, 4, SUB_BLOCK_ELEMENTS)
    weights: Floats = _SCALES[blocks[:, :QS_OFFSET, None]] * levels
    return weights.reshape(len(blocks), -1)


def _pack(weights: Floats) -> Bytes:
    blocks = weights.reshape(-1, SUB_BLOCK_ELEMENTS)
    # The candidates map the largest magnitude to a level from about 4 to 7 of E2M1, in which 6 is the highest.
    first = np.searchsorted(_SCALES[:NAN], np.abs(blocks).max(axis=1) / np.float32(LARGEST)) - 2
    numbers, codes = fit_fp4(blocks, _SCALES[:NAN], first, 8)
    return np.concatenate([
        numbers.reshape(-1, 4), (codes[:, :8] | (codes[:, 8:] << 4)).reshape(-1, 32)
    ], axis=1)  # fmt: skip


def _suspects(blocks: Bytes) -> Flags:
    return np.zeros(len(blocks), np.bool_)  # every byte is a finite scale


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    at = base + np.uint64(QS_OFFSET) + part * np.uint64(8)
    low, high = load_word(weights, row, at), load_word(weights, row, at + np.uint64(4))
    word = np.uint64(np.uint64(low) | np.uint64(np.uint64(high) << np.uint64(32)))
    q = bytes_of(np.uint64(word & _NIBBLES), np.uint64(np.uint64(word >> np.uint64(4)) & _NIBBLES))
    return multiply(fp4(q), splat(_SCALES[weights[row, base + part]]))


@jit_inlined
def _unpack_rows(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(36 * ROWS)
    at, low, high = base + U(4 * ROWS) + part * U(256), np.int32(0), np.int32(4)
    ask_ahead(w, row, at, 5)
    first = of_ue4m3(load_bytes(w, row, base + part * U(2 * ROWS)))
    last = of_ue4m3(load_bytes(w, row, base + part * U(2 * ROWS) + U(ROWS)))
    largest = splat(np.float32(LARGEST))
    return (
        fp4_64(w, row, at, low),
        fp4_64(w, row, at + U(64), low),
        fp4_64(w, row, at, high),
        fp4_64(w, row, at + U(64), high),
        fp4_64(w, row, at + U(128), low),
        fp4_64(w, row, at + U(192), low),
        fp4_64(w, row, at + U(128), high),
        fp4_64(w, row, at + U(192), high),
        first,
        last,
        multiply(first, largest),
        multiply(last, largest),
    )


INTERLEAVED = InterleavedLayout(
    units=((1, 4, (0,)), (4, 8, (QS_OFFSET,))), unpack=_unpack_rows, largest=2 * LARGEST, factors=Factors.OF_16
)

PLANES = PlaneLayout(
    (4,),
    _codes,
    ((0, QS_OFFSET),),
    r"""
struct NVFP4 {
    const uint8_t *low, *heads;
    __device__ NVFP4(const uint8_t* planes, int64_t weights) : low(planes), heads(behind(planes, weights / 2)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const { fp4_levels_of_4(low, unit, q); }
    // A half has a larger exponent, with a bias of 15 instead of 7. 0x7f is read as 0.
    static __device__ __forceinline__ float half_of_e4m3(uint32_t code)
    {
        code &= 0xff;
        return code == 0x7f ? 0.0f : 128 * of_half((code & 0x7f) << 7);
    }
    __device__ __forceinline__ float4 scales(int64_t unit) const
    {
        uint32_t two = __ldg((const uint16_t*)heads + unit);
        float first = half_of_e4m3(two), last = half_of_e4m3(two >> 8);
        return make_float4(first, -12 * first, last, -12 * last);
    }
};
""",
)

NVFP4 = BlockFormat(
    "NVFP4",
    40,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("nvfp4", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
    largest=LARGEST * float(_SCALES[NAN - 1]),
    suspects=_suspects,
    planes=PLANES,
    interleaved=INTERLEAVED,
)
