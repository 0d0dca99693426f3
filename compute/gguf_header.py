"""The header of a GGUF file: its keys and where its tensors lie, read against the file's real length."""

# A model file comes from anywhere. No count in it is believed before the file is seen to hold that much, and what
# a decoder never asks for (the tokenizer's arrays, long texts) is passed over, not kept. It is read, not mapped:
# a file that is cut short meanwhile ends a read, where it would end a process that has it mapped.

from __future__ import annotations

import math
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from cbtop.compute.errors import ModelError
from cbtop.compute.quantization import FORMATS

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
UINT32, STRING, ARRAY = 4, 8, 9  # enum gguf_metadata_value_type
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
# Far above any real model, far below what hurts.
MAX_KEYS = 10_000
MAX_TENSORS = 20_000
MAX_ARRAY_ELEMENTS = 2_000_000  # each string is a read
MAX_NAME_BYTES = 1_024
MAX_TEXT_BYTES = 1_024  # of a text that is kept: names of models and architectures, no chat templates
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
LARGEST_DIMENSION = 1 << 31

SUPPORTED_TYPES = ", ".join(block_format.name for block_format in FORMATS.values())
_LENGTH = struct.Struct("<Q")

Value = str | int | float


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as the header has it; `shape` has the dimension first that varies the fastest, as in the file."""

    code: int  # of its format, one of FORMATS
    shape: tuple[int, ...]
    offset: int  # of its first byte, in the data; in the file once the header is read
    elements: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The keys that hold one value, and the tensors, all of which lie in the file's `size_bytes`."""

    metadata: dict[str, Value]
    tensors: dict[str, Tensor]
    size_bytes: int


def read_header(stream: BinaryIO, path: Path) -> Header:
    """The header of the file `stream`. ModelError where it is not that of a whole GGUF file of supported tensors."""
    return _Reader(stream, path).header()


class _Reader:
    """Reads a header from its beginning to its end, and never beyond the file's."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._size = os.fstat(stream.fileno()).st_size
        self._offset = 0
        self._array_elements = 0
        self._alignment = DEFAULT_ALIGNMENT

    def header(self) -> Header:
        if not self._size:
            raise ModelError(f"{self._path} is empty; give a .gguf model")
        if self._stream.read(len(MAGIC)) != MAGIC:
            raise ModelError(f"{self._path} is not a GGUF file (it does not begin with 'GGUF'); give a .gguf model")
        self._offset = len(MAGIC)
        version = self._number("<I")
        if version not in VERSIONS:
            raise ModelError(
                f"{self._path} is GGUF version {version}; versions 2 and 3, little-endian, can be read: "
                "convert the model again"
            )
        tensor_count = self._count("tensors", MAX_TENSORS)
        metadata: dict[str, Value] = {}
        for _ in range(self._count("keys", MAX_KEYS)):
            self._key(metadata)
        tensors: dict[str, Tensor] = {}
        for _ in range(tensor_count):
            self._tensor(tensors)
        start = -(-self._offset // self._alignment) * self._alignment
        placed = {name: replace(tensor, offset=start + tensor.offset) for name, tensor in tensors.items()}
        end = max((tensor.offset + tensor.size_bytes for tensor in placed.values()), default=0)
        self._require(end)
        return Header(metadata, placed, self._size)

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
            self._array()
            return
        value = metadata[name] = self._value(kind)
        if name == "general.alignment":
            # Numba reads float rows where they lie; ggml itself never writes less than 32.
            if kind != UINT32 or not isinstance(value, int) or value < 8 or value & (value - 1):
                raise self._damaged(f"has alignment {value!r:.60}, where a power of two from 8 on is wanted")
            self._alignment = value

    def _value(self, kind: int) -> Value:
        """One value; of a long text its beginning."""
        if kind == STRING:
            size = self._number("<Q")
            kept = self._read(min(size, MAX_TEXT_BYTES))
            self._skip(size - len(kept))
            return kept.decode(errors="replace")
        form = self._form(kind)
        value: Value = struct.unpack(form, self._read(struct.calcsize(form)))[0]
        return value

    def _array(self) -> None:
        """Pass over an array."""
        kind, count = self._number("<I"), self._number("<Q")
        self._array_elements += count
        if self._array_elements > MAX_ARRAY_ELEMENTS:
            raise self._damaged(
                f"has {self._array_elements:,} elements in its metadata, over the limit of {MAX_ARRAY_ELEMENTS:,}"
            )
        if kind != STRING:
            self._skip(count * struct.calcsize(self._form(kind)))
            return
        self._require(self._offset + count * _LENGTH.size)
        for _ in range(count):
            if size := _LENGTH.unpack(self._read(_LENGTH.size))[0]:
                self._skip(size)

    def _form(self, kind: int) -> str:
        if kind not in SCALARS:
            raise self._damaged(f"has a metadata value of unknown type {kind}")
        return SCALARS[kind]

    def _tensor(self, tensors: dict[str, Tensor]) -> None:
        """Read one; its offset is that in the data."""
        name = self._name(tensors)
        dimensions = self._number("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"has a tensor {name!r:.80} with {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))
        if not all(0 < size <= LARGEST_DIMENSION for size in shape):
            raise self._damaged(f"has a tensor {name!r:.80} of shape {list(shape)}")
        code, offset = self._number("<I"), self._number("<Q")
        if code not in FORMATS:
            known = {kind.value: kind.name for kind in GGMLQuantizationType}
            raise ModelError(
                f"{self._path}: tensor {name!r:.80} is of type {known.get(code, code)}; "
                f"supported are {SUPPORTED_TYPES}: use a Q4_K_M, Q6_K, Q8_0 or F16 file of the model"
            )
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(code)]
        if shape[0] % block_elements or offset % self._alignment:
            raise self._damaged(f"has a tensor {name!r:.80} that does not consist of whole blocks")
        elements = math.prod(shape)
        tensors[name] = Tensor(code, shape, offset, elements, elements // block_elements * block_bytes)
