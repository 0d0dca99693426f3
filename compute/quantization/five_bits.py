"""Pack and unpack levels (weights as whole numbers) of 5 bits, as in Q5_0 and Q5_1.

For 32 levels there is a word of their highest bits, then 16 bytes of nibbles.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit, load_word
from cbtop.compute.jit.vectors import bits_of, bits_or, shift_left
from cbtop.compute.quantization.base import Bytes
from cbtop.compute.quantization.rows import nibbles


def unpack_five_bits(data: Bytes) -> Bytes:
    """Return the levels in uint8 (blocks, 20) as uint8 (blocks, 32)."""
    high = np.unpackbits(data[:, :4], axis=1, bitorder="little")
    levels: Bytes = np.concatenate([data[:, 4:] & 15, data[:, 4:] >> 4], axis=1) | (high << 4)
    return levels


def codes_of_five_bits(data: Any) -> Any:
    """Do the same as `unpack_five_bits`, also for an array on a GPU."""
    high = np.stack([data[:, :4] >> bit & 1 for bit in range(8)], axis=2).reshape(len(data), -1)
    return np.concatenate([data[:, 4:] & 15, data[:, 4:] >> 4], axis=1) | high << 4


def pack_five_bits(levels: Bytes) -> Bytes:
    """Do the reverse of `unpack_five_bits`."""
    high = np.packbits(levels >> 4, axis=1, bitorder="little")
    low = levels & 15
    return np.concatenate([high, low[:, :16] | (low[:, 16:] << 4)], axis=1)


@jit
def five_bits(weights: Any, row: Any, offset: Any, part: Any) -> Any:
    """Return 16 of the 32 levels at weights[row, offset], as Ints16: the first 16 if `part` is 0, otherwise the last
    16.
    """
    high = np.uint32(load_word(weights, row, offset) >> np.uint32(part << np.uint64(4)))
    low = nibbles(weights, row, offset + np.uint64(4), part)
    return bits_or(low, shift_left(bits_of(high), np.int32(4)))
