"""Read a GGUF file: its metadata and its tensors. Both are checked on access.

Tensors are read into memory, and the file is not mapped.
"""

# The file is read into memory, on huge pages if possible, and not mapped. If a mapped file is cut short, a process
# that reads the missing part is killed (SIGBUS). If it is written to, weights change between two steps. Compared with
# a mapped file, a decode step of the demo's model takes 0.97 times as long with huge pages and 1.00 times with small
# pages (2.6 GHz Xeon, one thread).

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.errors import ModelError
from cbtop.compute.finite import first_not_finite
from cbtop.compute.gguf_header import Tensor, aligned
from cbtop.compute.gguf_metadata import GgufMetadata
from cbtop.compute.gguf_stream import GgufStream, ModelStream
from cbtop.compute.memory import available_bytes, on_huge_pages
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import BlockFormat, Bytes, Floats, QuantizedMatrix
from cbtop.compute.safetensors_stream import SafetensorsStream, is_safetensors
from cbtop.protocol.limits import reason

CACHE_LINE_BYTES = 64


@dataclass(slots=True)
class GgufFile:
    """An open model file. After `load` has read the requested matrices, the file is not needed any longer.

    Every tensor is checked on access. Raises ModelError if a tensor is missing or has an unexpected shape.
    """

    path: Path
    metadata: GgufMetadata
    _stream: ModelStream
    _tensors: dict[str, Tensor]
    is_safetensors: bool = False  # if so, RoPE pairs the halves of a head in every family
    _taken: set[str] = field(default_factory=set)
    _matrices: dict[str, QuantizedMatrix] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)  # name of a tensor -> its offset in the memory
    _memory: mmap.mmap | None = None  # the bytes of all matrices, which `load` reads from the file

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Open the file at `path` and check its header. It may be a safetensors model, too."""
        stream: ModelStream
        if is_other := is_safetensors(path):
            stream, header = SafetensorsStream.open(path)
        else:
            stream, header = GgufStream.open(path)
        return cls(path, GgufMetadata(stream, header.metadata), stream, header.tensors, is_safetensors=is_other)

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.close()

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def rows_of(self, name: str) -> int:
        """Return the number of rows of a matrix, which is the second dimension of its tensor."""
        shape = self._shape(name)
        if len(shape) != 2:
            raise ModelError(f"{self.path}: tensor {name!r} has shape {shape}; a matrix is wanted")
        return shape[1]

    def matrix(self, name: str, rows: int, columns: int) -> QuantizedMatrix:
        """Return the tensor as a weight matrix that `load` will fill. GGUF writes the shape as (columns, rows)."""
        self._expect(name, [columns, rows])
        return self._matrix(name, rows, columns)

    def matrices(self, name: str, count: int, rows: int, columns: int) -> QuantizedMatrix:
        """Return a tensor of three dimensions as one matrix, which consists of the rows of `count` matrices.

        `load` will fill it.
        """
        self._expect(name, [columns, rows, count])
        return self._matrix(name, count * rows, columns)

    def _matrix(self, name: str, rows: int, columns: int) -> QuantizedMatrix:
        data = np.frombuffer(self._place(name), np.uint8).reshape(rows, -1)
        data.flags.writeable = False
        matrix = self._matrices[name] = QuantizedMatrix(FORMATS[self._tensors[name].code], data, columns)
        return matrix

    def load(self) -> None:
        """Read the requested matrices.

        Raises ModelError if the file has changed since it was opened, or if a matrix contains NaN or infinity.
        """
        for name in self._matrices:
            self._stream.read(self._place(name), self._tensors[name].offset)
        self._stream.check_unchanged()
        for name, matrix in self._matrices.items():
            self._check_finite(name, matrix.data)

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """Return a finite copy of the tensor as float32 (size,)."""
        self._expect(name, [size])
        tensor = self._tensors[name]
        data = np.empty((1, tensor.size_bytes), np.uint8)
        self._stream.read(data.data.cast("B"), tensor.offset)
        self._check_finite(name, data)
        return FORMATS[tensor.code].dequantize(data).reshape(-1)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by its name. The number of columns comes first, as in the file."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def format_of(self, name: str) -> BlockFormat:
        """Return the format of a tensor in this file."""
        return FORMATS[self._tensors[name].code]

    def rows(self, name: str, together: int) -> Iterator[Floats]:
        """Yield the tensor as float32 (rows, columns), in pieces of at most `together` rows.

        The pieces are not stored in this object.

        Raises ModelError if a weight is not finite, or if the file has changed since it was opened.
        """
        tensor, block_format = self._tensors[name], self.format_of(name)
        row_bytes = block_format.row_bytes(tensor.shape[0])
        for at in range(0, tensor.size_bytes, together * row_bytes):
            data = np.empty((min(together, (tensor.size_bytes - at) // row_bytes), row_bytes), np.uint8)
            self._stream.read(data.data.cast("B"), tensor.offset + at)
            self._check_finite(name, data, at // row_bytes)
            yield block_format.dequantize(data)
        self._stream.check_unchanged()

    def untaken_tensors(self) -> list[str]:
        """Return the names of the tensors that were not requested."""
        return [name for name in self._tensors if name not in self._taken]

    def size_bytes(self, part: str = "") -> int:
        """Return the total bytes of the tensors with `part` in their names."""
        return sum(tensor.size_bytes for name, tensor in self._tensors.items() if part in name)

    def elements(self) -> int:
        """Return the number of weights in all tensors."""
        return sum(tensor.elements for tensor in self._tensors.values())

    def format_sizes(self) -> dict[str, int]:
        """Return the bytes of all tensors of each format, by the format's name."""
        sizes: dict[str, int] = {}
        for tensor in self._tensors.values():
            name = FORMATS[tensor.code].name
            sizes[name] = sizes.get(name, 0) + tensor.size_bytes
        return sizes

    def _shape(self, name: str) -> list[int]:
        if name not in self._tensors:
            raise ModelError(f"{self.path} has no tensor {name!r}: it is not a whole model; download it again")
        return list(self._tensors[name].shape)

    def _check_finite(self, name: str, data: Bytes, first_row: int = 0) -> None:
        block_format = FORMATS[self._tensors[name].code]
        if found := first_not_finite(block_format, data):
            row, block, what = found
            place = f"value {block:,}" if block_format.block_elements == 1 else f"the scale of block {block:,}"
            raise ModelError(
                f"{self.path}: tensor {name!r} has {what} as {place} of row {first_row + row:,}: it is damaged; "
                "download or convert it again"
            )

    def _place(self, name: str) -> memoryview:
        """Return the memory for the tensor's bytes. The first call allocates the memory for all tensors."""
        if self._memory is None:
            at = 0
            for other, tensor in self._tensors.items():
                self._places[other] = at
                at += aligned(tensor.size_bytes, CACHE_LINE_BYTES)
            self._memory = self._take(at)
        at = self._places[name]
        return memoryview(self._memory)[at : at + self._tensors[name].size_bytes]

    def _take(self, size_bytes: int) -> mmap.mmap:
        available = available_bytes()
        if available is not None and size_bytes > available:
            raise ModelError(
                f"{self.path} needs {size_bytes / 1e9:,.1f} GB of memory for its weights, and "
                f"{available / 1e9:,.1f} GB are available here; give a smaller model, or one with fewer bits a weight"
            )
        try:
            return on_huge_pages(size_bytes)
        except OSError as error:
            raise ModelError(
                f"{self.path} needs {size_bytes / 1e9:,.1f} GB of memory for its weights, which the system does not "
                f"give ({reason(error)}); give a smaller model"
            ) from error

    def _expect(self, name: str, wanted: list[int]) -> None:
        if (shape := self._shape(name)) != wanted:
            raise ModelError(f"{self.path}: tensor {name!r} has shape {shape}; its metadata wants {wanted}")
        self._taken.add(name)
