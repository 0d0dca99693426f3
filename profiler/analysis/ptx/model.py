"""The contents of a PTX module as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Comes before a scope's number in the name of something in an inner scope. No PTX identifier contains it.
SCOPE_MARK = "#"

# Bits of each fundamental type (PTX ISA, "Fundamental Types"). Predicates have no size.
TYPE_BITS: dict[str, int] = {
    **{f"{kind}{bits}": bits for kind in "bsu" for bits in (8, 16, 32, 64)},
    "b128": 128,
    "f16": 16,
    "f16x2": 32,
    "bf16": 16,
    "bf16x2": 32,
    "f32": 32,
    "f64": 64,
    "tf32": 32,
    "e4m3": 8,
    "e5m2": 8,
    "u16x2": 32,
    "s16x2": 32,
    "f32x2": 64,
    "pred": 0,
}
_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,9})")


class PtxError(Exception):
    """The text is not PTX, or too large for the analysis. The message has the line, from 1."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line


class PtxInstruction(NamedTuple):
    """An instruction. A name of an inner scope ends with SCOPE_MARK and the scope's number.

    `guard` is the predicate register, or "". `operands` are texts: a register, an immediate, an address in brackets,
    a vector in braces. `source` is the number of a file in `Module.files`, and a line in it.
    """

    line: int
    guard: str
    is_negated: bool
    opcode: str
    operands: tuple[str, ...]
    source: tuple[int, int] | None


class Variable(NamedTuple):
    """A declared variable or parameter. The size is None for an array without a length, such as dynamic shared
    memory.
    """

    name: str
    space: str
    type: str
    size_bytes: int | None
    line: int


class Registers:
    """The declared registers of a function with their types. `given` are those that a caller sets or reads."""

    def __init__(self) -> None:
        self.given: set[str] = set()
        self._names: dict[str, str] = {}
        self._ranges: dict[str, tuple[int, str]] = {}

    def declare(self, name: str, type_name: str) -> None:
        self._names[name] = type_name

    def declare_range(self, prefix: str, count: int, type_name: str) -> None:
        self._ranges[prefix] = count, type_name

    def type_of(self, name: str) -> str | None:
        """Return the type of a register, such as `b32` or `pred`, or None for an unknown name."""
        known = self._names.get(name)
        if known is None and (parts := _NUMBERED.fullmatch(name.partition(SCOPE_MARK)[0])):
            mark = name[parts.end() :]
            count, type_name = self._ranges.get(parts[1] + mark, (0, ""))
            if int(parts[2]) < count:
                known = self._names[name] = type_name
        return known


@dataclass(frozen=True, slots=True)
class PtxFunction:
    """A function or an entry. `labels` has the index of the instruction after each label.

    `branch_targets` has the labels of each `.branchtargets` list. `limits` has the performance directives, such as
    `reqntid` with the threads along x, y and z. A declaration without a body has no instructions.
    """

    name: str
    is_entry: bool
    line: int
    parameters: tuple[Variable, ...] = ()
    results: tuple[Variable, ...] = ()
    limits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    registers: Registers = field(default_factory=Registers)
    variables: tuple[Variable, ...] = ()
    instructions: Sequence[PtxInstruction] = ()
    labels: Mapping[str, int] = field(default_factory=dict)
    branch_targets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_declaration: bool = False
    end_line: int = 0


@dataclass(frozen=True, slots=True)
class Module:
    """A PTX module. `variables` are those outside of functions. `files` are the source files in debug lines."""

    version: str
    target: str
    address_bits: int
    functions: tuple[PtxFunction, ...]
    variables: tuple[Variable, ...]
    files: Mapping[int, str]

    @property
    def entries(self) -> list[PtxFunction]:
        """The entries (kernels) of the module that have a body, in the order of the text."""
        return [one for one in self.functions if one.is_entry and not one.is_declaration]

    def source_of(self, entry: str, line: int | None) -> tuple[str, int] | None:
        """Return the source file and line of a line of an entry. If the line is None, the entry's first line with a
        source counts.
        """
        for function in self.entries:
            for one in function.instructions if function.name == entry else ():
                if line in (None, one.line) and one.source is not None and one.source[0] in self.files:
                    return self.files[one.source[0]], one.source[1]
        return None


def shown(name: str) -> str:
    """Return a name or operand as it is in the PTX text."""
    return re.sub(f"{SCOPE_MARK}[0-9]+", "", name)
