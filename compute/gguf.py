"""GGUF files: metadata and tensors of one, checked as they are asked for."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cbtop.compute.errors import ModelError
from cbtop.compute.gguf_header import SCALARS, STRING, Array, Tensor, Value, read_header, texts_of
from cbtop.compute.quantization import FORMATS
from cbtop.compute.quantization.base import QuantizedMatrix


@dataclass(slots=True)
class GgufFile:
    """An open model file: its metadata and its tensors, mapped, not read.

    Everything asked for is checked, and raises ModelError where it is missing or not what was wanted. The file must
    keep its length while it is used: the system ends a process that reads what was cut off (SIGBUS).
    """

    path: Path
    _metadata: dict[str, Value]
    _tensors: dict[str, Tensor]
    _data: NDArray[np.uint8]
    _taken: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Check and map the file at `path`."""
        try:
            if path.is_dir():
                raise ModelError(f"{path} is a directory; give the path of a .gguf model in it")
            # Opening a pipe would wait for its writer.
            if path.exists() and not path.is_file():
                raise ModelError(f"{path} is not a regular file; give the path of a .gguf model")
            with path.open("rb") as stream:
                header = read_header(stream, path)
                mapped = mmap.mmap(stream.fileno(), header.size_bytes, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ModelError(f"{path} does not exist; give the path of a .gguf model") from error
        except (OSError, ValueError) as error:  # ValueError: it has become shorter
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ModelError(f"{path} cannot be read ({reason}); give a readable .gguf model") from error
        return cls(path, header.metadata, header.tensors, np.frombuffer(mapped, np.uint8))

    def text(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get(key, default)
        if not isinstance(value, str):
            raise self._bad_key(key, value, "a string")
        return value

    def integer(self, key: str, most: int, default: int | None = None) -> int:
        """A whole number from 1 to `most`."""
        value = self._metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self._bad_key(key, value, f"a whole number from 1 to {most:,}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._metadata.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._bad_key(key, value, "a finite number above zero")
        return float(value)

    def numbers(self, key: str) -> list[int | float]:
        """The elements of an array of numbers."""
        value = self._metadata.get(key)
        if not isinstance(value, Array) or value.kind == STRING:
            raise self._bad_key(key, value, "an array of numbers")
        numbers: list[int | float] = np.frombuffer(self._elements(value), SCALARS[value.kind]).tolist()
        return numbers

    def texts(self, key: str) -> list[str]:
        """The elements of an array of strings."""
        value = self._metadata.get(key)
        if not isinstance(value, Array) or value.kind != STRING:
            raise self._bad_key(key, value, "an array of strings")
        return texts_of(self._elements(value), value.count)

    def has_key(self, key: str) -> bool:
        return key in self._metadata

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def rows_of(self, name: str) -> int:
        """The second dimension of a matrix: how many rows it has."""
        shape = self._shape(name)
        if len(shape) != 2:
            raise ModelError(f"{self.path}: tensor {name!r} has shape {shape}; a matrix is wanted")
        return shape[1]

    def matrix(self, name: str, rows: int, columns: int) -> QuantizedMatrix:
        """The tensor as a weight matrix; in GGUF its dimensions stand as (columns, rows)."""
        self._expect(name, [columns, rows])
        return QuantizedMatrix(FORMATS[self._tensors[name].code], self._bytes(name).reshape(rows, -1), columns)

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """The tensor as float32 (size,), copied and finite."""
        self._expect(name, [size])
        values = FORMATS[self._tensors[name].code].dequantize(self._bytes(name).reshape(1, -1)).reshape(-1)
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: tensor {name!r} holds values that are not finite: the file is damaged")
        return values

    def untaken_tensors(self) -> list[str]:
        """The tensors that nothing asked for."""
        return [name for name in self._tensors if name not in self._taken]

    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self._tensors.values())

    def elements(self) -> int:
        """Weights of all tensors."""
        return sum(tensor.elements for tensor in self._tensors.values())

    def format_sizes(self) -> dict[str, int]:
        """Bytes of tensors by the name of their format."""
        sizes: dict[str, int] = {}
        for tensor in self._tensors.values():
            name = FORMATS[tensor.code].name
            sizes[name] = sizes.get(name, 0) + tensor.size_bytes
        return sizes

    def _shape(self, name: str) -> list[int]:
        if name not in self._tensors:
            raise ModelError(f"{self.path} has no tensor {name!r}: it is not a whole model; download it again")
        return list(self._tensors[name].shape)

    def _bytes(self, name: str) -> NDArray[np.uint8]:
        tensor = self._tensors[name]
        return self._data[tensor.offset : tensor.offset + tensor.size_bytes]

    def _elements(self, array: Array) -> bytes:
        return self._data[array.offset : array.offset + array.size_bytes].tobytes()

    def _expect(self, name: str, wanted: list[int]) -> None:
        if (shape := self._shape(name)) != wanted:
            raise ModelError(f"{self.path}: tensor {name!r} has shape {shape}; its metadata wants {wanted}")
        self._taken.add(name)

    def _bad_key(self, key: str, value: object, wanted: str) -> ModelError:
        met = "has no" if value is None else f"has {str(value)[:60]!r} as"
        return ModelError(f"{self.path} {met} {key}; {wanted} is wanted: convert the model again")
