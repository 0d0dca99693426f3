"""The metadata of a GGUF file. Each value is checked when it is read."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from cbtop.compute.errors import ModelError
from cbtop.compute.gguf_header import SCALARS, STRING, Array, Value, texts_of
from cbtop.compute.gguf_stream import ModelStream


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """The metadata of a header: a dict from keys to values. Arrays are read from the file on access.

    The methods raise ModelError if a value is missing or does not have the expected type.
    """

    _stream: ModelStream
    values: dict[str, Value]
    _asked: set[str] = field(default_factory=set)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._bad_key(key, value, "a string")
        return value

    def integer(self, key: str, most: int, default: int | None = None, least: int = 1) -> int:
        """Return the value of `key`, which must be a whole number from `least` to `most`."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._bad_key(key, value, f"a whole number from {least} to {most:,}")
        return value

    def integer_of_all(self, key: str, most: int, count: int, default: int | None = None) -> int:
        """Return the value of `key`, which must be a whole number from 1 to `most`.

        The value may be an array of `count` equal numbers, one for each layer.
        """
        value = self._value(key)
        if not isinstance(value, Array):
            return self.integer(key, most, default)
        numbers = self.numbers(key) if value.count == count else []
        if len(set(numbers)) > 1:
            raise ModelError(
                f"{self._stream.path} has layers that differ in {key} ({min(numbers)} to {max(numbers)}), which is "
                "not supported; give a model whose layers are alike"
            )
        if not numbers or not isinstance(numbers[0], int) or not 1 <= numbers[0] <= most:
            raise self._bad_key(key, value, f"one for each of {count} layers, of whole numbers from 1 to {most:,},")
        return numbers[0]

    def flag(self, key: str, default: bool) -> bool:
        """Return the value of `key`, which must be true or false. Some converters write 1 and 0."""
        value = self._value(key, default)
        if not isinstance(value, int) or value not in (0, 1):
            raise self._bad_key(key, value, "true or false")
        return bool(value)

    def flags(self, key: str, count: int) -> tuple[bool, ...]:
        """Return the value of `key`, which must be an array of `count` values. Each must be true or false, or 1
        or 0.
        """
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
        """Return whether the key exists and its value is neither 0 nor false."""
        return self._value(key, 0) != 0

    def unasked_keys(self, prefix: str) -> dict[str, str]:
        """Return the keys that begin with `prefix`, were not requested, and have a value other than 0 and false.

        The result is a dict from these keys to their values as text, for an error message.
        """
        unasked = [key for key in self.values if key.startswith(prefix) and key not in self._asked]
        return {key: f"{str(self.values[key])[:60]!r}" for key in unasked if self.is_on(key)}

    def number(self, key: str, default: float | None = None) -> float:
        """Return the value of `key`, which must be a finite number above zero."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._bad_key(key, value, "a finite number above zero")
        return float(value)

    def number_or_zero(self, key: str, default: float) -> float:
        """Return the value of `key`, which must be a finite number that is not negative."""
        return 0.0 if self._value(key, default) == 0 else self.number(key, default)

    def numbers(self, key: str) -> list[int | float]:
        """Return the value of `key`, which must be an array of numbers."""
        value = self._value(key)
        if not isinstance(value, Array) or value.kind == STRING:
            raise self._bad_key(key, value, "an array of numbers")
        numbers: list[int | float] = np.frombuffer(self._elements(value), SCALARS[value.kind]).tolist()
        return numbers

    def texts(self, key: str) -> list[str]:
        """Return the value of `key`, which must be an array of strings."""
        value = self._value(key)
        if not isinstance(value, Array) or value.kind != STRING:
            raise self._bad_key(key, value, "an array of strings")
        try:
            return texts_of(self._elements(value), value.count)
        except struct.error as error:
            raise self._stream.written_to() from error

    def has_integer(self, key: str, number: int) -> bool:
        """Return whether the value of `key` equals `number`."""
        return self._value(key) == number

    def has_key(self, key: str) -> bool:
        return key in self.values

    def _elements(self, array: Array) -> bytes:
        elements = bytearray(array.size_bytes)
        self._stream.read(memoryview(elements), array.offset)
        return bytes(elements)

    def _value(self, key: str, default: Value | None = None) -> Value | None:
        self._asked.add(key)
        return self.values.get(key, default)

    def _bad_key(self, key: str, value: object, wanted: str) -> ModelError:
        met = "has no" if value is None else f"has {str(value)[:60]!r} as"
        return ModelError(f"{self._stream.path} {met} {key}; {wanted} is wanted: convert the model again")
