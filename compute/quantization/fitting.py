"""Find scales and offsets so that rounding the weights gives a small squared error.

A block of weights x is stored as levels q, which are whole numbers in a range. x is about scale * q + offset, or
scale * q in formats without offsets.

For given levels, least squares give the best scale and offset. For a given scale and offset, the best levels are the
nearest ones. The search tries several scales near the one that just covers the block, and keeps the fit with the
smallest error. Then it rounds and fits again a few times. (This is Lloyd's algorithm with evenly spaced levels.)
"""

# Sums in this file cannot overflow, because all inputs are finite and at most 65504 (LARGEST_HALF) in magnitude.

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit
from cbtop.compute.quantization.base import LARGEST_HALF, Bytes, Floats, halves_of, nearest, of_halves

CANDIDATES = 21  # number of scales that are tried for a block; trying more reduces the error by less than 0.1 %
REFINEMENTS = 4
# If all weights of a block are smaller than this, the block becomes zeros. This bound is far below the smallest
# binary16.
SMALLEST = np.float32(2.0**-40)
HALF = np.float32(0.5)


@jit
def _level(value: Any, lowest: Any, highest: Any) -> Any:
    """Round `value` to a level from `lowest` to `highest`."""
    return min(max(np.floor(value + HALF), lowest), highest)


@jit
def _fit_scale(blocks: Any, block: Any, inverse: Any, lowest: Any, highest: Any) -> tuple[Any, Any]:
    """Round blocks[block] * inverse to levels, and fit a scale to the levels.

    Returns how much the fit reduces the block's sum of squares, and the fitted scale.
    """
    xq, qq = np.float32(0), np.float32(0)
    for i in range(np.uint64(blocks.shape[1])):
        x = blocks[block, i]
        q = _level(x * inverse, lowest, highest)
        xq += x * q
        qq += q * q
    scale = xq / qq if qq > np.float32(0) else np.float32(0)
    return scale * xq, scale


@jit
def _fit_scales(blocks: Any, lowest: Any, highest: Any, scales: Any) -> None:
    for block in range(np.uint64(blocks.shape[0])):
        low, high = blocks[block, 0], blocks[block, 0]
        for i in range(np.uint64(blocks.shape[1])):
            low, high = min(low, blocks[block, i]), max(high, blocks[block, i])
        extreme = high if high > -low else low
        best, scale = np.float32(0), np.float32(0)
        if abs(extreme) > SMALLEST:
            for candidate in range(CANDIDATES):
                # The lowest level is one step farther from zero than the highest. So the largest magnitude is mapped
                # to the lowest level, with a negative scale if its weight is positive. Other candidates map this
                # weight to up to one level above or below the lowest.
                share = np.float32(2 * candidate) / np.float32(CANDIDATES - 1) - np.float32(1)
                explained, fitted = _fit_scale(blocks, block, (lowest + share) / extreme, lowest, highest)
                if explained > best:
                    best, scale = explained, fitted
            for _ in range(REFINEMENTS):
                explained, fitted = _fit_scale(blocks, block, np.float32(1) / scale, lowest, highest)
                if explained <= best:
                    break
                best, scale = explained, fitted
        scales[block] = scale


def fit_scales(blocks: Floats, lowest: int, highest: int) -> Floats:
    """Return a scale for each block of float32 (blocks, size). The lowest level is below zero."""
    scales = np.empty(len(blocks), np.float32)
    _fit_scales(blocks, np.float32(lowest), np.float32(highest), scales)
    return scales


@jit
def _fit_line(
    blocks: Any, block: Any, base: Any, inverse: Any, shift: Any, highest: Any, most: Any
) -> tuple[Any, Any, Any]:
    """Round (y - shift) * inverse to levels, where y = blocks[block] - base, and fit a scale and an offset.

    Returns three numbers: how much the fit reduces the sum of the squares of y, the scale, and the offset (at most
    `most`).
    """
    count = np.float32(blocks.shape[1])
    y_sum, q_sum, yq, qq = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for i in range(np.uint64(blocks.shape[1])):
        y = blocks[block, i] - base
        q = _level((y - shift) * inverse, np.float32(0), highest)
        y_sum += y
        q_sum += q
        yq += y * q
        qq += q * q
    spread = count * qq - q_sum * q_sum
    if spread <= np.float32(0):  # all weights of the block have the same level, so no line can be fitted
        return np.float32(0), np.float32(0), np.float32(0)
    scale = (count * yq - y_sum * q_sum) / spread
    offset = (y_sum - scale * q_sum) / count
    if offset > most:
        offset = most
        scale = (yq - offset * q_sum) / qq
    explained = (
        np.float32(2) * (scale * yq + offset * y_sum)
        - scale * scale * qq
        - np.float32(2) * scale * offset * q_sum
        - count * offset * offset
    )
    return explained, scale, offset


