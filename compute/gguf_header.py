"""Read the header of a GGUF file: its keys, and the positions of its arrays and tensors.

All are checked against the file's size.

Source of the format: ggml's docs/gguf.md and ggml.h (enum ggml_type).
"""

# A model file is not trusted. A count in it is used only if the file is large enough for that count. Values that only
# some callers need (the tokenizer's arrays, long texts) are skipped. The file is read, not mapped: if it is cut short
# meanwhile, a read returns fewer bytes, and with a mapping the process would be killed.

from __future__ import annotations

import math
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from cbtop.compute.errors import ModelError, TensorTypeError
from cbtop.compute.gguf_kinds import LFS_POINTER, refuse_beginning, refuse_metadata
from cbtop.compute.quantization import FORMATS

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
UINT32, STRING, ARRAY = 4, 8, 9  # numbers of the C enum gguf_metadata_value_type
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
# Limits far above the values of real models, and far below sizes that would cause trouble.
MAX_KEYS = 10_000
MAX_TENSORS = 20_000
# Largest number of elements of an array. Each element may be a string, and Python reads strings one by one.
MAX_ARRAY_ELEMENTS = 2_000_000
MAX_NAME_BYTES = 1_024
# Largest length of a text, in bytes; longer texts are cut. Names of models and architectures are shorter, and chat
# templates are longer.
MAX_TEXT_BYTES = 1_024
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
LARGEST_DIMENSION = 1 << 31
# Bytes that are read at a time to skip strings. This number of bytes is enough for a few hundred short strings. The
# rest of a long string is skipped without reading it.
PIECE_BYTES = 1 << 14

SUPPORTED_TYPES = ", ".join(block_format.name for block_format in FORMATS.values())
# Names of the C enum ggml_type, for messages about unsupported types. A type that ggml has withdrawn has its number
# as its name.
_TYPE_NAMES = (
    "F32", "F16", "Q4_0", "Q4_1", "4", "5", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16",
    "I32", "I64", "F64", "IQ1_M", "BF16", "31", "32", "33", "TQ1_0", "TQ2_0", "36", "37", "38", "MXFP4",
    "NVFP4", "Q1_0", "Q2_0",
)  # fmt: skip
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Array:
    """The position of an array's elements in the file. `kind` is the type of an element: STRING or a key of
    SCALARS.
    """

    kind: int
    count: int
    offset: int
    size_bytes: int

    def __str__(self) -> str:
        return f"an array of {self.count:,}"


Value = str | int | float | Array


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, as the header describes it. `shape` has the fastest-varying dimension first, as in the file."""

    code: int  # number of the tensor's format, a key of FORMATS
    shape: tuple[int, ...]
    # Offset of the first byte. While the header is read, the offset counts from the start of the data. Later it
    # counts from the start of the file.
    offset: int
    elements: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The keys and the tensors of a file.

    All tensors are within the file's `size_bytes`, and no two of them overlap.
    """

    metadata: dict[str, Value]
    tensors: dict[str, Tensor]
    size_bytes: int


def texts_of(elements: bytes, count: int) -> list[str]:
    """Return the `count` strings of an array from the bytes of its elements."""
    texts, at = [], 0
    for _ in range(count):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(elements, at)[0]
        texts.append(elements[begin:at].decode(errors="replace"))
    return texts


