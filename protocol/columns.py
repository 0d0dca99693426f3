"""Columns of integers, packed for the wire.

First comes one byte per column: the width of its values in bytes (1, 2, 4 or 8), as small as possible. Then come the
columns, all of the same length. Values are little-endian and signed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cbtop.protocol.errors import DecodeError

_WIDTHS = (1, 2, 4, 8)


def pack_columns(columns: Sequence[NDArray[np.int64]]) -> bytes:
    """Pack `columns`, which all have the same length. Returns b"" if the columns are empty."""
    if not len(columns[0]):
        return b""
    narrow = [_narrowest(column) for column in columns]
    return b"".join((bytes(column.itemsize for column in narrow), *(column.tobytes() for column in narrow)))


def unpack_columns(data: bytes | memoryview, number: int, max_length: int) -> list[NDArray[np.int64]]:
    """Return the `number` columns in `data`.

    Raises DecodeError if `data` contains a different number of columns, or columns longer than `max_length`.
    """
    if not len(data):
        return [np.zeros(0, np.int64)] * number
    widths = list(data[:number])
    if len(widths) < number or any(width not in _WIDTHS for width in widths):
        raise DecodeError(f"columns {widths} bytes wide; {number} of 1, 2, 4 or 8 are wanted")
    length, rest = divmod(len(data) - number, sum(widths))
    if rest or length > max_length:
        raise DecodeError(f"{len(data) - number} bytes of rows of {sum(widths)}; at most {max_length} rows are taken")
    at, columns = number, []
    for width in widths:
        columns.append(np.frombuffer(data, f"<i{width}", length, at).astype(np.int64))
        at += length * width
    return columns


def _narrowest(column: NDArray[np.int64]) -> NDArray[np.signedinteger]:
    low, high = int(column.min()), int(column.max())
    width = next(width for width in _WIDTHS if -(1 << (8 * width - 1)) <= low and high < 1 << (8 * width - 1))
    return column.astype(f"<i{width}")
