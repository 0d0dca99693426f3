"""The class of block formats, and a matrix that is stored in a block format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.quantization.interleaved_layout import InterleavedLayout
from cbtop.compute.quantization.planes import PlaneLayout

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Places = NDArray[np.int64]
Flags = NDArray[np.bool_]

LARGEST_HALF = 65504.0  # the largest binary16 number; scales are stored in this type


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One ggml tensor type: `block_elements` weights packed into `block_bytes` bytes.

    `code` is ggml's own number (enum ggml_type), as in a GGUF file.

    - `unpack` turns uint8 (blocks, block_bytes) into float32 (blocks, block_elements).
    - `pack` does the reverse, with a small squared error. It takes weights up to `largest` in magnitude (infinity:
      any float).

    The compiled functions process one row.

    - `dequantize_row(weights, row, out, out_row)` writes the row as float32.
    - `dot_row(weights, row, x, sums)` returns the product of the row and x[0].
    - `prepare(x, sums)` runs once before all rows. It fills `sums`, float32 (1, columns or more), with values that
      `dot_row` needs of x.

    - `suspects` returns which blocks, uint8 (blocks, block_bytes), may have weights that are not finite. If None,
      these are the blocks with a binary16 scale that is not finite.
    - `planes`: the layout on a GPU, or None.
    - `interleaved`: the layout for products in int8 and bfloat16, or None.
    - `has_budget`: whether int8 products reach the bound in their contract, so that bricks can have budgets.
    """

    name: str
    code: int
    block_elements: int
    block_bytes: int
    unpack: Callable[[Bytes], Floats]
    pack: Callable[[Floats], Bytes]
    dequantize_row: Callable[[Any, Any, Any, Any], None]
    dot_row: Callable[[Any, Any, Any, Any], Any]
    prepare: Callable[[Any, Any], None] | None = None
    largest: float = LARGEST_HALF
    suspects: Callable[[Bytes], Flags] | None = None
    planes: PlaneLayout | None = None
    interleaved: InterleavedLayout | None = None
    has_budget: bool = True

    def row_bytes(self, columns: int) -> int:
        return columns // self.block_elements * self.block_bytes

    def dequantize(self, data: Bytes) -> Floats:
        """Return uint8 (rows, row_bytes) as float32 (rows, columns). Raises ValueError for a wrong type or shape."""
        self.check_bytes(data)
        return self.unpack(data.reshape(-1, self.block_bytes)).reshape(len(data), -1)

    def quantize(self, weights: Floats) -> Bytes:
        """Return float32 (rows, columns) as uint8 (rows, row_bytes).

        Raises ValueError if the array is not contiguous, if a row does not consist of whole blocks, or if a weight is
        too large for the format.
        """
        _check(self.name, weights, np.float32, self.block_elements, "weights")
        if self.largest < np.inf and not (within := np.abs(weights) <= self.largest).all():
            row, column = np.argwhere(~within)[0]
            raise ValueError(
                f"{self.name}: the weight of row {row} and column {column} is {weights[row, column]}; "
                f"finite ones of at most {self.largest:g} are wanted: leave the matrix in F32"
            )
        return self.pack(weights.reshape(-1, self.block_elements)).reshape(len(weights), -1)

    def check_bytes(self, data: Bytes) -> None:
        """Raise ValueError if `data` is not contiguous or its rows do not consist of whole blocks."""
        _check(self.name, data, np.uint8, self.block_bytes, "bytes")


def _check(name: str, array: NDArray[Any], wanted: type[np.generic], block: int, what: str) -> None:
    if array.dtype != wanted or array.ndim != 2 or array.shape[1] % block:
        raise ValueError(
            f"{name}: {what} are {array.dtype} {array.shape}; "
            f"{wanted.__name__} (rows, a multiple of {block}) is wanted"
        )
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: the rows of {what} {array.shape} do not lie one after the other; "
            "give np.ascontiguousarray of it"
        )


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A weight matrix with the bytes of the file. `data` is uint8 (rows, row_bytes), read-only.

    Raises ValueError if the rows of `data` do not have `columns` weights, because compiled code does not check that.
    """

    format: BlockFormat
    data: Bytes
    columns: int
    takes_int8: ClassVar[bool] = False  # products with this matrix do not round activations to int8

    def __post_init__(self) -> None:
        self.format.check_bytes(self.data)
        if self.columns % self.format.block_elements or self.data.shape[1] != self.format.row_bytes(self.columns):
            raise ValueError(
                f"{self.format.name}: rows of {self.data.shape[1]:,} bytes for {self.columns:,} columns; "
                f"{self.format.block_bytes} bytes for every {self.format.block_elements} columns are wanted"
            )

    @property
    def rows(self) -> int:
        rows: int = self.data.shape[0]
        return rows

    @property
    def size_bytes(self) -> int:
        return self.data.nbytes

    def dequantized(self, rows: Places | None = None) -> Floats:
        """Return the whole matrix or only `rows`, float32 (rows, columns). Used by references and checks."""
        return self.format.dequantize(self.data if rows is None else self.data[rows])

    @classmethod
    def of(cls, block_format: BlockFormat, weights: Floats) -> QuantizedMatrix:
        """Quantise `weights` (rows, columns). Raises ValueError as `BlockFormat.quantize` does."""
        data = block_format.quantize(weights)
        data.flags.writeable = False
        return cls(block_format, data, weights.shape[1])


def halves_of(values: Floats) -> Bytes:
    """Return float32 (blocks, 1) as the two bytes of a binary16, uint8 (blocks, 2)."""
    return values.astype("<f2").view(np.uint8)


def of_halves(data: Bytes) -> Floats:
    """Return the binary16 in uint8 (blocks, 2) as float32 (blocks, 1)."""
    return data.copy().view("<f2").astype(np.float32)


def nearest(values: Floats) -> Floats:
    """Round to the nearest whole number, ties away from zero, as ggml's roundf does."""
    rounded: Floats = np.copysign(np.floor(np.abs(values) + np.float32(0.5)), values)
    return rounded
