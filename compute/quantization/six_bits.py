"""Eight scales and eight minima of 6 bits in 12 bytes, as in Q4_K and Q5_K.

bytes 0-3    low 6 bits: scales 0-3; top 2 bits: top bits of scales 4-7
bytes 4-7    low 6 bits: minima 0-3; top 2 bits: top bits of minima 4-7
bytes 8-11   low nibble: the low 4 bits of scales 4-7; high nibble: the low 4 bits of minima 4-7
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import jit, load_word
from cbtop.compute.quantization.base import Bytes, Floats


def unpack_six_bits(data: Bytes) -> tuple[Floats, Floats]:
    """Return the scales and the minima in uint8 (blocks, 12), each as float32 (blocks, 8)."""
    a, b, c = data[:, 0:4], data[:, 4:8], data[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1).astype(np.float32)
    minima = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1).astype(np.float32)
    return scales, minima


def pack_six_bits(scales: Floats, minima: Floats) -> Bytes:
    """Do the reverse of `unpack_six_bits`. Scales and minima are whole numbers from 0 to 63."""
    scale, minimum = scales.astype(np.uint8), minima.astype(np.uint8)
    a = scale[:, :4] | ((scale[:, 4:] >> 4) << 6)
    b = minimum[:, :4] | ((minimum[:, 4:] >> 4) << 6)
    return np.concatenate([a, b, (scale[:, 4:] & 15) | ((minimum[:, 4:] & 15) << 4)], axis=1)


@jit
def scales_of(weights: Any, row: Any, offset: Any) -> Any:
    """Return the eight scales that begin at weights[row, offset], as the bytes of one uint64."""
    a = load_word(weights, row, offset)
    c = load_word(weights, row, offset + np.uint64(8))
    high = np.uint32(
        np.uint32(c & np.uint32(0x0F0F0F0F)) | np.uint32(np.uint32(a >> np.uint32(2)) & np.uint32(0x30303030))
    )
    return np.uint64(np.uint32(a & np.uint32(0x3F3F3F3F))) | (np.uint64(high) << np.uint64(32))


@jit
def minima_of(weights: Any, row: Any, offset: Any) -> Any:
    """Return the eight minima, as the bytes of one uint64."""
    b = load_word(weights, row, offset + np.uint64(4))
    c = load_word(weights, row, offset + np.uint64(8))
    high = np.uint32(
        np.uint32(np.uint32(c >> np.uint32(4)) & np.uint32(0x0F0F0F0F))
        | np.uint32(np.uint32(b >> np.uint32(2)) & np.uint32(0x30303030))
    )
    return np.uint64(np.uint32(b & np.uint32(0x3F3F3F3F))) | (np.uint64(high) << np.uint64(32))


@jit
def byte_of(word: Any, index: Any) -> Any:
    """Return byte `index` of a uint64 as float32."""
    return np.float32(np.int32((word >> np.uint64(8 * index)) & np.uint64(0xFF)))
