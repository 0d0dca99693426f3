"""Matrices with interleaved rows. Sixteen rows are stored together, so that one instruction can process sixteen rows.

The bytes are as in the file, in a different order. A unit is the part of a row that a kernel reads at once: a scale,
or four bytes of weights. A group of sixteen rows begins with the first unit of each row. Then come their second
units, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, Places, QuantizedMatrix
from cbtop.compute.quantization.interleaved_layout import InterleavedLayout

ROWS = 16
AT_ONCE_BYTES = 1 << 20  # number of bytes that are copied at a time; they stay in the cache


@dataclass(frozen=True, slots=True)
class InterleavedMatrix:
    """A QuantizedMatrix with interleaved `data`, uint8 (rows, row_bytes)."""

    format: BlockFormat
    data: Bytes
    columns: int
    takes_int8: ClassVar[bool] = True  # products with this matrix round activations to int8

    @property
    def rows(self) -> int:
        rows: int = self.data.shape[0]
        return rows

    @property
    def size_bytes(self) -> int:
        return self.data.nbytes

    def dequantized(self, rows: Places | None = None) -> Floats:
        """Do the same as `QuantizedMatrix.dequantized`."""
        return self.format.dequantize(rows_of(self.format, self.data, np.arange(self.rows) if rows is None else rows))

    @classmethod
    def of(cls, matrix: QuantizedMatrix) -> InterleavedMatrix:
        """Reorder `matrix` in place. Do not use `matrix` afterwards."""
        matrix.data.flags.writeable = True
        interleave(matrix.format, matrix.data)
        matrix.data.flags.writeable = False
        return cls(matrix.format, matrix.data, matrix.columns)


Matrix = QuantizedMatrix | InterleavedMatrix


def can_interleave(matrix: QuantizedMatrix) -> bool:
    """Return whether the format has an interleaved layout and the rows form whole groups."""
    return matrix.format.interleaved is not None and matrix.rows % ROWS == 0


def rows_of(block_format: BlockFormat, data: Bytes, rows: NDArray[np.int64]) -> Bytes:
    """Return some rows of interleaved `data`, uint8 (rows, row_bytes). Their bytes are in the order of the file."""
    base, step = _places(block_format.interleaved, data.shape[1])
    group, lane = rows // ROWS, rows % ROWS
    taken: Bytes = data.reshape(-1)[group[:, None] * (ROWS * data.shape[1]) + base + lane[:, None] * step]
    return taken


def interleave(block_format: BlockFormat, data: Bytes) -> None:
    """Interleave the rows of `data`, uint8 (rows, row_bytes), in place. The rows must form whole groups."""
    assert block_format.interleaved is not None
    for rows, places in _groups(block_format, data):
        at = 0
        for size, count, firsts in block_format.interleaved.units:
            # Move each unit as one number, which is eight times as fast as moving its bytes.
            unit = np.dtype(f"u{size}")
            end = at + ROWS * size * count * len(firsts)
            between = places[..., at:end].view(unit)
            in_turn = between.reshape(*between.shape[:2], count, len(firsts), ROWS)
            for turn, first in enumerate(firsts):
                # the shape of the array is now (groups, 16, blocks, count)
                units = rows[..., first : first + size * count].view(unit)
                in_turn[..., turn, :] = units.transpose(0, 2, 3, 1)
            at = end


def _groups(block_format: BlockFormat, data: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield some groups of rows at a time: a copy of the rows, and a view of `data` to write the rows into.

    The copy has the shape (groups, 16, blocks, block_bytes), and the view has the shape (groups, blocks, 16 *
    block_bytes).
    """
    row_bytes, block_bytes = data.shape[1], block_format.block_bytes
    step = max(AT_ONCE_BYTES // (ROWS * row_bytes), 1) * ROWS
    for first in range(0, data.shape[0], step):
        rows, blocks = data[first : first + step], row_bytes // block_bytes
        yield rows.copy().reshape(-1, ROWS, blocks, block_bytes), rows.reshape(-1, blocks, ROWS * block_bytes)


@cache
def _places(layout: InterleavedLayout | None, row_bytes: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return two arrays with an entry for each byte of a group's first row: its position in the group, and the
    distance to the same byte of the next row.
    """
    assert layout is not None
    block_bytes = sum(size * count * len(firsts) for size, count, firsts in layout.units)
    base, step, at = np.zeros(block_bytes, np.int64), np.zeros(block_bytes, np.int64), 0
    for size, count, firsts in layout.units:
        for begin in [first + size * unit for unit in range(count) for first in firsts]:
            base[begin : begin + size], step[begin : begin + size] = range(at, at + size), size
            at += ROWS * size
    blocks = np.arange(row_bytes // block_bytes)[:, None] * (ROWS * block_bytes)
    return (blocks + base).reshape(-1), np.tile(step, len(blocks))
