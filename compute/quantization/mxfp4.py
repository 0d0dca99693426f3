"""MXFP4: 32 weights of 4 bits that are floating-point numbers and share one power of two.

ggml's block_mxfp4, 17 bytes:

    e      1   exponent of the scale (E8M0)
    qs    16   nibbles; byte i holds weight i (low) and weight 16+i (high)

    weight[i] = 2 ** (e - 128) * level[q] (see fp4_levels.py)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.byte_scales import of_e8m0
from cbtop.compute.jit.compile import jit, jit_inlined
from cbtop.compute.jit.vectors import load_bytes, multiply, splat
from cbtop.compute.quantization.base import BlockFormat, Bytes, Flags, Floats
from cbtop.compute.quantization.fp4_levels import LARGEST, LEVELS, fit_fp4, fp4, fp4_64
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.rows import nibbles, row_functions
from cbtop.compute.quantization.unpacking import U, ask_ahead

BLOCK_ELEMENTS = 32
BLOCK_BYTES = 17
_SCALES = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)
_FIRST_TOO_LARGE = 253  # 2 ** (253 - 128) * 12 is beyond float32


def _unpack(blocks: Bytes) -> Floats:
    q = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)  # (blocks, 32)
    weights: Floats = _SCALES[blocks[:, :1]] * LEVELS[0][q]
    return weights


def _pack(blocks: Floats) -> Bytes:
    # The largest magnitude is at least 4 and less than 8 times the second of three candidates, in levels of E2M1.
    _, exponents = np.frexp(np.abs(blocks).max(axis=1))
    numbers, codes = fit_fp4(blocks, _SCALES, exponents.astype(np.int64) + 123, 3)
    return np.concatenate([numbers, codes[:, :16] | (codes[:, 16:] << 4)], axis=1)


def _suspects(blocks: Bytes) -> Flags:
    return blocks[:, 0] >= _FIRST_TOO_LARGE


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    return multiply(fp4(nibbles(weights, row, base + np.uint64(1), part)), splat(_SCALES[weights[row, base]]))


@jit_inlined
def _unpack_rows(w: Any, row: Any, step: Any, part: Any) -> Any:
    base = step * U(17 * ROWS)
    ask_ahead(w, row, base, 5)
    at, scale, low, high = base + U(ROWS), of_e8m0(load_bytes(w, row, base)), np.int32(0), np.int32(4)
    return (
        fp4_64(w, row, at, low),
        fp4_64(w, row, at + U(64), low),
        fp4_64(w, row, at + U(128), low),
        fp4_64(w, row, at + U(192), low),
        fp4_64(w, row, at, high),
        fp4_64(w, row, at + U(64), high),
        fp4_64(w, row, at + U(128), high),
        fp4_64(w, row, at + U(192), high),
        scale,
        multiply(scale, splat(np.float32(LARGEST))),
    )


INTERLEAVED = InterleavedLayout(units=((1, 1, (0,)), (4, 4, (1,))), unpack=_unpack_rows, largest=2 * LARGEST)

PLANES = PlaneLayout(
    (4,),
    lambda blocks: np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1),
    ((0, 1),),
    r"""
struct MXFP4 {
    const uint8_t *low, *heads;
    __device__ MXFP4(const uint8_t* planes, int64_t weights) : low(planes), heads(behind(planes, weights / 2)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const { fp4_levels_of_4(low, unit, q); }
    __device__ __forceinline__ float4 scales(int64_t unit) const
    {
        // Powers of less than -126 are subnormal, so this is the product of two powers of half the size.
        uint32_t e = __ldg(heads + unit), half = e / 2;
        float scale = __uint_as_float((half + 63) << 23) * __uint_as_float((e - half + 63) << 23);
        return make_float4(scale, -12 * scale, scale, -12 * scale);
    }
};
""",
)

MXFP4 = BlockFormat(
    "MXFP4",
    39,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("mxfp4", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
    suspects=_suspects,
    planes=PLANES,
    interleaved=INTERLEAVED,
)
