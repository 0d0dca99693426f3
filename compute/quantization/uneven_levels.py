"""The sixteen levels of IQ4_NL and IQ4_XS, and the search for scales. The levels are denser around zero.

The levels are ggml's `kvalues_iq4nl`. Byte i of 16 holds weight i (low nibble) and weight 16 + i (high nibble).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.vectors import load_floats, look_up
from cbtop.compute.quantization.base import Bytes, Floats
from cbtop.compute.quantization.fitting import CANDIDATES, REFINEMENTS, SMALLEST
from cbtop.compute.quantization.rows import nibbles

LEVELS = np.array([[-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]], np.float32)
# The middle between each of the sixteen levels and the next.
_BORDERS = (LEVELS[0, 1:] + LEVELS[0, :-1]) / np.float32(2)
_STEPS = LEVELS[0, 1:] - LEVELS[0, :-1]
_FARTHEST = LEVELS[0, 0]
# The search moves the lowest level up or down by at most this distance. The second lowest level is 23 above the
# lowest.
_AROUND = np.float32(24)


def unpack_uneven(data: Bytes) -> Floats:
    """Return the levels in uint8 (blocks, 16) as float32 (blocks, 32)."""
    levels: Floats = LEVELS[0][np.concatenate([data & 15, data >> 4], axis=1)]
    return levels


def pack_uneven(blocks: Floats, scales: Floats) -> Bytes:
    """Return float32 (blocks, 32) as uint8 (blocks, 16).

    Each weight becomes the nearest level at the scale of its block.
    """
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=np.abs(scales) > SMALLEST)
    places = np.searchsorted(_BORDERS, blocks * inverse.reshape(-1, 1)).astype(np.uint8)
    data: Bytes = places[:, :16] | (places[:, 16:] << np.uint8(4))
    return data


@jit
def _fit_scale(blocks: Any, block: Any, inverse: Any) -> tuple[Any, Any]:
    """Round blocks[block] * inverse to levels, and fit a scale to the levels.

    Returns how much the fit reduces the block's sum of squares, and the scale.
    """
    xq, qq = np.float32(0), np.float32(0)
    for i in range(np.uint64(blocks.shape[1])):
        x = blocks[block, i]
        level = _FARTHEST
        for border in range(15):
            level += _STEPS[border] if x * inverse > _BORDERS[border] else np.float32(0)
        xq += x * level
        qq += level * level
    scale = xq / qq
    return scale * xq, scale


@jit
def _fit_scales(blocks: Any, scales: Any) -> None:
    for block in range(np.uint64(blocks.shape[0])):
        low, high = blocks[block, 0], blocks[block, 0]
        for i in range(np.uint64(blocks.shape[1])):
            low, high = min(low, blocks[block, i]), max(high, blocks[block, i])
        extreme = high if high > -low else low
        best, scale = np.float32(0), np.float32(0)
        if abs(extreme) > SMALLEST:
            for candidate in range(CANDIDATES):
                share = np.float32(2 * candidate) / np.float32(CANDIDATES - 1) - np.float32(1)
                explained, fitted = _fit_scale(blocks, block, (_FARTHEST + share * _AROUND) / extreme)
                if explained > best:
                    best, scale = explained, fitted
            for _ in range(REFINEMENTS):
                explained, fitted = _fit_scale(blocks, block, np.float32(1) / scale)
                if explained <= best:
                    break
                best, scale = explained, fitted
        scales[block] = scale


def fit_uneven(blocks: Floats) -> Floats:
    """Return a scale for each block of float32 (blocks, 32), by the search of fitting.py."""
    scales = np.empty(len(blocks), np.float32)
    _fit_scales(blocks, scales)
    return scales


@jit
def uneven(weights: Any, row: Any, offset: Any, high: Any) -> Any:
    """Return the levels that `nibbles` selects, as Floats16."""
    return look_up(load_floats(LEVELS, np.uint64(0), np.uint64(0)), nibbles(weights, row, offset, high))
