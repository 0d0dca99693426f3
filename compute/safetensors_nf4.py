"""Matrices in NF4 of bitsandbytes, as safetensors files of 4-bit models store them.

A matrix NAME has the tensors NAME (two weights in a byte, the first one in its high half), NAME.absmax,
NAME.quant_map and NAME.quant_state.bitsandbytes__nf4, which is JSON. If the scales are quantised, too,
NAME.nested_absmax and NAME.nested_quant_map exist.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cbtop.compute.errors import ModelError
from cbtop.compute.quantization.base import Bytes, Floats
from cbtop.compute.quantization.nf4 import BLOCK_BYTES, BLOCK_ELEMENTS, LEVELS, blocks_of

STATE = ".quant_state.bitsandbytes__nf4"
_OTHERS = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE
_ITEM_TYPES = {"F32": np.float32, "U8": np.uint8}
Read = Callable[[memoryview, int], None]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file. `offset` counts from the start of the whole model."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Nf4Matrix:
    """A matrix (rows, columns) in NF4. Its bytes are blocks of `quantization.nf4`, which are made on reading."""

    rows: int
    columns: int
    _packed: StoredTensor
    _absmax: Floats
    _read: Read

    @property
    def size_bytes(self) -> int:
        """The bytes of all blocks."""
        return self._absmax.size * BLOCK_BYTES

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into` with bytes from `offset` on. Both must be whole blocks."""
        first, count = offset // BLOCK_BYTES, len(into) // BLOCK_BYTES
        packed = np.empty(count * BLOCK_ELEMENTS // 2, np.uint8)
        self._read(packed.data, self._packed.offset + first * BLOCK_ELEMENTS // 2)
        codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1, BLOCK_ELEMENTS)
        into[:] = blocks_of(self._absmax[first : first + count], codes).data.cast("B")


def taken_nf4(stored: dict[str, StoredTensor], read: Read) -> dict[str, Nf4Matrix]:
    """Remove the tensors of NF4 matrices from `stored`, and return the matrices by name.

    `read` fills a buffer from an offset in the model. Raises ModelError if a matrix is damaged or not supported.
    """
    found = {}
    for name in [name.removesuffix(STATE) for name in stored if name.endswith(STATE)]:
        parts = {end: stored.pop(f"{name}{end}") for end in ("", *_OTHERS) if f"{name}{end}" in stored}
        path = parts[STATE].path
        try:
            found[name] = _matrix(parts, read)
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise ModelError(
                f"{path}: tensor {name!r:.80} is not NF4 with blocks of {BLOCK_ELEMENTS} ({error!s:.100}); give the "
                "model in bfloat16"
            ) from error
    return found


def _matrix(parts: Mapping[str, StoredTensor], read: Read) -> Nf4Matrix:
    """Raises LookupError or ValueError if a part is missing or has another size."""
    state = json.loads(bytes(_values(parts[STATE], read)))
    rows, columns = state["shape"]
    if state["quant_type"] != "nf4" or state["blocksize"] != BLOCK_ELEMENTS or columns % BLOCK_ELEMENTS:
        raise ValueError(f"{state['quant_type']}, blocks of {state['blocksize']}, {columns} columns")
    if not np.array_equal(_values(parts[".quant_map"], read), LEVELS[0]):
        raise ValueError("other levels")
    absmax = _values(parts[".absmax"], read)
    if ".nested_absmax" in parts:
        nested, size = _values(parts[".nested_absmax"], read), state["nested_blocksize"]
        scales = np.repeat(nested, size)[: absmax.size]
        absmax = _values(parts[".nested_quant_map"], read)[absmax] * scales + np.float32(state["nested_offset"])
    packed = parts[""]
    if absmax.dtype != np.float32 or (absmax.size * BLOCK_ELEMENTS, packed.dtype) != (rows * columns, "U8"):
        raise ValueError(f"{absmax.size} scales of {absmax.dtype} for {rows} x {columns}")
    if 2 * packed.size_bytes != rows * columns:
        raise ValueError(f"{packed.size_bytes} bytes for {rows} x {columns}")
    return Nf4Matrix(rows, columns, packed, absmax, read)


def _values(stored: StoredTensor, read: Read) -> Any:
    """Return a tensor as an array of NumPy with one dimension."""
    values: Bytes = np.empty(math.prod(stored.shape), _ITEM_TYPES[stored.dtype])
    read(values.data.cast("B"), stored.offset)
    return values
