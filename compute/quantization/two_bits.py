"""256 levels of 2 bits, as in Q2_K, Q3_K and TQ2_0.

Each half has 32 bytes; byte i holds its levels i, 32+i, 64+i and 96+i.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit
from cbtop.compute.jit.vectors import bits_and, load_bytes, shift_right
from cbtop.compute.quantization.base import Bytes

_SHIFTS = np.array([[0], [2], [4], [6]], np.uint8)


def unpack_two_bits(data: Bytes) -> Bytes:
    """Return the levels in uint8 (blocks, 64) as uint8 (blocks, 256)."""
    levels: Bytes = (data.reshape(-1, 2, 1, 32) >> _SHIFTS) & np.uint8(3)
    return levels.reshape(-1, 256)


def codes_of_two_bits(data: Any) -> Any:
    """Do the same as `unpack_two_bits`, also for an array on a GPU."""
    halves = data.reshape(-1, 2, 32)
    return np.stack([halves >> 2 * quarter & 3 for quarter in range(4)], axis=2).reshape(len(data), -1)


def pack_two_bits(levels: Bytes) -> Bytes:
    """Do the reverse of `unpack_two_bits`."""
    data: Bytes = np.bitwise_or.reduce(levels.reshape(-1, 2, 4, 32) << _SHIFTS, axis=2)
    return data.reshape(-1, 64)


@jit
def two_bits(weights: Any, row: Any, offset: Any, part: Any) -> Any:
    """Return the levels 16 * part to 16 * part + 15 of the 256 that begin at weights[row, offset], as Ints16."""
    first = offset + (part >> np.uint64(3)) * np.uint64(32) + (part & np.uint64(1)) * np.uint64(16)
    # The shift in bits: it grows by two for every 32 levels, which are two parts.
    shift = np.int32(part & np.uint64(6))
    return bits_and(shift_right(load_bytes(weights, row, first), shift), np.int32(3))
