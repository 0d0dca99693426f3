"""What a CUDA version of a kernel is: its modules, and which launches a call is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

EACH = 256  # threads of a block where each has a number of its own
WARP = 32  # threads that run one instruction (CUDA C++ Programming Guide, "SIMT architecture")
IN_REGISTERS = 2  # fours of a row that a thread keeps at most

Dimensions = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class CudaModule:
    """CUDA C++ that is compiled in one piece, as `prelude.PRELUDE` has it begin; it is known by the object it is."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class CudaLaunch:
    """One launch. `arguments` are device arrays and NumPy scalars of the type that the entry takes, in its order."""

    module: CudaModule
    entry: str
    grid: Dimensions
    block: Dimensions
    arguments: tuple[Any, ...]
    shared_bytes: int = 0  # dynamic


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """What a library launches in a call: cuBLAS. `name` is what screens show."""

    name: str
    call: Callable[[], object]


Launch = CudaLaunch | LibraryCall


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """`launches(*arguments)`: what a call with the arguments of the kernel is, in order; arrays among them lie on the
    device; `start`, `position` and `sequence` are int32 (1,) there, which a graph that runs again reads anew. It
    computes nothing, and asks of arrays only their shapes and types.

    `modules` are those that a launch may be of. `together`: one launch in place of those of two calls of a brick;
    None where there is none. `with_codes(*arguments, codes, factors)`: the same, which also writes what
    `quantize_rows` makes of its (last) output, for products that take that in int8. `with_bf16(*arguments, rounded)`:
    likewise in bfloat16, as uint16, for products of many tokens.
    """

    modules: tuple[CudaModule, ...]
    launches: Callable[..., Sequence[Launch]]
    together: Callable[[tuple[Any, ...], tuple[Any, ...]], Sequence[CudaLaunch]] | None = None
    with_codes: Callable[..., Sequence[CudaLaunch]] | None = None
    with_bf16: Callable[..., Sequence[Launch]] | None = None


def line(blocks: int, threads: int) -> tuple[Dimensions, Dimensions]:
    """A grid of so many blocks, each of so many threads."""
    return (blocks, 1, 1), (threads, 1, 1)


def of_each(numbers: int) -> tuple[Dimensions, Dimensions]:
    """A thread for each of so many."""
    return line(-(-numbers // EACH), EACH)


def of_fours(numbers: int) -> tuple[Dimensions, Dimensions]:
    """A thread for each four of so many; the last one may have fewer. Arrays begin at a multiple of 16 bytes."""
    return of_each(-(-numbers // 4))


def whole_warps(threads: int, most: int = 1024) -> int:
    """`threads`, up to a whole number of warps, and at most `most`."""
    return min(-(-threads // WARP) * WARP, most)


def of_rows(rows: int, columns: int) -> tuple[Dimensions, Dimensions]:
    """A block for each row; its threads have four numbers each, or of a long row fours in turn."""
    return line(rows, whole_warps(-(-columns // 4)))


def stays_in_registers(columns: int) -> bool:
    """Whether the threads of `of_rows` can keep a row, of whole fours, of which each has IN_REGISTERS at most."""
    return columns % 4 == 0 and columns <= 4 * IN_REGISTERS * whole_warps(columns // 4)
