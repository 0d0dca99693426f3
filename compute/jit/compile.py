"""Numba for all kernels: decorators with types, a shared cache, and bit operations."""

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

untyped: Any = numba  # the stubs of Numba for type checkers do not have everything
# Numba makes its settings at run time, so type checkers do not know them.
settings: Any = numba.config
_Dispatcher: Any = CPUDispatcher  # Numba's base class has no type annotations

if settings.DISABLE_JIT:
    raise ComputeError("NUMBA_DISABLE_JIT is set: kernels are for vectors, which Python has none of; unset it")

HALF_TO_SINGLE_BIAS = np.int32((127 - 15) << 23)  # difference between the exponent biases of binary32 and binary16
SMALLEST_NORMAL_HALF = np.int32(0x0400)
# If the bits of a binary16 are at least this number, it is infinity or NaN, because all exponent bits are set. An
# infinite or NaN binary32 also has all exponent bits set.
INFINITE_HALF = np.int32(0x7C00)
SMALLEST_NORMAL_HALF_VALUE = np.float32(2.0**-14)


# Numba's settings (NUMBA_OPT, …) that change the code of a function.
CODE_SETTINGS = (
    "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "LLVM_REFPRUNE_PASS", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "ENABLE_AVX",
    "ENABLE_PROFILING",
)  # fmt: skip
# These options of Numba save the time to compile wrappers for calls from C.
OPTIONS = {
    "nopython": True, "error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True, "debug": False,
    "boundscheck": None,
}  # fmt: skip


def usable_numba_cache() -> Path | None:
    """Create and return the directory for our compiled kernels. Returns None if the directory cannot be written."""
    how = (getattr(settings, name) for name in CODE_SETTINGS)
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {[*how]}".encode()).hexdigest()
    return use_directory(Path(settings.CACHE_DIR) if settings.CACHE_DIR else cache_dir(), digest[:16])


NUMBA_CACHE = usable_numba_cache()

prange = numba.prange


class _Kernel(_Dispatcher):  # type: ignore[misc]
    """A function that Numba compiles for the argument types of each call. Its machine code is stored in the cache."""

    def __init__(self, function: Any, types: Any = None, options: Any = None, compiler: Any = KernelCompiler) -> None:
        super().__init__(function, types or {}, options, compiler)
        if NUMBA_CACHE is not None:
            self._cache = FunctionCache(NUMBA_CACHE, function, self.targetoptions)

    def is_kept(self) -> bool:
        """Return whether the cache contains code for any argument types. Returns True if there is no cache."""
        return not isinstance(self._cache, FunctionCache) or self._cache.is_kept()


class _Inlined(_Dispatcher):  # type: ignore[misc]
    """A function that only compiled code can call. It has no machine code that Python could call."""

    def _insert(self, *_: Any) -> None:
        """Do nothing. Otherwise, Python would try to call machine code that does not exist."""

    def _compile_for_args(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"{self.py_func.__qualname__} is for compiled code alone")


def _options(**own: Any) -> dict[str, Any]:
    return {**OPTIONS, **own}


def is_kept(function: Any) -> bool:
    """Return whether the cache contains code of `function`, for any argument types.

    Without a cache, the result is True. The function must have one of the decorators below.
    """
    return bool(function.is_kept())


def jit(function: Function) -> Function:
    """Compile a function for one thread.

    fastmath lets LLVM reorder sums, and so vectorise them. error_model="numpy" makes a division by zero return
    infinity or NaN. A division that raises would prevent vectorisation (8x on the softmax).
    """
    return cast(Function, _Kernel(function, options=_options(fastmath=True)))


def jit_as_written(function: Function) -> Function:
    """Compile a function like `jit`, but without fastmath, for code that rounds to whole numbers.

    With fastmath, LLVM may turn x * (1 / y) into x / y. The last bit may then differ, and decide how a value halfway
    between two numbers is rounded.
    """
    return cast(Function, _Kernel(function, options=_options()))


def _inlined(function: Function, *, fastmath: bool) -> Function:
    options = _options(forceinline=True, no_cpython_wrapper=True, fastmath=fastmath)
    return cast(Function, _Inlined(function, {}, options, InlinedCompiler))


def jit_inlined(function: Function) -> Function:
    """Compile a function that LLVM always inlines.

    Use it for functions that have five array arguments and are called for every row. Only compiled code can call such
    a function. Its code is not cached.
    """
    return _inlined(function, fastmath=True)


def jit_inlined_as_written(function: Function) -> Function:
    """Compile a function like `jit_inlined`, but without fastmath.

    Its callers must be compiled by `jit_as_written`.
    """
    return _inlined(function, fastmath=False)


def jit_parallel(function: Function) -> Function:
    """Compile a function that spreads `prange` over Numba's threads."""
    return cast(Function, _Kernel(function, options=_options(fastmath=True, parallel=True), compiler=Compiler))


def copy_of(function: Function, name: str, **functions: Any) -> Function:
    """Return a copy of `function`, called `name`.

    In the copy, `functions` replace the globals that have the same names. The copy is not compiled yet: use one of
    the decorators above.

    Formats share code in this way: the code is compiled for each format that runs, with the functions of the format.
    (A closure would be compiled again in every process, because its key in the cache contains the ids of the
    functions that it uses.)
    """
    copied = FunctionType(function.__code__, {**function.__globals__, **functions}, name)
    # The cache identifies a function by its file and this name, so each copy needs a name of its own.
    copied.__qualname__ = name
    return cast(Function, copied)


@jit
def half_to_float(bits: Any) -> Any:
    """Return the 16 bits of an IEEE binary16 as a float32. The conversion is exact, also for infinities and NaN.

    The function uses shifts and additions. The conversion instruction for one number is 2-3x slower, because it has a
    false dependency. Multiplying by 2^112 is shorter, but processors handle subnormal numbers slowly. The scales of
    Q6_K are often subnormal, so products of Q6_K took three times as long.
    """
    wide = np.int32(bits)
    sign = np.int32((wide & np.int32(0x8000)) << np.int32(16))
    magnitude = np.int32(wide & np.int32(0x7FFF))
    bias = HALF_TO_SINGLE_BIAS if magnitude < INFINITE_HALF else np.int32(2 * HALF_TO_SINGLE_BIAS)
    shifted = np.int32(np.int32(magnitude << np.int32(13)) + bias)
    normal = np.int32(sign | shifted).view(np.float32)
    # A subnormal number has no leading one. Add this one to the bits, and subtract it again from the float32.
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
    """Return the little-endian uint32 at data[row, offset] of a uint8 matrix. LLVM turns this into one load."""
    return np.uint32(
        np.uint32(data[row, offset])
        | np.uint32(np.uint32(data[row, offset + np.uint64(1)]) << np.uint32(8))
        | np.uint32(np.uint32(data[row, offset + np.uint64(2)]) << np.uint32(16))
        | np.uint32(np.uint32(data[row, offset + np.uint64(3)]) << np.uint32(24))
    )