@jit
def _fit_lines(blocks: Any, highest: Any, is_minimum: Any, scales: Any, offsets: Any) -> None:
    for block in range(np.uint64(blocks.shape[0])):
        low, high = blocks[block, 0], blocks[block, 0]
        for i in range(np.uint64(blocks.shape[1])):
            low, high = min(low, blocks[block, i]), max(high, blocks[block, i])
        base = min(low, np.float32(0)) if is_minimum else low
        most = -base if is_minimum else np.float32(2 * LARGEST_HALF)
        span = high - base
        best, scale, offset = np.float32(0), np.float32(0), np.float32(0)
        if span > SMALLEST:
            for candidate in range(CANDIDATES):
                share = np.float32(2 * candidate) / np.float32(CANDIDATES - 1) - np.float32(1)
                inverse = (highest + share) / span
                explained, fitted, moved = _fit_line(blocks, block, base, inverse, np.float32(0), highest, most)
                if explained > best:
                    best, scale, offset = explained, fitted, moved
            for _ in range(REFINEMENTS):
                if scale <= np.float32(0):
                    break
                inverse = np.float32(1) / scale
                explained, fitted, moved = _fit_line(blocks, block, base, inverse, offset, highest, most)
                if explained <= best:
                    break
                best, scale, offset = explained, fitted, moved
        scales[block], offsets[block] = scale, base + offset


def fit_lines(blocks: Floats, highest: int, is_minimum: bool) -> tuple[Floats, Floats]:
    """Return a scale and an offset for each block of float32 (blocks, size). Levels are 0 to `highest`.

    Scales are at least 0. With `is_minimum`, offsets are at most 0, as in the formats of 256 weights.
    """
    scales, offsets = np.empty(len(blocks), np.float32), np.empty(len(blocks), np.float32)
    _fit_lines(blocks, np.float32(highest), is_minimum, scales, offsets)
    return scales, offsets


@jit
def _levels(blocks: Any, scales: Any, offsets: Any, lowest: Any, highest: Any, out: Any) -> None:
    for block in range(np.uint64(blocks.shape[0])):
        scale, offset = scales[block], offsets[block]
        inverse = np.float32(1) / scale if abs(scale) > SMALLEST else np.float32(0)
        for i in range(np.uint64(blocks.shape[1])):
            level = _level((blocks[block, i] - offset) * inverse, lowest, highest)
            out[block, i] = np.uint8(np.int32(level - lowest))


def levels_of(blocks: Floats, scales: Floats, offsets: Floats | None, lowest: int, highest: int) -> Bytes:
    """Return the nearest level of each weight, minus `lowest`, as uint8 (blocks, size).

    Each block has a scale and an offset. `offsets` may be None if all are zero. If a scale is zero, the block's
    levels are zero.
    """
    out = np.empty(blocks.shape, np.uint8)
    if offsets is None:
        offsets = np.zeros(len(blocks), np.float32)
    _levels(blocks, scales.reshape(-1), offsets.reshape(-1), np.float32(lowest), np.float32(highest), out)
    return out


def in_units(values: Floats, lowest: int, highest: int) -> tuple[Bytes, Floats]:
    """Return the scales of sub-blocks, float32 (blocks, sub-blocks), as multiples of one unit per block.

    The result has the units as binary16, uint8 (blocks, 2), and the multiples, which are whole numbers from `lowest`
    to `highest` in float32. The largest magnitude becomes `lowest` or `highest`, whichever is farther from zero. So a
    unit may be negative.
    """
    farthest = np.float32(lowest if -lowest > highest else highest)
    extreme = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
    half = halves_of(extreme / farthest)
    unit = of_halves(half)
    inverse = np.divide(np.float32(1), unit, out=np.zeros_like(unit), where=unit != 0)
    return half, np.clip(nearest(values * inverse), lowest, highest)
