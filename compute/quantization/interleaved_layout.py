"""The layout of a format's interleaved rows, and the compiled functions that unpack them for products.

A function unpacks 32 columns of sixteen rows of uint8 (rows, row_bytes), from row `row` on. It returns eight vectors
of 64 unsigned bytes, followed by the factors of the 32 columns. Each vector has four columns of the sixteen rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

# A unit: its size in bytes, the number of such units in a block, and the offsets of the first units in a block of the
# file.
Unit = tuple[int, int, tuple[int, ...]]


class Factors(Enum):
    """The kinds of factors that 32 columns can have."""

    OF_32 = "a scale and a minimum: scale * weight - minimum"
    OF_16 = "two scales, then two minima, of 16 columns each"
    LESS_32 = "two scales of 16 columns each: scale * (weight - 32)"


@dataclass(frozen=True, slots=True)
class BlockColumns:
    """The functions that read a whole block of 256 columns in memory order.

    A block has eight parts (turns) of `turn_bytes` bytes each, followed by its scales.

    - `four_columns(w, row, at)` unpacks the turn that begins at w[row, at]. It returns eight vectors of four columns
      each: the first four columns of the turn, then the columns that are 32, 64, ... 224 after these.
    - `four(w, row, at, half, part)` returns only the four columns that are 128 * half + 32 * part after the first.
      Only `Factors.OF_16` needs it.
    - `factors(w, row, base, part)` returns the factors of 32 columns of the block at `base`.
    - `factors_of_16(w, row, base, place)` returns the factors of 16 columns: a scale, or a scale and a minimum.
      `Factors.OF_32` does not need it.
    """

    turn_bytes: int
    four_columns: Callable[..., Any]
    factors: Callable[..., Any]
    factors_of_16: Callable[..., Any] | None = None
    four: Callable[..., Any] | None = None


# Layouts are compared by identity, because they are keys of a cache.
@dataclass(frozen=True, slots=True, eq=False)
class InterleavedLayout:
    """The `units` of a block in the order in which they are stored.

    Units with several offsets alternate: lower bits, upper bits, lower bits, and so on. A product of one token then
    reads them in memory order.

    - `unpack(w, row, step, part)` returns 32 columns of a step, from column 32 * part on. A step is a block of 32
      columns, or half a block of 256.
    - `largest` is the largest weight that `unpack` returns.
    - `block`: the functions that read whole blocks. If None, int8 products use `unpack`, and `factors` is
      `Factors.OF_32`.
    """

    units: tuple[Unit, ...]
    unpack: Callable[..., Any]
    largest: int
    factors: Factors = Factors.OF_32
    block: BlockColumns | None = None
