"""A launch as CUDA's driver takes it: packed once, launched as often as one likes.

CuPy packs the arguments of each launch anew, and has no launch attributes. Structures as cuda.h has CUlaunchConfig
and CUlaunchAttribute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from cbtop.compute.cuda.launches import CudaLaunch
from cbtop.compute.errors import ComputeError

PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID: it may begin while what was launched before ends


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("before", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


_EARLY = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1)


class PreparedLaunch:
    """Called, it launches `one`, with those arguments, on `stream`. Arrays among them live as long as this."""

    def __init__(
        self, driver: Any, function: int, one: CudaLaunch, arguments: Sequence[Any], stream: int, *, is_early: bool
    ) -> None:
        """`driver`: the library; `function`: a CUfunction."""
        self._alive = arguments
        self._entry, self._driver = one.entry, driver
        self._words = words = (ctypes.c_uint64 * len(arguments))(*map(_word, arguments))
        at, size = ctypes.addressof(words), ctypes.sizeof(ctypes.c_uint64)
        self._pointers = (ctypes.c_void_p * len(arguments))(*range(at, at + size * len(arguments), size))
        attributes = (ctypes.addressof(_EARLY), 1) if is_early else (None, 0)
        self._config = Config(one.grid, one.block, one.shared_bytes, stream, *attributes)
        self._call = driver.cuLaunchKernelEx
        given = ctypes.addressof(self._config), function, ctypes.addressof(self._pointers)
        self._given = *map(ctypes.c_void_p, given), None

    def __call__(self) -> None:
        """ComputeError where the driver refuses."""
        status = self._call(*self._given)
        if status:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.byref(name))
            raise ComputeError(f"{self._entry} cannot be launched: {(name.value or b'?').decode()}")


def _word(value: Any) -> int:
    """The address of an array; a number in the first bytes of a word, where a pointer to one of its type reads it."""
    if isinstance(value, np.generic):
        return int.from_bytes(value.tobytes(), "little")
    return int(value.data.ptr)
