"""Q8_0: 32 signed bytes that share one scale.

ggml's block_q8_0, 34 bytes:

    d      2   scale, binary16
    qs    32   int8; weight[i] = d * qs[i]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.bytes64 import flipped, load_64
from cbtop.compute.jit.compile import jit, jit_inlined, load_half
from cbtop.compute.jit.vectors import (
    load_floats,
    load_halves,
    load_signed_bytes,
    multiply,
    multiply_add,
    prefetch,
    splat,
    to_floats,
    total_of,
)
from cbtop.compute.quantization.base import LARGEST_HALF, BlockFormat, Bytes, Floats, halves_of, nearest, of_halves
from cbtop.compute.quantization.interleaved import ROWS
from cbtop.compute.quantization.interleaved_layout import InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout
from cbtop.compute.quantization.unpacking import U, ask_ahead

BLOCK_ELEMENTS = 32
BLOCK_BYTES = 34
TINY = np.finfo(np.float32).tiny  # smaller scales are not used, because their inverse may be infinite
LARGEST_LEVEL = np.float32(127)
PREFETCH_BYTES = np.uint64(2048)


def _unpack(blocks: Bytes) -> Floats:
    weights: Floats = of_halves(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)
    return weights


def _pack(blocks: Floats) -> Bytes:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / LARGEST_LEVEL
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > TINY)
    out = np.empty((len(blocks), BLOCK_BYTES), np.uint8)
    out[:, :2] = halves_of(scale)
    out[:, 2:] = nearest(blocks * inverse).astype(np.int8).view(np.uint8)
    return out


@jit_inlined
def dot_row_q8_0(weights: Any, row: Any, x: Any, sums: Any) -> Any:
    """Return the product of row `row` of uint8 (rows, row_bytes) and x[0]."""
    total = splat(np.float32(0))
    token, sixteen = np.uint64(0), np.uint64(16)
    for block in range(np.uint64(weights.shape[1] // BLOCK_BYTES)):
        base = block * np.uint64(BLOCK_BYTES)
        prefetch(weights, row, base + PREFETCH_BYTES)
        scale = splat(load_half(weights, row, base))
        base += np.uint64(2)
        first = block * np.uint64(BLOCK_ELEMENTS)
        low = to_floats(load_signed_bytes(weights, row, base))
        high = to_floats(load_signed_bytes(weights, row, base + sixteen))
        products = multiply(low, load_floats(x, token, first))
        products = multiply_add(high, load_floats(x, token, first + sixteen), products)
        total = multiply_add(products, scale, total)
    return total_of(total)


@jit
def dequantize_row_q8_0(weights: Any, row: Any, out: Any, out_row: Any) -> None:
    """Write row `row` as float32 into out[out_row]."""
    for block in range(np.uint64(weights.shape[1] // BLOCK_BYTES)):
        base = block * np.uint64(BLOCK_BYTES)
        scale = load_half(weights, row, base)
        base += np.uint64(2)
        first = block * np.uint64(BLOCK_ELEMENTS)
        for i in range(np.uint64(BLOCK_ELEMENTS)):
            out[out_row, first + i] = scale * np.float32(np.int8(weights[row, base + i]))


@jit_inlined
def _unpack_rows(w: Any, row: Any, step: Any, part: Any) -> Any:
    base, sign = step * U(34 * ROWS), np.int32(128)
    at = base + U(2 * ROWS)
    ask_ahead(w, row, base, 8)
    scale = load_halves(w, row, base)
    return (
        flipped(load_64(w, row, at), sign),
        flipped(load_64(w, row, at + U(64)), sign),
        flipped(load_64(w, row, at + U(128)), sign),
        flipped(load_64(w, row, at + U(192)), sign),
        flipped(load_64(w, row, at + U(256)), sign),
        flipped(load_64(w, row, at + U(320)), sign),
        flipped(load_64(w, row, at + U(384)), sign),
        flipped(load_64(w, row, at + U(448)), sign),
        scale,
        multiply(scale, splat(np.float32(128))),
    )


INTERLEAVED = InterleavedLayout(units=((2, 1, (0,)), (4, 8, (2,))), unpack=_unpack_rows, largest=255)

PLANES = PlaneLayout(
    (8,),
    lambda blocks: blocks[:, 2:],
    ((0, 2),),
    r"""
struct Q8_0 {
    const uint8_t *bytes, *heads;
    __device__ Q8_0(const uint8_t* planes, int64_t weights) : bytes(planes), heads(behind(planes, weights)) {}
    __device__ __forceinline__ void codes(int64_t unit, uint32_t q[8]) const { codes_of_8(bytes, unit, q); }
    __device__ __forceinline__ float4 scales(int64_t unit) const
    {
        float scale = of_half(__ldg((const uint16_t*)heads + unit));
        return make_float4(scale, 0, scale, 0);
    }
};
""",
)

Q8_0 = BlockFormat(
    "Q8_0",
    8,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    dequantize_row_q8_0,
    dot_row_q8_0,
    largest=LARGEST_HALF * float(LARGEST_LEVEL),
    planes=PLANES,
    interleaved=INTERLEAVED,
)
