"""Numba as every kernel uses it: one typed decorator, one cache, and shared bit tricks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import llvmlite
import numba
import numpy as np
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher

from cbtop.compute.errors import ComputeError
from cbtop.compute.jit.compilers import InlinedCompiler, KernelCompiler
from cbtop.compute.jit.function_cache import FunctionCache
from cbtop.compute.jit.kernel_cache import use_directory
from cbtop.protocol.cache import cache_dir

Function = TypeVar("Function", bound=Callable[..., Any])

untyped: Any = numba  # its stubs do not export all of it
settings: Any = numba.config  # its attributes are made at run time, unknown to type checkers
_Dispatcher: Any = CPUDispatcher  # without types

if settings.DISABLE_JIT:
    raise ComputeError("NUMBA_DISABLE_JIT is set: kernels are for vectors, which Python has none of; unset it")

HALF_TO_SINGLE_BIAS = np.int32((127 - 15) << 23)  # the exponent's bias in binary32 minus the bias in binary16
SMALLEST_NORMAL_HALF = np.int32(0x0400)
INFINITE_HALF = np.int32(0x7C00)  # not finite from here on: the exponent is all ones, also in binary32
SMALLEST_NORMAL_HALF_VALUE = np.float32(2.0**-14)


# Numba's settings (NUMBA_OPT, …) that change the code of a function.
CODE_SETTINGS = (
    "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "LLVM_REFPRUNE_PASS", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "ENABLE_AVX",
    "ENABLE_PROFILING",
)  # fmt: skip
# Wrappers for calls from C would take time to compile.
OPTIONS = {
    "nopython": True, "error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True, "debug": False,
    "boundscheck": None,
}  # fmt: skip


def _usable_numba_cache() -> Path | None:
    """Make the directory for our compiled kernels and return it, or None if nothing can be written."""
    how = (getattr(settings, name) for name in CODE_SETTINGS)
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {[*how]}".encode()).hexdigest()
    return use_directory(Path(settings.CACHE_DIR) if settings.CACHE_DIR else cache_dir(), digest[:16])


NUMBA_CACHE = _usable_numba_cache()

prange = numba.prange


class _Kernel(_Dispatcher):  # type: ignore[misc]
    """A function that Numba compiles for the types of each call, with its code in the cache."""

    def __init__(self, function: Any, types: Any = None, options: Any = None, compiler: Any = KernelCompiler) -> None:
        super().__init__(function, types or {}, options, compiler)
        if NUMBA_CACHE is not None:
            self._cache = FunctionCache(NUMBA_CACHE, function, self.targetoptions)

    def is_kept(self) -> bool:
        """Return whether compiled code is in the cache, for any types of arguments. True without a cache."""
        return not isinstance(self._cache, FunctionCache) or self._cache.is_kept()


class _Inlined(_Dispatcher):  # type: ignore[misc]
    """A function for compiled code alone. It has no machine code, which Python would call."""

    def _insert(self, *_: Any) -> None:
        """Do nothing: otherwise Python would call missing machine code."""

    def _compile_for_args(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"{self.py_func.__qualname__} is for compiled code alone")


def _options(**own: Any) -> dict[str, Any]:
    return {**OPTIONS, **own}


def is_kept(function: Any) -> bool:
    """Return whether compiled code of a function under one of the decorators below is in the cache, for any types of
    arguments. True without a cache."""
    return bool(function.is_kept())


def jit(function: Function) -> Function:
    """Compile for one thread.

    fastmath lets sums be reordered, hence vectorised. error_model="numpy": a division that raises on zero
    blocks vectorisation (8x on the softmax).
    """
    return cast(Function, _Kernel(function, options=_options(fastmath=True)))


def jit_as_written(function: Function) -> Function:
    """Like `jit`, without fastmath, for code that rounds to whole numbers. With fastmath LLVM may turn x * (1 / y)
    into x / y, and the last bit decides how a value halfway between two is rounded."""
    return cast(Function, _Kernel(function, options=_options()))


def _inlined(function: Function, *, fastmath: bool) -> Function:
    options = _options(forceinline=True, no_cpython_wrapper=True, fastmath=fastmath)
    return cast(Function, _Inlined(function, {}, options, InlinedCompiler))


def jit_inlined(function: Function) -> Function:
    """Like `jit`, but LLVM always inlines the function. For functions that take five arrays and
    are called for every row.

    For compiled code only: Python has no machine code to call, and nothing is cached.
    """
    return _inlined(function, fastmath=True)


def jit_inlined_as_written(function: Function) -> Function:
    """Like `jit_inlined`, without fastmath. Callers must not use fastmath either (`jit_as_written`)."""
    return _inlined(function, fastmath=False)


def jit_parallel(function: Function) -> Function:
    """Compile with `prange` spread over Numba's threads."""
    return cast(Function, _Kernel(function, options=_options(fastmath=True, parallel=True), compiler=Compiler))


def copy_of(function: Function, name: str, **functions: Any) -> Function:
    """Return a copy of `function`, called `name`, in which `functions` replace the globals of these names.

    It is not compiled: use a decorator above. Code that several formats share is compiled for each format that runs,
    with its functions inside. (A closure would be, too, but again in every process, because Numba's cache identifies
    a closure by the functions it holds, and those by the process.)
    """
    copied = FunctionType(function.__code__, {**function.__globals__, **functions}, name)
    copied.__qualname__ = name  # with the file, it is the name in the cache
    return cast(Function, copied)


@jit
def half_to_float(bits: Any) -> Any:
    """Return the float32 of the 16 bits of an IEEE binary16; exact, for infinities and NaN, too.

    It uses shifts and additions. A scalar conversion instruction makes a false dependency (2-3x). The shorter way,
    multiplying by 2^112, takes subnormal numbers through the processor's slow path. They are common: three times on
    Q6_K, because its scales of scales are that small.
    """
    wide = np.int32(bits)
    sign = np.int32((wide & np.int32(0x8000)) << np.int32(16))
    magnitude = np.int32(wide & np.int32(0x7FFF))
    bias = HALF_TO_SINGLE_BIAS if magnitude < INFINITE_HALF else np.int32(2 * HALF_TO_SINGLE_BIAS)
    shifted = np.int32(np.int32(magnitude << np.int32(13)) + bias)
    normal = np.int32(sign | shifted).view(np.float32)
    # As if it had the leading one that subnormals lack, and then without it.
    leading = np.int32(shifted + np.int32(1 << 23)).view(np.float32) - SMALLEST_NORMAL_HALF_VALUE
    subnormal = -leading if sign else leading
    return normal if magnitude >= SMALLEST_NORMAL_HALF else subnormal


@jit_inlined
def load_half(data: Any, row: Any, offset: Any) -> Any:
    """Return the little-endian binary16 at data[row, offset] of a uint8 matrix, as float32."""
    return half_to_float(
        np.int32(data[row, offset]) | np.int32(np.int32(data[row, offset + np.uint64(1)]) << np.int32(8))
    )


@jit_inlined
def load_word(data: Any, row: Any, offset: Any) -> Any:
    """Return the little-endian uint32 at data[row, offset] of a uint8 matrix; LLVM makes it one load."""
    return np.uint32(
        np.uint32(data[row, offset])
        | np.uint32(np.uint32(data[row, offset + np.uint64(1)]) << np.uint32(8))
        | np.uint32(np.uint32(data[row, offset + np.uint64(2)]) << np.uint32(16))
        | np.uint32(np.uint32(data[row, offset + np.uint64(3)]) << np.uint32(24))
    )
