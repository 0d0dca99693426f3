"""The CUDA version of a kernel: its modules, and the launches that compute a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

EACH = 256  # number of threads of a block, if each thread computes one number
# number of threads of a warp, which run one instruction together (CUDA C++ Programming Guide, "SIMT architecture")
WARP = 32
IN_REGISTERS = 2  # largest number of groups of four numbers of a row that one thread keeps in registers

Dimensions = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class CudaModule:
    """CUDA C++ that is compiled in one piece after `prelude.PRELUDE`. A module is equal only to itself."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class CudaLaunch:
    """One launch of a kernel.

    `arguments` are device arrays and NumPy scalars. Their types and order are as in the entry's parameters.
    """

    module: CudaModule
    entry: str
    grid: Dimensions
    block: Dimensions
    arguments: tuple[Any, ...]
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """A call of a library (cuBLAS) that launches kernels itself. Screens show the call as `name`."""

    name: str
    call: Callable[[], object]


Launch = CudaLaunch | LibraryCall


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """The CUDA version of a kernel. `launches(*arguments)` returns the launches of a call, in order.

    The arguments are the same as for the kernel, but their arrays are on the device. The arguments `start`,
    `position` and `sequence` are int32 (1,) on the device, so that a graph reads the new values in each run.
    `launches` computes nothing. It uses only the shapes and types of arrays.

    `modules`: all modules that a launch may use.
    `together`: a function that returns one launch for two calls of a brick, or None if the kernel cannot join them.
    `with_codes(*arguments, codes, factors)`: returns launches that also write `quantize_rows` of the last output, for
    int8 products.
    `with_bf16(*arguments, rounded)`: returns launches that also write the last output in bfloat16, as uint16, for
    products of many tokens.
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
    """Return a grid and a block with one thread for each number."""
    return line(-(-numbers // EACH), EACH)


def of_fours(numbers: int) -> tuple[Dimensions, Dimensions]:
    """Return a grid and a block with one thread for every four numbers. The last thread may have fewer numbers.

    The arrays must begin at an address that is a multiple of 16 bytes.
    """
    return of_each(-(-numbers // 4))


def whole_warps(threads: int, most: int = 1024) -> int:
    """Return `threads` rounded up to a whole number of warps, but at most `most`."""
    return min(-(-threads // WARP) * WARP, most)


def of_rows(rows: int, columns: int) -> tuple[Dimensions, Dimensions]:
    """Return a grid with one block for each row, and the number of threads of a block.

    A thread processes one group of four numbers, or several groups of a long row.
    """
    return line(rows, whole_warps(-(-columns // 4)))


def stays_in_registers(columns: int) -> bool:
    """Return whether the threads of a block (see `of_rows`) can keep a row in registers.

    The row must consist of whole groups of four, at most IN_REGISTERS for each thread.
    """
    return columns % 4 == 0 and columns <= 4 * IN_REGISTERS * whole_warps(columns // 4)
