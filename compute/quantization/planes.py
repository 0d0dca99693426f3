"""How a GPU has a quantised matrix: units of 32 weights of a row, their codes and scales in planes of their own.

A block of ggml's is no multiple of 16 bytes, and threads that read 16 bytes each could not share it. So the fields of
all blocks lie apart: first the codes, by their bits, then what of the blocks is kept as it is. No byte is added but
up to 255 at the end of each plane.

Codes of a unit: weight 4 g + b is byte b of word g of the eight. A plane of some bits a code has, for each unit
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
ALIGNED = 256  # bytes, at which a plane begins

Array = Any  # NumPy's, or CuPy's: what is written here runs where the array lies


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """`codes` takes uint8 (blocks, block_bytes) and gives uint8 (blocks, block_elements), of which `bits` are used:
    the low ones first, as (4, 1) of five. `kept` are the bytes of a block, from and up to, that each have a plane as
    they are. `source` is CUDA C++ of the format's struct, as `cuda.units` has it.

    Of a format of floats there are no codes, and the one plane are the rows as they are."""

    bits: tuple[int, ...]
    codes: Callable[[Array], Array] | None
    kept: tuple[tuple[int, int], ...]
    source: str

    def sizes(self, blocks: int, block_elements: int) -> Iterator[int]:
        """Bytes of each plane, without what fills it up."""
        for bits in self.bits:
            yield blocks * block_elements * bits // 8
        for begin, end in self.kept:
            yield blocks * (end - begin)

    def size_bytes(self, blocks: int, block_elements: int) -> int:
        """Of all planes."""
        return sum(size + -size % ALIGNED for size in self.sizes(blocks, block_elements))

    def blocks_in(self, size_bytes: int, block_elements: int) -> int:
        """The most blocks whose planes are of so many bytes. Of any number that is they begin at the same places."""
        low, high = 0, size_bytes + 1  # a block has a byte at least
        while high - low > 1:
            middle = (low + high) // 2
            if self.size_bytes(middle, block_elements) <= size_bytes:
                low = middle
            else:
                high = middle
        return low

    def fill(self, blocks: Array, out: Array, first: int = 0, of: int | None = None) -> None:
        """What the planes have of uint8 (blocks, block_bytes) into uint8 (size_bytes,). These are the blocks from
        `first` on, `of` so many; None: all. On the way it takes some 4 bytes for each weight of `blocks`."""
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
