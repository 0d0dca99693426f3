"""Matrices with interleaved rows, sixteen together, so that one instruction works on sixteen rows.

The bytes are the format's in another order, in the same place: the first units of the first blocks of each sixteen
rows, then the second units, and so on. A unit is the part of a row that a kernel takes at once: a scale, or four
bytes of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, Places, QuantizedMatrix
from cbtop.compute.quantization.iq4_nl import IQ4_NL
from cbtop.compute.quantization.iq4_xs import IQ4_XS
from cbtop.compute.quantization.q2_k import Q2_K
from cbtop.compute.quantization.q3_k import Q3_K
from cbtop.compute.quantization.q4_0 import Q4_0
from cbtop.compute.quantization.q4_1 import Q4_1
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.quantization.q5_0 import Q5_0
from cbtop.compute.quantization.q5_1 import Q5_1
from cbtop.compute.quantization.q5_k import Q5_K
from cbtop.compute.quantization.q6_k import Q6_K
from cbtop.compute.quantization.q8_0 import Q8_0

ROWS = 16
AT_ONCE_BYTES = 1 << 20  # are copied at a time, and stay in the cache

# Each interleavable format's block, as (bytes of a unit, units, offset of the first), in the new order. With several
# offsets their units take turns: the upper bits of weights come after the lower ones, and one token reads all as one
# stream.
UNITS: Mapping[int, tuple[tuple[int, int, tuple[int, ...]], ...]] = {
    Q8_0.code: ((2, 1, (0,)), (4, 8, (2,))),
    Q5_0.code: ((2, 1, (0,)), (4, 5, (2,))),
    Q5_1.code: ((2, 2, (0,)), (4, 5, (4,))),
    Q4_0.code: ((2, 1, (0,)), (4, 4, (2,))),
    Q4_1.code: ((2, 2, (0,)), (4, 4, (4,))),
    Q4_K.code: ((2, 2, (0,)), (1, 12, (4,)), (4, 32, (16,))),
    Q5_K.code: ((4, 8, (48, 80, 112, 144, 16)), (2, 2, (0,)), (1, 12, (4,))),
    Q6_K.code: ((4, 8, (0, 32, 128, 64, 96, 160)), (1, 16, (192,)), (2, 1, (208,))),
    Q3_K.code: ((4, 8, (32, 64, 0)), (1, 12, (96,)), (2, 1, (108,))),
    Q2_K.code: ((4, 8, (16, 48)), (1, 16, (0,)), (2, 2, (80,))),
    IQ4_NL.code: ((2, 1, (0,)), (4, 4, (2,))),
    IQ4_XS.code: ((2, 1, (0,)), (1, 6, (2,)), (4, 32, (8,))),
}


@dataclass(frozen=True, slots=True)
class InterleavedMatrix:
    """A QuantizedMatrix with interleaved `data`, uint8 (rows, row_bytes)."""

    format: BlockFormat
    data: Bytes
    columns: int
    takes_int8: ClassVar[bool] = True  # its products round activations to int8

    @property
    def rows(self) -> int:
        rows: int = self.data.shape[0]
        return rows

    @property
    def size_bytes(self) -> int:
        return self.data.nbytes

    def dequantized(self, rows: Places | None = None) -> Floats:
        """Like `QuantizedMatrix.dequantized`."""
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
    """Return whether its format has units, and its rows are whole groups."""
    return matrix.format.code in UNITS and matrix.rows % ROWS == 0


def rows_of(block_format: BlockFormat, data: Bytes, rows: NDArray[np.int64]) -> Bytes:
    """Return some rows of interleaved `data` in the format's order, uint8 (rows, row_bytes)."""
    base, step = _places(block_format.code, data.shape[1])
    group, lane = rows // ROWS, rows % ROWS
    taken: Bytes = data.reshape(-1)[group[:, None] * (ROWS * data.shape[1]) + base + lane[:, None] * step]
    return taken


def interleave(block_format: BlockFormat, data: Bytes) -> None:
    """Reorder the bytes of uint8 (rows, row_bytes), whole groups of rows, in place."""
    for rows, places in _groups(block_format, data):
        at = 0
        for size, count, firsts in UNITS[block_format.code]:
            unit = np.dtype(f"u{size}")  # moved as one number: eight times as fast as byte by byte
            end = at + ROWS * size * count * len(firsts)
            between = places[..., at:end].view(unit)
            in_turn = between.reshape(*between.shape[:2], count, len(firsts), ROWS)
            for turn, first in enumerate(firsts):
                units = rows[..., first : first + size * count].view(unit)  # (groups, 16, blocks, count)
                in_turn[..., turn, :] = units.transpose(0, 2, 3, 1)
            at = end


def _groups(block_format: BlockFormat, data: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield some groups at a time: a copy, (groups, 16, blocks, block_bytes), and a view of their place, (groups,
    blocks, 16 * block_bytes)."""
    row_bytes, block_bytes = data.shape[1], block_format.block_bytes
    step = max(AT_ONCE_BYTES // (ROWS * row_bytes), 1) * ROWS
    for first in range(0, data.shape[0], step):
        rows, blocks = data[first : first + step], row_bytes // block_bytes
        yield rows.copy().reshape(-1, ROWS, blocks, block_bytes), rows.reshape(-1, blocks, ROWS * block_bytes)


@cache
def _places(code: int, row_bytes: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the place of each byte of a group's first row in the group, and the distance to the same byte of the
    next row."""
    block_bytes = sum(size * count * len(firsts) for size, count, firsts in UNITS[code])
    base, step, at = np.zeros(block_bytes, np.int64), np.zeros(block_bytes, np.int64), 0
    for size, count, firsts in UNITS[code]:
        for begin in [first + size * unit for unit in range(count) for first in firsts]:
            base[begin : begin + size], step[begin : begin + size] = range(at, at + size), size
            at += ROWS * size
    blocks = np.arange(row_bytes // block_bytes)[:, None] * (ROWS * block_bytes)
    return (blocks + base).reshape(-1), np.tile(step, len(blocks))
