"""A GGUF file: its metadata and tensors, checked on access, and read into our own memory."""

# The file is not mapped: cutting a mapped file ends a process that reads the lost part (SIGBUS), and writing to it
# changes weights between two steps. The memory asks for huge pages. With them a decode step of the demo's model takes
# 0.97 of one from a mapped file, with small pages 1.00 (2.6 GHz Xeon, one thread).

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.errors import ModelError
from cbtop.compute.finite import first_not_finite
from cbtop.compute.gguf_header import SCALARS, STRING, Array, Tensor, Value, aligned, read_header, texts_of
from cbtop.compute.memory import available_bytes, on_huge_pages
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import Bytes, QuantizedMatrix
from cbtop.protocol.limits import reason

READ_BYTES = 64 << 20  # at a time: Ctrl-C works in between
CACHE_LINE_BYTES = 64


@dataclass(slots=True)
class GgufFile:
    """An open model file. `load` reads the matrices that were requested; after it the file is not needed any longer.

    Every value is checked on access. Raises ModelError if it is missing or not what was expected.
    """

    path: Path
    _stream: BinaryIO
    _opened: os.stat_result
    _metadata: dict[str, Value]
    _tensors: dict[str, Tensor]
    _taken: set[str] = field(default_factory=set)
    _asked: set[str] = field(default_factory=set)
    _matrices: dict[str, QuantizedMatrix] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)  # of tensors, in the memory
    _memory: mmap.mmap | None = None  # filled by `load`

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Open the file at `path` and check its header."""
        try:
            if path.is_dir():
                raise ModelError(f"{path} is a directory; give the path of a .gguf model in it")
            # Opening a pipe would wait for its writer.
            if path.exists() and not path.is_file():
                raise ModelError(f"{path} is not a regular file; give the path of a .gguf model")
            stream = path.open("rb")
        except FileNotFoundError as error:
            raise ModelError(f"{path} does not exist; give the path of a .gguf model") from error
        except (OSError, ValueError) as error:  # ValueError: no path at all
            raise _unreadable(path, error) from error
        try:
            opened = os.fstat(stream.fileno())
            header = read_header(stream, path)
        except OSError as error:
            stream.close()
            raise _unreadable(path, error) from error
        except BaseException:
            stream.close()
            raise
        return cls(path, stream, opened, header.metadata, header.tensors)

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.close()

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._bad_key(key, value, "a string")
        return value

    def integer(self, key: str, most: int, default: int | None = None, least: int = 1) -> int:
        """Return a whole number from `least` to `most`."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._bad_key(key, value, f"a whole number from {least} to {most:,}")
        return value

    def integer_of_all(self, key: str, most: int, count: int, default: int | None = None) -> int:
        """Return a whole number from 1 to `most`, also if it is an array of `count` of them, one a layer, that are
        all the same."""
        value = self._value(key)
        if not isinstance(value, Array):
            return self.integer(key, most, default)
        numbers = self.numbers(key) if value.count == count else []
        if len(set(numbers)) > 1:
            raise ModelError(
                f"{self.path} has layers that differ in {key} ({min(numbers)} to {max(numbers)}), which is not "
                "supported; give a model whose layers are alike"
            )
        if not numbers or not isinstance(numbers[0], int) or not 1 <= numbers[0] <= most:
            raise self._bad_key(key, value, f"one for each of {count} layers, of whole numbers from 1 to {most:,},")
        return numbers[0]

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false; some converters write them as 1 and 0."""
        value = self._value(key, default)
        if not isinstance(value, int) or value not in (0, 1):
            raise self._bad_key(key, value, "true or false")
        return bool(value)

    def flags(self, key: str, count: int) -> tuple[bool, ...]:
        """Return an array of `count` of true or false, or of 1 and 0."""
        value = self._value(key)
        flags = (
            self.numbers(key) if isinstance(value, Array) and value.kind != STRING and value.count == count else []
        )
        if not flags or not set(flags) <= {0, 1}:
            raise self._bad_key(key, value, f"one for each of {count} layers, of true or false,")
        return tuple(map(bool, flags))

    def is_array(self, key: str) -> bool:
        return isinstance(self._value(key), Array)

    def is_on(self, key: str) -> bool:
        """Return whether the key exists and is neither 0 nor false."""
        return self._value(key, 0) != 0

    def unasked_keys(self, prefix: str) -> dict[str, str]:
        """Return the keys beginning with `prefix` that are on and that nothing asked for, each with its value in
        words."""
        unasked = [key for key in self._metadata if key.startswith(prefix) and key not in self._asked]
        return {key: f"{str(self._metadata[key])[:60]!r}" for key in unasked if self.is_on(key)}

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above zero."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._bad_key(key, value, "a finite number above zero")
        return float(value)

    def number_or_zero(self, key: str, default: float) -> float:
        """Return a finite number from 0."""
        return 0.0 if self._value(key, default) == 0 else self.number(key, default)

    def numbers(self, key: str) -> list[int | float]:
        """Return the elements of an array of numbers."""
        value = self._value(key)
        if not isinstance(value, Array) or value.kind == STRING:
            raise self._bad_key(key, value, "an array of numbers")
        numbers: list[int | float] = np.frombuffer(self._elements(value), SCALARS[value.kind]).tolist()
        return numbers

    def texts(self, key: str) -> list[str]:
        """Return the elements of an array of strings."""
        value = self._value(key)
        if not isinstance(value, Array) or value.kind != STRING:
            raise self._bad_key(key, value, "an array of strings")
        try:
            return texts_of(self._elements(value), value.count)
        except struct.error as error:
            raise self._written_to() from error

    def has_integer(self, key: str, number: int) -> bool:
        """Return whether the value of `key` is `number`."""
        return self._value(key) == number

    def has_key(self, key: str) -> bool:
        return key in self._metadata

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def rows_of(self, name: str) -> int:
        """Return the second dimension of a matrix, its number of rows."""
        shape = self._shape(name)
        if len(shape) != 2:
            raise ModelError(f"{self.path}: tensor {name!r} has shape {shape}; a matrix is wanted")
        return shape[1]

    def matrix(self, name: str, rows: int, columns: int) -> QuantizedMatrix:
        """Return the tensor as a weight matrix that `load` will fill. GGUF writes its shape as (columns, rows)."""
        self._expect(name, [columns, rows])
        return self._matrix(name, rows, columns)

    def matrices(self, name: str, count: int, rows: int, columns: int) -> QuantizedMatrix:
        """Return `count` matrices, one below the other, from a tensor of three dimensions. `load` will fill them."""
        self._expect(name, [columns, rows, count])
        return self._matrix(name, count * rows, columns)

    def _matrix(self, name: str, rows: int, columns: int) -> QuantizedMatrix:
        data = np.frombuffer(self._place(name), np.uint8).reshape(rows, -1)
        data.flags.writeable = False
        matrix = self._matrices[name] = QuantizedMatrix(FORMATS[self._tensors[name].code], data, columns)
        return matrix

    def load(self) -> None:
        """Read the matrices. Raises ModelError if the file was written to since it was opened, or if one is not
        finite."""
        for name in self._matrices:
            self._read(self._place(name), self._tensors[name].offset)
        now = os.fstat(self._stream.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise self._written_to()
        for name, matrix in self._matrices.items():
            self._check_finite(name, matrix.data)

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """Return the tensor as float32 (size,), copied and finite."""
        self._expect(name, [size])
        tensor = self._tensors[name]
        data = np.empty((1, tensor.size_bytes), np.uint8)
        self._read(data.data.cast("B"), tensor.offset)
        self._check_finite(name, data)
        return FORMATS[tensor.code].dequantize(data).reshape(-1)

    def untaken_tensors(self) -> list[str]:
        """Return the tensors that nothing asked for."""
        return [name for name in self._tensors if name not in self._taken]

    def size_bytes(self, part: str = "") -> int:
        """Return the bytes of all tensors with `part` in their name."""
        return sum(tensor.size_bytes for name, tensor in self._tensors.items() if part in name)

    def elements(self) -> int:
        """Return the number of weights of all tensors."""
        return sum(tensor.elements for tensor in self._tensors.values())

    def format_sizes(self) -> dict[str, int]:
        """Return the bytes of tensors by the name of their format."""
        sizes: dict[str, int] = {}
        for tensor in self._tensors.values():
            name = FORMATS[tensor.code].name
            sizes[name] = sizes.get(name, 0) + tensor.size_bytes
        return sizes

    def _shape(self, name: str) -> list[int]:
        if name not in self._tensors:
            raise ModelError(f"{self.path} has no tensor {name!r}: it is not a whole model; download it again")
        return list(self._tensors[name].shape)

    def _check_finite(self, name: str, data: Bytes) -> None:
        block_format = FORMATS[self._tensors[name].code]
        if found := first_not_finite(block_format, data):
            row, block, what = found
            place = f"value {block:,}" if block_format.block_elements == 1 else f"the scale of block {block:,}"
            raise ModelError(
                f"{self.path}: tensor {name!r} has {what} as {place} of row {row:,}: it is damaged; download or "
                "convert it again"
            )

    def _elements(self, array: Array) -> bytes:
        elements = bytearray(array.size_bytes)
        self._read(memoryview(elements), array.offset)
        return bytes(elements)

    def _place(self, name: str) -> memoryview:
        """Return the memory for the tensor's bytes. The first call takes memory for all tensors."""
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

    def _read(self, into: memoryview, offset: int) -> None:
        """Fill `into` with the file's bytes from `offset` on."""
        done = 0
        while done < len(into):
            try:
                got = os.preadv(self._stream.fileno(), [into[done : done + READ_BYTES]], offset + done)
            except OSError as error:
                raise _unreadable(self.path, error) from error
            if not got:
                raise ModelError(f"{self.path} was cut short while it was read; run it again once it is whole")
            done += got

    def _expect(self, name: str, wanted: list[int]) -> None:
        if (shape := self._shape(name)) != wanted:
            raise ModelError(f"{self.path}: tensor {name!r} has shape {shape}; its metadata wants {wanted}")
        self._taken.add(name)

    def _value(self, key: str, default: Value | None = None) -> Value | None:
        self._asked.add(key)
        return self._metadata.get(key, default)

    def _written_to(self) -> ModelError:
        return ModelError(f"{self.path} was written to while it was read; run it again once it is whole")

    def _bad_key(self, key: str, value: object, wanted: str) -> ModelError:
        met = "has no" if value is None else f"has {str(value)[:60]!r} as"
        return ModelError(f"{self.path} {met} {key}; {wanted} is wanted: convert the model again")


def _unreadable(path: Path, error: OSError | ValueError) -> ModelError:
    why = reason(error) if isinstance(error, OSError) else error
    return ModelError(f"{path} cannot be read ({why}); give a readable .gguf model")
