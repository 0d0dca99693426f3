"""What a block format is, and a matrix stored in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One ggml tensor type: `block_elements` weights packed into `block_bytes` bytes.

    `code` is ggml's own number (enum ggml_type), as it stands in a GGUF file.
    `dequantize` takes uint8 (rows, row_bytes) and gives float32 (rows, columns): the meaning of the bytes.
    `quantize` goes the other way by rounding to nearest.

    The compiled functions take a row at a time. `dequantize_row(weights, row, out, out_row)` writes it as float32;
    `dot_row(weights, row, x, sums)` multiplies it by x[0]; `prepare(x, sums)` runs once before all rows and leaves
    what these need of x besides x itself in sums, float32 (1, columns or more).
    """

    name: str
    code: int
    block_elements: int
    block_bytes: int
    dequantize: Callable[[Bytes], Floats]
    quantize: Callable[[Floats], Bytes]
    dequantize_row: Callable[[Any, Any, Any, Any], None]
    dot_row: Callable[[Any, Any, Any, Any], Any]
    prepare: Callable[[Any, Any], None] | None = None

    def row_bytes(self, columns: int) -> int:
        return columns // self.block_elements * self.block_bytes


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A weight matrix as it lies in the file. `data` is uint8 (rows, row_bytes), read-only."""

    format: BlockFormat
    data: Bytes
    columns: int

    @property
    def rows(self) -> int:
        rows: int = self.data.shape[0]
        return rows

    @property
    def size_bytes(self) -> int:
        return self.data.nbytes

    def dequantized(self) -> Floats:
        """The whole matrix as float32 (rows, columns): for references and checks, never to compute with."""
        return self.format.dequantize(self.data)

    @classmethod
    def of(cls, block_format: BlockFormat, weights: Floats) -> QuantizedMatrix:
        """`weights` (rows, columns) quantised to nearest; columns must be a multiple of the block."""
        data = block_format.quantize(np.ascontiguousarray(weights, np.float32))
        data.flags.writeable = False
        return cls(block_format, data, weights.shape[1])


def nearest(values: Floats) -> Floats:
    """Rounded half away from zero, as ggml's roundf does."""
    rounded: Floats = np.copysign(np.floor(np.abs(values) + np.float32(0.5)), values)
    return rounded
