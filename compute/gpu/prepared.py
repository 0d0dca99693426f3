"""Prepare a launch for CUDA's driver, so that it is packed once and launched any number of times.

CuPy packs the arguments again for each launch, and does not support launch attributes. A pass has hundreds of
launches, and the device waits while they are packed.

Here, all words of a launch are in one array: the arguments, a pointer to each argument, and the seven words of
CUlaunchConfig (cuda.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from cbtop.compute.cuda.launches import CudaLaunch
from cbtop.compute.errors import ComputeError

WORD_BYTES = 8
# First the words for grid, block and shared bytes (32 bits each). Then the words for the stream, the attributes and
# the number of attributes.
CONFIG_WORDS = 7
# A CUlaunchAttribute that turns on CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION. With it, a launch may begin
# before the previous one ends.
_EARLY = np.array([6, 1, *[0] * 7], np.uint64)
_EARLY_AT = _EARLY.ctypes.data


def driver() -> Any:
    """Return the driver library that CuPy has loaded."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


class PreparedLaunch:
    """Launches the kernel `one` with the given arguments on `stream` when it is called.

    This object keeps the arrays among the arguments alive.
    """

    __slots__ = ("_alive", "_call", "_config_at", "_driver", "_entry", "_function", "_pointers_at", "_words")

    def __init__(
        self, driver: Any, function: int, one: CudaLaunch, arguments: Sequence[Any], stream: int, *, is_early: bool
    ) -> None:
        """Pack all words of the launch. `driver` is the driver library, and `function` is a CUfunction."""
        self._alive, self._entry, self._function = arguments, one.entry, function
        self._driver, self._call = driver, driver.cuLaunchKernelEx
        count, (x, y, z), (a, b, c) = len(arguments), one.grid, one.block
        self._words = words = np.empty(2 * count + CONFIG_WORDS, np.uint64)
        at = words.ctypes.data
        self._pointers_at = pointers_at = at + count * WORD_BYTES
        self._config_at = pointers_at + count * WORD_BYTES
        attributes = (_EARLY_AT, 1) if is_early else (0, 0)
        words[:] = [
            *map(_word, arguments),
            *range(at, pointers_at, WORD_BYTES),
            *(x | y << 32, z | a << 32, b | c << 32, one.shared_bytes, stream, *attributes),
        ]

    def __call__(self) -> None:
        """Launch the kernel. Raises ComputeError if the driver refuses."""
        status = self._call(self._config_at, self._function, self._pointers_at, None)
        if status:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.byref(name))
            raise ComputeError(f"{self._entry} cannot be launched: {(name.value or b'?').decode()}")


def _word(value: Any) -> int:
    """Return an argument as a word: the address of an array, or a number in the first bytes of the word.

    The kernel gets a pointer to the word, and reads it as the type of its parameter.
    """
    if isinstance(value, np.generic):
        return int.from_bytes(value.tobytes(), "little")
    return int(value.data.ptr)
