"""Write the header of a GGUF file."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

from cbtop.compute.gguf_header import ARRAY, MAGIC, STRING, UINT32, VERSIONS, aligned
from cbtop.compute.quantization.base import BlockFormat

FLOAT32 = 6  # enum gguf_metadata_value_type


def written_header(
    metadata: Mapping[str, str | int | float | Sequence[str]],
    tensors: Sequence[tuple[str, tuple[int, ...], BlockFormat]],
) -> bytes:
    """Return the header of a file with these metadata and tensors.

    Each tensor is given as (name, shape, format). Its shape has the rows first, as in NumPy. The caller writes the
    data of the tensors after the header, in the same order, each padded to `aligned`. Whole numbers are written as
    UINT32, other numbers as FLOAT32, and a sequence of texts as an ARRAY.
    """
    parts = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts.append(_text(key))
        if isinstance(value, str):
            parts += struct.pack("<I", STRING), _text(value)
        elif isinstance(value, Sequence):
            parts += struct.pack("<IIQ", ARRAY, STRING, len(value)), *map(_text, value)
        elif isinstance(value, int):
            parts.append(struct.pack("<II", UINT32, value))
        else:
            parts.append(struct.pack("<If", FLOAT32, value))
    offset = 0
    for name, shape, block_format in tensors:
        parts += _text(name), struct.pack("<I", len(shape))
        parts.append(struct.pack(f"<{len(shape)}QIQ", *reversed(shape), block_format.code, offset))
        offset += aligned(math.prod(shape[:-1]) * block_format.row_bytes(shape[-1]))
    header = b"".join(parts)
    return header.ljust(aligned(len(header)), b"\0")


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded
