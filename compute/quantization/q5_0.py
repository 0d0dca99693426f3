"""Q5_0: 32 weights of 5 bits that share one scale.

ggml's block_q5_0, 22 bytes:

    d      2   scale, binary16
    qh     4   the highest bits; bit i, of a little-endian word, is that of weight i
    qs    16   the low nibbles; byte i holds weight i (low) and weight 16+i (high)

    weight[i] = d * (q - 16)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit, load_half
from cbtop.compute.jit.vectors import multiply_add, splat, to_floats
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, halves_of, of_halves
from cbtop.compute.quantization.fitting import fit_scales, levels_of
from cbtop.compute.quantization.five_bits import five_bits, pack_five_bits, unpack_five_bits
from cbtop.compute.quantization.rows import row_functions

BLOCK_ELEMENTS = 32
BLOCK_BYTES = 22


def _unpack(blocks: Bytes) -> Floats:
    q = unpack_five_bits(blocks[:, 2:]).astype(np.float32)
    weights: Floats = of_halves(blocks[:, :2]) * (q - np.float32(16))
    return weights


def _pack(blocks: Floats) -> Bytes:
    d = halves_of(fit_scales(blocks, -16, 15)[:, None])
    return np.concatenate([d, pack_five_bits(levels_of(blocks, of_halves(d), None, -16, 15))], axis=1)


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    d = load_half(weights, row, base)
    q = five_bits(weights, row, base + np.uint64(2), part)
    return multiply_add(to_floats(q), splat(d), splat(np.float32(-16) * d))


Q5_0 = BlockFormat(
    "Q5_0",
    6,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("q5_0", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
)
