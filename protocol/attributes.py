"""The static attributes of a node of the execution graph, besides its name. There is one class for each kind of node.

A new attribute is declared only here. Definitions and graph nodes inherit these classes, `Node` holds them, and the
codec sends their fields, so no other code changes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cbtop.protocol.vocabulary import TransferDirection

# `Work.dtype` begins with this text if the type of the multiplied numbers cannot be known. The type of the weights
# may follow, such as `unknown type (weights in float64)`.
UNKNOWN_TYPE = "unknown type"
MAX_QUANTITY = 1e24  # limit for FLOP, bytes, budgets and rates; sums of larger numbers could overflow

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Work:
    """The floating-point operations (FLOP) of a call and the bytes that it moves, as linear functions of its
    `elements`.

    A call with `n` elements does `flops_per_call + n * flops_per_element` operations and touches `bytes_per_call + n
    * bytes_per_element` bytes. Every operation of a decoder is exactly linear: the weights of a matrix product cost
    bytes per call, and attention grows with its elements (heads x positions).

    Each byte counts once per call, so the sum is a lower bound of the memory traffic. If both FLOP fields are None,
    the FLOP are unknown, not 0. The same applies to bytes.

    `dtype` is the type of the multiplied numbers (`float32`, `bfloat16`, `int8`), and selects the roof. "" means
    floats of an unknown type. A text that begins with `UNKNOWN_TYPE` means that the type cannot be known. Such a type
    has no roof. An operation on integers counts as one FLOP.
    """

    flops_per_call: float | None = None
    flops_per_element: float | None = None
    bytes_per_call: float | None = None
    bytes_per_element: float | None = None
    size_bytes_per_element: float | None = None
    dtype: str = ""

    def __post_init__(self) -> None:
        for per_call, per_element in (FLOPS, BYTES):
            given = {name: getattr(self, name) for name in (per_call, per_element)}
            if any([value is not None for value in given.values()]):
                for name, value in given.items():
                    object.__setattr__(self, name, quantity(name, 0.0 if value is None else value))
        if self.size_bytes_per_element is not None:
            size_bytes = quantity("size_bytes_per_element", self.size_bytes_per_element)
            object.__setattr__(self, "size_bytes_per_element", size_bytes)

    def flops(self, calls: float, elements: float) -> float | None:
        """Return the FLOP of `calls` calls with `elements` elements in total, or None if the FLOP are unknown."""
        return _line(self.flops_per_call, self.flops_per_element, calls, elements)

    def bytes(self, calls: float, elements: float) -> float | None:
        """Return the bytes of `calls` calls with `elements` elements in total, or None if the bytes are unknown."""
        return _line(self.bytes_per_call, self.bytes_per_element, calls, elements)

    def size_bytes(self, calls: float, elements: float) -> float | None:
        """Return the data size in bytes of `calls` collectives with `elements` elements in total, or None if
        unknown.
        """
        return _line(0.0, self.size_bytes_per_element, calls, elements)


FLOPS = ("flops_per_call", "flops_per_element")
BYTES = ("bytes_per_call", "bytes_per_element")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelAttributes:
    """The launch of a kernel on a GPU. An unknown attribute is None. A kernel on a CPU has no attributes.

    `shared_memory_bytes` is the dynamic shared memory that the launch requests. `static_shared_memory_bytes` is
    declared in the kernel itself.
    """

    grid: Grid | None = None
    block: Grid | None = None
    shared_memory_bytes: int | None = None
    ptx_hash: int | None = None
    static_shared_memory_bytes: int | None = None
    registers: int | None = None  # number of registers of each thread
    # Number of bytes that each thread uses in memory because they do not fit into its registers.
    local_memory_bytes: int | None = None
    # The largest share of a multiprocessor's threads that can run at the same time.
    occupancy_percent: int | None = None

    def __post_init__(self) -> None:
        for name in [one.name for one in fields(KernelAttributes)]:
            value = getattr(self, name)
            if value is None:
                continue
            if name in ("grid", "block"):
                sizes = tuple(map(operator.index, value)) if isinstance(value, Iterable) else ()
                if len(sizes) != 3:
                    raise ValueError(f"{name} is {value!r}; three whole numbers are expected, such as (32, 1, 1)")
                object.__setattr__(self, name, sizes)
            elif not 0 <= operator.index(value) < 1 << 64:
                raise ValueError(f"{name} is {value}; a 64-bit number from zero on is wanted")


@dataclass(frozen=True, slots=True)
class TransferAttributes:
    """A copy of `size_bytes` bytes between two memories.

    `stream` is set if the copy ran on a stream, in parallel with other work.
    """

    source: str
    destination: str
    size_bytes: int
    direction: TransferDirection
    stream: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionAttributes:
    """The source location of a function."""

    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleAttributes:
    """The module of torch that a brick calls. A text is "" if it is not known.

    `module_class` is its class (`torch.nn.Linear`), and `module_source` is the place of its `forward`
    (`slow.py:10`). `weight_shape` (`4864x896`) and `weight_dtype` describe its weight as it is stored.
    """

    module_class: str = ""
    module_source: str = ""
    weight_shape: str = ""
    weight_dtype: str = ""


# The attributes of a node without work, without a kernel, without a source location, or without a module.
UNKNOWN_WORK = Work()
NO_KERNEL = KernelAttributes()
NO_FUNCTION = FunctionAttributes()
NO_MODULE = ModuleAttributes()


def carried(kind: type, source: object) -> Mapping[str, Any]:
    """Return the fields that the class `kind` declares, with their values in `source`, as keyword arguments."""
    return {field.name: getattr(source, field.name) for field in fields(kind)}


def quantity(name: str, value: float) -> float:
    """Return `value` as a float. It may be a NumPy number.

    Raises ValueError if it is negative, not finite or at least MAX_QUANTITY.
    """
    number = float(value)
    if not 0 <= number < MAX_QUANTITY:
        raise ValueError(f"{name} is {number}; a finite number from zero on is wanted")
    return number


def _line(per_call: float | None, per_element: float | None, calls: float, elements: float) -> float | None:
    if per_call is None or per_element is None:
        return None
    return calls * per_call + elements * per_element
