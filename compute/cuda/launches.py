"""The CUDA version of a kernel: its modules, and the launches of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

EACH = 256  # threads of a block if each has one number
WARP = 32  # threads that run one instruction (CUDA C++ Programming Guide, "SIMT architecture")
IN_REGISTERS = 2  # most fours of a row that a thread keeps

Dimensions = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class CudaModule:
    """CUDA C++ that is compiled in one piece after `prelude.PRELUDE`. Two modules are equal only if they are one
    object."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class CudaLaunch:
    """One launch. `arguments` are device arrays and NumPy scalars of the types that the entry takes, in its order."""

    module: CudaModule
    entry: str
    grid: Dimensions
    block: Dimensions
    arguments: tuple[Any, ...]
    shared_bytes: int = 0  # dynamic


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """A call of a library that launches: cuBLAS. Screens show `name`."""

    name: str
    call: Callable[[], object]


Launch = CudaLaunch | LibraryCall


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """`launches(*arguments)` returns the launches of a call, in order. Its arguments are the kernel's, with arrays on
    the device. `start`, `position` and `sequence` are int32 (1,) there, so that a graph reads them again in each run.
    It computes nothing, and only uses the shapes and types of arrays.

    `modules`: those that a launch may use.
    `together`: returns one launch for two calls of a brick; None if the kernel cannot join them.
    `with_codes(*arguments, codes, factors)`: the launches, which also write `quantize_rows` of the (last) output, as
    int8 products take it. `with_bf16(*arguments, rounded)`: likewise in bfloat16, as uint16, as products of many
    tokens take it.
    """

    modules: tuple[CudaModule, ...]
    launches: Callable[..., Sequence[Launch]]
    together: Callable[[tuple[Any, ...], tuple[Any, ...]], Sequence[CudaLaunch]] | None = None
    with_codes: Callable[..., Sequence[CudaLaunch]] | None = None
    with_bf16: Callable[..., Sequence[Launch]] | None = None


def line(blocks: int, threads: int) -> tuple[Dimensions, Dimensions]:
    """Return a grid of `blocks` blocks, each of `threads` threads."""
    return (blocks, 1, 1), (threads, 1, 1)


def of_each(numbers: int) -> tuple[Dimensions, Dimensions]:
    """Return a shape with a thread for each number."""
    return line(-(-numbers // EACH), EACH)


def of_fours(numbers: int) -> tuple[Dimensions, Dimensions]:
    """Return a shape with a thread for every four numbers; the last one may have fewer. Arrays begin at a multiple of
    16 bytes."""
    return of_each(-(-numbers // 4))


def whole_warps(threads: int, most: int = 1024) -> int:
    """Return `threads` rounded up to a whole number of warps, at most `most`."""
    return min(-(-threads // WARP) * WARP, most)


def of_rows(rows: int, columns: int) -> tuple[Dimensions, Dimensions]:
    """Return a shape with a block for each row. Threads have four numbers each; in a long row, fours in turn."""
    return line(rows, whole_warps(-(-columns // 4)))


def stays_in_registers(columns: int) -> bool:
    """Return whether the threads of `of_rows` can keep a row, which must be whole fours, at most IN_REGISTERS for
    each."""
    return columns % 4 == 0 and columns <= 4 * IN_REGISTERS * whole_warps(columns // 4)
