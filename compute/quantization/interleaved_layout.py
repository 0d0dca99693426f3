"""The layout of a format's interleaved rows, and the compiled functions that unpack them for products.

These take sixteen rows, uint8 (rows, row_bytes), from row `row` on. They return 32 columns as eight vectors of 64
unsigned bytes, of which each has four columns of sixteen rows, then the factors of these columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

Unit = tuple[int, int, tuple[int, ...]]  # bytes, how many, offset of the first


class Factors(Enum):
    """The factors of 32 columns."""

    OF_32 = "a scale and a minimum: scale * weight - minimum"
    OF_16 = "two scales, then two minima, of 16 columns each"
    LESS_32 = "two scales of 16 columns each: scale * (weight - 32)"


@dataclass(frozen=True, slots=True)
class BlockColumns:
    """The functions for blocks of 256 columns that are read whole, in their order in memory.

    A block is eight times `turn_bytes` bytes, then its scales. `four_columns(w, row, at)` returns the columns of a
    turn, which begins at w[row, at]: eight vectors, of four columns and of those 32, 64, ... 224 after them.
    `factors(w, row, base, part)` returns the factors of 32 columns of the block at `base`, and
    `factors_of_16(w, row, base, place)` the scale of 16, or their scale and their minimum.
    `four(w, row, at, half, part)` returns the four columns of a turn that are 128 * half + 32 * part after its first.
    `Factors.OF_32` needs no `factors_of_16`, and only `Factors.OF_16` needs `four`.
    """

    turn_bytes: int
    four_columns: Callable[..., Any]
    factors: Callable[..., Any]
    factors_of_16: Callable[..., Any] | None = None
    four: Callable[..., Any] | None = None


# Compared by identity, because it is a key of a cache.
@dataclass(frozen=True, slots=True, eq=False)
class InterleavedLayout:
    """A block's `units` in the new order. Units with several offsets take turns: the upper bits of weights come after
    the lower ones, and one token reads all as one stream.

    `unpack(w, row, step, part)` returns 32 columns of a step, from column 32 * part on. A step is a block of 32
    columns, or half a block of 256. `largest` is the largest of its weights.
    `block`: how blocks are read whole; None: products in int8 read them by `unpack`, which has `Factors.OF_32` then.
    """

    units: tuple[Unit, ...]
    unpack: Callable[..., Any]
    largest: int
    factors: Factors = Factors.OF_32
    block: BlockColumns | None = None
