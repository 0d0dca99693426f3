"""A GPU's layout of a quantised matrix: units of 32 weights of a row, with codes and scales in separate planes.

The size of a ggml block is not a multiple of 16 bytes, so threads cannot read blocks in pieces of 16 bytes. So each
field has a plane of its own, which contains that field of all blocks. First come the planes of the codes, divided by
bits, then the fields that are stored unchanged. Each plane is padded by at most 255 bytes.

The codes of a unit are eight words of four bytes. Weight 4 g + b is byte b of word g. For each unit, a plane of
    8 bits   has 32 bytes, the codes unchanged
    4 bits   has 16 bytes: byte i has weight i (low nibble) and 16 + i
    2 bits   has  8 bytes: byte b of word w has weights 16 w + b + 4 s, s = 0 to 3, at its bits 2 s
    1 bit    has  4 bytes: byte b has weights b + 4 g, g = 0 to 7, at its bit g
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

UNIT = 32
ALIGNED = 256  # alignment of a plane, in bytes

Array = Any  # an array of NumPy or of CuPy, because this code also runs on GPUs


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """The planes of one format.

    - `codes` turns uint8 (blocks, block_bytes) into uint8 (blocks, block_elements), one code per weight.
    - `bits` divides the bits of a code among planes, lowest first: (4, 1) for codes of five bits.
    - `kept` lists ranges of a block's bytes that are stored unchanged, each in a plane.
    - `source` is CUDA C++ of the format's struct (see `cuda.units`).
    - `at_once`: how many rows a thread reads together, and how many units of each, in int8 products of one token.

    A format of floats has no codes, and its only plane holds the rows unchanged.
    """

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
        """Return the largest number of blocks with planes of `size_bytes` bytes in total.

        Because of padding, a smaller number of blocks may have planes of the same size. Their planes then begin at
        the same offsets.
        """
        low, high = 0, size_bytes + 1  # a block has at least one byte, so there are at most `size_bytes` blocks
        while high - low > 1:
            middle = (low + high) // 2
            if self.size_bytes(middle, block_elements) <= size_bytes:
                low = middle
            else:
                high = middle
        return low

    def fill(self, blocks: Array, out: Array, first: int = 0, of: int | None = None) -> None:
        """Write the planes of `blocks`, uint8 (blocks, block_bytes), into `out`, uint8 (size_bytes,).

        Without `of`, `blocks` is the whole matrix. Otherwise it is a part of a matrix of `of` blocks, and begins with
        block number `first`. The function needs about 4 bytes of additional memory per weight.
        """
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
    pairs = units.reshape(-1, 2, 4, 4) & 3  # the axes of the array are (unit, word, s, byte)
    return pairs[:, :, 0] | pairs[:, :, 1] << 2 | pairs[:, :, 2] << 4 | pairs[:, :, 3] << 6


def _one(units: Array) -> Array:
    bits = units.reshape(-1, 8, 4) & 1  # (unit, group, byte)
    packed = bits[:, 0]
    for group in range(1, 8):
        packed = packed | bits[:, group] << group
    return packed


_PACKED = {8: _eight, 4: _four, 2: _two, 1: _one}
