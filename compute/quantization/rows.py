"""Make the compiled row functions of a format. The format provides a function that unpacks sixteen weights."""

# The scales of a block are unpacked for every sixteen weights, unless LLVM finds out that they are equal. Formats
# that need a faster product have their own row functions.

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.jit.compile import copy_of, jit, jit_inlined
from cbtop.compute.jit.vectors import (
    add,
    bits_and,
    load_bytes,
    load_floats,
    multiply_add,
    prefetch,
    shift_right,
    splat,
    store_floats,
    total_of,
)

PREFETCH_BYTES = np.uint64(2048)  # how far ahead to prefetch; 1 to 4 KiB are equally fast
LINE_BYTES = np.uint64(64)

# Each format has a copy of the functions below. In the copy, the format's own values replace the following ones.
_BLOCK_ELEMENTS, _BLOCK_BYTES = 256, 1
_sixteen: Any = None


def _dot_row(weights: Any, row: Any, x: Any, sums: Any) -> Any:
    even, odd = splat(np.float32(0)), splat(np.float32(0))
    token, one, sixteen = np.uint64(0), np.uint64(1), np.uint64(16)
    for block in range(np.uint64(weights.shape[1] // _BLOCK_BYTES)):
        base, first = block * np.uint64(_BLOCK_BYTES), block * np.uint64(_BLOCK_ELEMENTS)
        for line in range(np.uint64(1 + _BLOCK_BYTES // 64)):
            prefetch(weights, row, base + PREFETCH_BYTES + line * LINE_BYTES)
        for pair in range(np.uint64(_BLOCK_ELEMENTS // 32)):
            part = pair + pair
            even = multiply_add(_sixteen(weights, row, base, part), load_floats(x, token, first), even)
            first += sixteen
            odd = multiply_add(_sixteen(weights, row, base, part + one), load_floats(x, token, first), odd)
            first += sixteen
    return total_of(add(even, odd))


def _dequantize_row(weights: Any, row: Any, out: Any, out_row: Any) -> None:
    for block in range(np.uint64(weights.shape[1] // _BLOCK_BYTES)):
        base, first = block * np.uint64(_BLOCK_BYTES), block * np.uint64(_BLOCK_ELEMENTS)
        for part in range(np.uint64(_BLOCK_ELEMENTS // 16)):
            store_floats(out, out_row, first, _sixteen(weights, row, base, part))
            first += np.uint64(16)


def row_functions(name: str, block_elements: int, block_bytes: int, sixteen: Any) -> tuple[Any, Any]:
    """Return `dequantize_row` and `dot_row` for a format with blocks of 32 weights or a multiple of 32.

    `sixteen(weights, row, base, part)` is compiled by @jit. It returns the weights 16 * part to 16 * part + 15 of the
    block that begins at weights[row, base], as Floats16.
    """
    own = {"_BLOCK_ELEMENTS": block_elements, "_BLOCK_BYTES": block_bytes, "_sixteen": sixteen}
    dequantize_row = jit(copy_of(_dequantize_row, f"dequantize_row_{name}", **own))
    return dequantize_row, jit_inlined(copy_of(_dot_row, f"dot_row_{name}", **own))


@jit
def nibbles(weights: Any, row: Any, offset: Any, high: Any) -> Any:
    """Return sixteen nibbles of the bytes from weights[row, offset] on: the low ones if `high` is 0, the high ones if
    1.
    """
    return bits_and(shift_right(load_bytes(weights, row, offset), np.int32(high << np.uint64(2))), np.int32(15))


@jit
def byte(weights: Any, row: Any, offset: Any) -> Any:
    """Return weights[row, offset] as int32."""
    return np.int32(weights[row, offset])
