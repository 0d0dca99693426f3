"""A GPU's layout of a quantised matrix: units of 32 weights of a row, with codes and scales in separate planes.

A block of ggml's is not a multiple of 16 bytes, and threads that read 16 bytes each could not share it. So the fields
of all blocks are stored separately: first the codes, by their bits, then the fields that are kept unchanged. No byte
is added except up to 255 at the end of each plane.

Codes of a unit: weight 4 g + b is byte b of word g of the eight. By the bits of a code, a plane has for each unit
    8 bits   32 bytes, as they are
    4 bits   16 bytes: byte i has weight i (low nibble) and 16 + i
    2 bits    8 bytes: byte b of word w has weights 16 w + b + 4 s, s = 0 to 3, at its bits 2 s
    1 bit     4 bytes: byte b has weights b + 4 g, g = 0 to 7, at its bit g
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

UNIT = 32  # weights
ALIGNED = 256  # bytes: the alignment of a plane

Array = Any  # NumPy's, or CuPy's: this code runs on the array's device


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """`codes` takes uint8 (blocks, block_bytes) and gives uint8 (blocks, block_elements). `bits` are those in use,
    the low ones first, such as (4, 1) of five. `kept` are the ranges of a block's bytes that each have a plane,
    unchanged. `source` is CUDA C++ of the format's struct (see `cuda.units`).

    `at_once`: how many rows, and units of each, a thread has at once in int8 products of one token.

    A format of floats has no codes, and its only plane has the rows unchanged."""

    bits: tuple[int, ...]
    codes: Callable[[Array], Array] | None
    kept: tuple[tuple[int, int], ...]
    source: str
    at_once: int = 2

    def sizes(self, blocks: int, block_elements: int) -> Iterator[int]:
        """Yield the bytes of each plane, without padding."""
        for bits in self.bits:
            yield blocks * block_elements * bits // 8
        for begin, end in self.kept:
            yield blocks * (end - begin)

    def size_bytes(self, blocks: int, block_elements: int) -> int:
        """Return the bytes of all planes."""
        return sum(size + -size % ALIGNED for size in self.sizes(blocks, block_elements))

    def blocks_in(self, size_bytes: int, block_elements: int) -> int:
        """Return the most blocks whose planes take `size_bytes` bytes. Any number that does has planes at the same
        places."""
        low, high = 0, size_bytes + 1  # a block has at least a byte
        while high - low > 1:
            middle = (low + high) // 2
            if self.size_bytes(middle, block_elements) <= size_bytes:
                low = middle
            else:
                high = middle
        return low

    def fill(self, blocks: Array, out: Array, first: int = 0, of: int | None = None) -> None:
        """Write the planes of uint8 (blocks, block_bytes) into uint8 (size_bytes,). These are the blocks from `first`
        on, of `of` in all; None: all. Takes some 4 bytes for each weight of `blocks` meanwhile."""
        shift, parts = 0, []
        units: Array = None if self.codes is None else self.codes(blocks).reshape(-1, UNIT)
        for bits in self.bits:
            parts.append(_PACKED[bits](units >> shift if shift else units))
            shift += bits
        parts += [blocks[:, begin:end] for begin, end in self.kept]
        at, count = 0, len(blocks) if of is None else of
        for part in parts:
            flat = part.reshape(-1)
            block_size = flat.size // len(blocks)
            begin = at + first * block_size
            out[begin : begin + flat.size] = flat
            size = count * block_size
            at += size + -size % ALIGNED


def _eight(units: Array) -> Array:
    return units


def _four(units: Array) -> Array:
    return units[:, :16] & 15 | (units[:, 16:] & 15) << 4


def _two(units: Array) -> Array:
    pairs = units.reshape(-1, 2, 4, 4) & 3  # (unit, word, s, byte)
    return pairs[:, :, 0] | pairs[:, :, 1] << 2 | pairs[:, :, 2] << 4 | pairs[:, :, 3] << 6


def _one(units: Array) -> Array:
    bits = units.reshape(-1, 8, 4) & 1  # (unit, group, byte)
    packed = bits[:, 0]
    for group in range(1, 8):
        packed = packed | bits[:, group] << group
    return packed


_PACKED = {8: _eight, 4: _four, 2: _two, 1: _one}
