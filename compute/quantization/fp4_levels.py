"""The sixteen levels of MXFP4 and NVFP4, and the search for scales. A level is a floating-point number of 4 bits.

The levels are ggml's `kvalues_mxfp4`: numbers in E2M1 (OCP Microscaling Formats, version 1.0) times 2, so that they
are whole. Scales are halved in return, and have one byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.jit.bytes64 import load_64, picked
from cbtop.compute.jit.compile import jit, jit_inlined
from cbtop.compute.jit.vectors import load_floats, look_up
from cbtop.compute.quantization.base import Bytes, Floats
from cbtop.compute.quantization.unpacking import U, nibbles_64

_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
LEVELS = np.array([[*_MAGNITUDES, *(-level for level in _MAGNITUDES)]], np.float32)
LARGEST = 12
# The middle between each magnitude and the next.
_BORDERS = (LEVELS[0, 1:8] + LEVELS[0, :7]) / np.float32(2)
# The levels plus 12, repeated for each sixteen bytes of a vector.
_ABOVE_ZERO = np.tile((LEVELS + LARGEST).astype(np.uint8), 4)


def _nearest_codes(values: Floats) -> Bytes:
    """Return the code of the level nearest to each value."""
    codes = np.searchsorted(_BORDERS, np.abs(values)).astype(np.uint8)
    return codes | np.where((values < 0) & (codes > 0), np.uint8(8), np.uint8(0))


def fit_fp4(blocks: Floats, scales: Floats, first: NDArray[np.int64], count: int) -> tuple[Bytes, Bytes]:
    """Find a scale for each block of float32 (blocks, size), and the codes of its weights.

    `scales` ascend. Of `count` scales from number `first` (blocks,) on, the search keeps the one with the smallest
    squared error. Returns the numbers of the scales, uint8 (blocks, 1), and the codes, uint8 (blocks, size).
    """
    best, codes = np.full(len(blocks), np.inf, np.float32), np.zeros(blocks.shape, np.uint8)
    numbers = np.zeros((len(blocks), 1), np.uint8)
    for candidate in range(count):
        number = np.clip(first + candidate, 0, len(scales) - 1)
        scale = scales[number, None]
        values = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)
        found = _nearest_codes(values)
        error = np.square(scale * LEVELS[0][found] - blocks).sum(axis=1)
        is_better = error < best
        best[is_better], codes[is_better] = error[is_better], found[is_better]
        numbers[is_better, 0] = number[is_better]
    return numbers, codes


@jit
def fp4(places: Any) -> Any:
    """Return the levels that sixteen codes select, as Floats16."""
    return look_up(load_floats(LEVELS, np.uint64(0), np.uint64(0)), places)


@jit_inlined
def fp4_64(w: Any, row: Any, at: Any, shift: Any) -> Any:
    """Return the levels, plus 12, that the nibbles of 64 bytes select."""
    return picked(load_64(_ABOVE_ZERO, U(0), U(0)), nibbles_64(w, row, at, shift))
