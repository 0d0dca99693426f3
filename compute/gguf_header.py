"""The header of a GGUF file, walked against the file's real length before anything believes it."""

# A model file comes from anywhere. GGUFReader believes every count in it (a count of 2^60 is a MemoryError
# after minutes, a short file an IndexError), so the header is walked here first, against the file's real
# length; only a file that holds what it announces reaches GGUFReader, which then maps the tensors.

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from cbtop.compute.errors import ModelError
from cbtop.compute.quantization import FORMATS

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9  # enum gguf_metadata_value_type
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# Far above any real model, far below what hurts. GGUFReader makes an array object of each array element.
MAX_KEYS = 10_000
MAX_TENSORS = 20_000
MAX_ARRAY_ELEMENTS = 2_000_000
MAX_NAME_BYTES = 1_024
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
LARGEST_DIMENSION = 1 << 31

SUPPORTED_TYPES = ", ".join(block_format.name for block_format in FORMATS.values())


def check_header(path: Path) -> None:
    """ModelError where there is no whole GGUF file of supported tensors at `path`."""
    try:
        if path.is_dir():
            raise ModelError(f"{path} is a directory; give the path of a .gguf model in it")
        # Opening a pipe would wait for its writer.
        if path.exists() and not path.is_file():
            raise ModelError(f"{path} is not a regular file; give the path of a .gguf model")
        with path.open("rb") as stream:
            if path.stat().st_size == 0:
                raise ModelError(f"{path} is empty; give a .gguf model")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _Header(data, path).check()
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; give the path of a .gguf model") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelError(f"{path} cannot be read ({reason}); give a readable .gguf model") from error


class _Header:
    """A walk through the header of a mapped file that never leaves it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._offset = 0
        self._array_elements = 0
        self._alignment = DEFAULT_ALIGNMENT

    def check(self) -> None:
        if self._data[:4] != MAGIC:
            raise ModelError(f"{self._path} is not a GGUF file (it does not begin with 'GGUF'); give a .gguf model")
        self._skip(4)
        version = self._number("<I")
        if version not in VERSIONS:
            raise ModelError(
                f"{self._path} is GGUF version {version}; versions 2 and 3, little-endian, can be read: "
                "convert the model again"
            )
        tensors = self._count("tensors", MAX_TENSORS)
        for _ in range(self._count("keys", MAX_KEYS)):
            self._key()
        ends = [self._tensor() for _ in range(tensors)]
        start = -(-self._offset // self._alignment) * self._alignment
        missing = start + max(ends, default=0) - len(self._data)
        if missing > 0:
            raise self._truncated(missing)

    def _truncated(self, missing: int) -> ModelError:
        return ModelError(f"{self._path} is truncated: at least {missing:,} bytes are missing; download it again")

    def _skip(self, size: int) -> None:
        if self._offset + size > len(self._data):
            raise self._truncated(self._offset + size - len(self._data))
        self._offset += size

    def _number(self, form: str) -> int:
        start = self._offset
        self._skip(struct.calcsize(form))
        return int(struct.unpack_from(form, self._data, start)[0])

    def _count(self, what: str, most: int) -> int:
        count = self._number("<Q")
        if count > most:
            raise ModelError(f"{self._path} announces {count:,} {what}, over the limit of {most:,}: it is damaged")
        return count

    def _text(self, longest: int | None = None) -> bytes:
        size = self._number("<Q")
        if longest is not None and size > longest:
            raise ModelError(f"{self._path} has a name of {size:,} bytes, over {longest:,}: it is damaged")
        start = self._offset
        self._skip(size)
        return self._data[start : self._offset] if longest is not None else b""

    def _key(self) -> None:
        name = self._text(MAX_NAME_BYTES)
        kind = self._number("<I")
        if name == b"general.alignment" and kind == 4:
            self._alignment = self._number("<I")
            # Numba reads float rows where they lie; ggml itself never writes less than 32.
            if self._alignment < 8 or self._alignment & (self._alignment - 1):
                raise ModelError(f"{self._path} has alignment {self._alignment}; a power of two from 8 is wanted")
        elif kind == ARRAY:
            self._array()
        else:
            self._value(kind)

    def _array(self) -> None:
        kind = self._number("<I")
        self._array_elements += (count := self._number("<Q"))
        if self._array_elements > MAX_ARRAY_ELEMENTS:
            raise ModelError(f"{self._path} has over {MAX_ARRAY_ELEMENTS:,} elements in its metadata: it is damaged")
        if kind == STRING:
            for _ in range(count):
                self._text()
        else:
            self._value(kind, count)

    def _value(self, kind: int, count: int = 1) -> None:
        if kind == STRING:
            self._text()
        elif kind in SCALAR_BYTES:
            self._skip(count * SCALAR_BYTES[kind])
        else:
            raise ModelError(f"{self._path} has a metadata value of unknown type {kind}: it is damaged")

    def _tensor(self) -> int:
        """Where the tensor ends, in bytes after the start of the data."""
        name = self._text(MAX_NAME_BYTES).decode(errors="replace")
        dimensions = self._number("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ModelError(f"{self._path}: tensor {name!r} has {dimensions} dimensions: the file is damaged")
        shape = [self._number("<Q") for _ in range(dimensions)]
        if not all(0 < size <= LARGEST_DIMENSION for size in shape):
            raise ModelError(f"{self._path}: tensor {name!r} has shape {shape}: the file is damaged")
        code, offset = self._number("<I"), self._number("<Q")
        if code not in FORMATS:
            known = {kind.value: kind.name for kind in GGMLQuantizationType}
            raise ModelError(
                f"{self._path}: tensor {name!r} is of type {known.get(code, code)}; "
                f"supported are {SUPPORTED_TYPES}: use a Q4_K_M, Q6_K, Q8_0 or F16 file of the model"
            )
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(code)]
        if shape[0] % block_elements or offset % self._alignment:
            raise ModelError(f"{self._path}: tensor {name!r} does not consist of whole blocks: the file is damaged")
        elements = 1
        for size in shape:
            elements *= size
        return offset + elements // block_elements * block_bytes