def aligned(size_bytes: int, alignment: int = DEFAULT_ALIGNMENT) -> int:
    """Return `size_bytes`, rounded up to a multiple of `alignment`."""
    return -(-size_bytes // alignment) * alignment


def read_header(stream: BinaryIO, path: Path) -> GgufHeader:
    """Read the header of the file `stream`.

    Raises ModelError unless it is a complete GGUF file and all of its tensors are supported.
    """
    return _Reader(stream, path).header()


class _Reader:
    """Reads a header from start to end, and never reads past the end of the file."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._size = os.fstat(stream.fileno()).st_size
        self._offset = 0
        self._array_elements = 0
        self._alignment = DEFAULT_ALIGNMENT
        self._metadata: dict[str, Value] = {}

    def header(self) -> GgufHeader:
        if not self._size:
            raise ModelError(f"{self._path} is empty; give a .gguf model")
        beginning = self._stream.read(len(LFS_POINTER))
        refuse_beginning(self._path, beginning)
        self._stream.seek(len(MAGIC))
        if not beginning.startswith(MAGIC):
            raise ModelError(f"{self._path} is not a GGUF file (it does not begin with 'GGUF'); give a .gguf model")
        self._offset = len(MAGIC)
        version = self._number("<I")
        if version not in VERSIONS:
            raise ModelError(
                f"{self._path} is GGUF version {version}; versions 2 and 3, little-endian, can be read: "
                "convert the model again"
            )
        tensor_count = self._count("tensors", MAX_TENSORS)
        metadata = self._metadata
        for _ in range(self._count("keys", MAX_KEYS)):
            self._key(metadata)
        refuse_metadata(self._path, metadata)
        tensors: dict[str, Tensor] = {}
        for _ in range(tensor_count):
            self._tensor(tensors)
        start = aligned(self._offset, self._alignment)
        placed = {name: replace(tensor, offset=start + tensor.offset) for name, tensor in tensors.items()}
        in_order = sorted(placed.items(), key=lambda item: item[1].offset)
        for (name, tensor), (other, after) in pairwise(in_order):
            if tensor.offset + tensor.size_bytes > after.offset:
                raise self._damaged(f"has tensors {name!r:.80} and {other!r:.80} in the same bytes")
        if in_order:
            self._require(in_order[-1][1].offset + in_order[-1][1].size_bytes)
        return GgufHeader(metadata, placed, self._size)

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._path} {what}: it is damaged; download or convert it again")

    def _truncated(self, missing: int) -> ModelError:
        return ModelError(f"{self._path} is truncated: at least {missing:,} bytes are missing; download it again")

    def _read(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) < size:
            raise self._truncated(size - len(data))
        self._offset += size
        return data

    def _require(self, end: int) -> None:
        if end > self._size:
            raise self._truncated(end - self._size)

    def _skip(self, size: int) -> None:
        self._offset += size
        self._require(self._offset)
        self._stream.seek(size, os.SEEK_CUR)

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._read(struct.calcsize(form)))[0])

    def _count(self, what: str, most: int) -> int:
        count = self._number("<Q")
        if count > most:
            raise self._damaged(f"announces {count:,} {what}, over the limit of {most:,}")
        return count

    def _name(self, known: Collection[str]) -> str:
        size = self._number("<Q")
        if size > MAX_NAME_BYTES:
            raise self._damaged(f"has a name of {size:,} bytes, over the limit of {MAX_NAME_BYTES:,}")
        name = self._read(size).decode(errors="replace")
        if name in known:
            raise self._damaged(f"has the name {name!r:.80} twice")
        return name

    def _key(self, metadata: dict[str, Value]) -> None:
        name = self._name(metadata)
        kind = self._number("<I")
        if kind == ARRAY:
            metadata[name] = self._array(name)
            return
        value = metadata[name] = self._value(kind)
        if name == "general.alignment":
            # An alignment must be a power of two. Alignments below 8 are refused. No file needs such alignments,
            # because ggml never writes an alignment below 32.
            if kind != UINT32 or not isinstance(value, int) or value < 8 or value & (value - 1):
                raise self._damaged(f"has alignment {value!r:.60}, where a power of two from 8 on is wanted")
            self._alignment = value

    def _value(self, kind: int) -> str | int | float:
        """Return one value. A text of more than MAX_TEXT_BYTES is cut."""
        if kind == STRING:
            size = self._number("<Q")
            kept = self._read(min(size, MAX_TEXT_BYTES))
            self._skip(size - len(kept))
            return kept.decode(errors="replace")
        form = self._form(kind)
        value: int | float = struct.unpack(form, self._read(struct.calcsize(form)))[0]
        return value

    def _array(self, name: str) -> Array:
        """Return the position of the array that is the value of the key `name`. Skips the array's elements."""
        kind, count = self._number("<I"), self._number("<Q")
        if kind == ARRAY:
            raise ModelError(
                f"{self._path} has an array of arrays as {name:.80}, which llama.cpp does not read either: convert "
                "the model again without it"
            )
        self._array_elements += count
        if self._array_elements > MAX_ARRAY_ELEMENTS:
            raise self._damaged(
                f"has {self._array_elements:,} elements in its metadata, over the limit of {MAX_ARRAY_ELEMENTS:,}"
            )
        begin = self._offset
        if kind != STRING:
            self._skip(count * struct.calcsize(self._form(kind)))
        else:
            self._require(begin + count * _LENGTH.size)
            self._skip_texts(count)
        return Array(kind, count, begin, self._offset - begin)

    def _skip_texts(self, count: int) -> None:
        """Skip `count` strings by reading large pieces. Reading the strings one by one takes five times as long."""
        while count:
            piece = self._stream.read(PIECE_BYTES)
            at, last = 0, len(piece) - _LENGTH.size
            while count and at <= last:
                at += _LENGTH.size + _LENGTH.unpack_from(piece, at)[0]
                count -= 1
            if not at:  # a read returns less than expected if the file was cut short in the meantime
                raise self._truncated(_LENGTH.size - len(piece))
            self._offset += at
            self._require(self._offset)
            self._stream.seek(self._offset)

    def _form(self, kind: int) -> str:
        if kind not in SCALARS:
            raise self._damaged(f"has a metadata value of unknown type {kind}")
        return SCALARS[kind]

    def _tensor(self, tensors: dict[str, Tensor]) -> None:
        """Read one tensor. Its offset counts from the start of the data."""
        name = self._name(tensors)
        dimensions = self._number("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"has a tensor {name!r:.80} with {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))
        if not all(0 < size <= LARGEST_DIMENSION for size in shape):
            raise self._damaged(f"has a tensor {name!r:.80} of shape {list(shape)}")
        code, offset = self._number("<I"), self._number("<Q")
        if code not in FORMATS:
            kind = _TYPE_NAMES[code] if code < len(_TYPE_NAMES) else code
            raise TensorTypeError(
                f"{self._path}: tensor {name!r:.80} is of type {kind}; "
                f"supported are {SUPPORTED_TYPES}: use a Q4_K_M, Q6_K, Q8_0 or F16 file of the model, or make one "
                "with `llama-quantize --allow-requantize MODEL.gguf NEW.gguf Q8_0`",
                self._metadata.get("general.architecture"),
            )
        block_format = FORMATS[code]
        if shape[0] % block_format.block_elements:
            raise self._damaged(f"has a tensor {name!r:.80} that does not consist of whole blocks")
        if offset % self._alignment:
            raise self._damaged(f"has a tensor {name!r:.80} that does not lie at a multiple of {self._alignment}")
        elements = math.prod(shape)
        size_bytes = elements // shape[0] * block_format.row_bytes(shape[0])
        tensors[name] = Tensor(code, shape, offset, elements, size_bytes)
