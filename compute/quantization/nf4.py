"""NF4 of bitsandbytes: 64 weights of 4 bits that select levels of a normal distribution and share one scale.

Not a type of ggml. A block has 36 bytes, in an order of our own:

    absmax   4   scale, float32: the largest magnitude of the block
    qs      32   two halves of 16 bytes; byte i of half h holds weight 32 h + i (low) and 32 h + 16 + i (high)

    weight[i] = absmax * level[q]

The levels are from QLoRA (Dettmers et al. 2023, appendix E). They are not whole numbers, so NF4 has no products
in int8, and no planes for GPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.vectors import load_floats, look_up, multiply, splat
from cbtop.compute.quantization.base import BlockFormat, Bytes, Flags, Floats
from cbtop.compute.quantization.rows import nibbles, row_functions

BLOCK_ELEMENTS = 64
BLOCK_BYTES = 36
CODE = 1004  # ggml's numbers are below 256
LEVELS = np.array(
    [[
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]],
    np.float32,
)  # fmt: skip
_MIDDLES = (LEVELS[0, 1:] + LEVELS[0, :-1]) / 2


def blocks_of(absmax: Floats, codes: Bytes) -> Bytes:
    """Return blocks, uint8 (blocks, 36), of float32 (blocks,) and codes, uint8 (blocks, 64)."""
    halves = codes.reshape(-1, 2, 2, 16)  # (blocks, half, low or high, byte)
    packed = halves[:, :, 0] | halves[:, :, 1] << 4
    return np.concatenate([absmax.astype("<f4")[:, None].view(np.uint8), packed.reshape(-1, 32)], axis=1)


def _unpack(blocks: Bytes) -> Floats:
    packed = blocks[:, 4:].reshape(-1, 2, 1, 16)
    codes = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, BLOCK_ELEMENTS)
    weights: Floats = blocks[:, :4].copy().view("<f4") * LEVELS[0][codes]
    return weights


def _pack(blocks: Floats) -> Bytes:
    absmax = np.abs(blocks).max(axis=1)
    shares = np.divide(blocks, absmax[:, None], out=np.zeros_like(blocks), where=absmax[:, None] > 0)
    return blocks_of(absmax, np.searchsorted(_MIDDLES, shares).astype(np.uint8))


def _suspects(blocks: Bytes) -> Flags:
    suspects: Flags = ~np.isfinite(blocks[:, :4].copy().view("<f4"))[:, 0]
    return suspects


@jit
def _scale(weights: Any, row: Any, base: Any) -> Any:
    return weights[row, base : base + np.uint64(4)].view(np.float32)[0]


@jit
def _sixteen(weights: Any, row: Any, base: Any, part: Any) -> Any:
    one = np.uint64(1)
    at = base + np.uint64(4) + (part >> one) * np.uint64(16)
    levels = look_up(load_floats(LEVELS, np.uint64(0), np.uint64(0)), nibbles(weights, row, at, part & one))
    return multiply(levels, splat(_scale(weights, row, base)))


NF4 = BlockFormat(
    "NF4",
    CODE,
    BLOCK_ELEMENTS,
    BLOCK_BYTES,
    _unpack,
    _pack,
    *row_functions("nf4", BLOCK_ELEMENTS, BLOCK_BYTES, _sixteen),
    suspects=_suspects,
    has_budget=False,
)
