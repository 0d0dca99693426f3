"""Lints about addresses of shared memory: width, generic accesses, missing conversions."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.model import TYPE_BITS, shown
from cbtop.profiler.analysis.ptx.opcodes import address_in, opcode, registers_in

_ACCESSES = frozenset({"ld", "st", "atom", "red"})
_KEEPS_ADDRESS = frozenset({"mov", "add", "sub", "cvt", "mad", "selp"})


def _wide(analysis: FunctionAnalysis) -> Iterator[Problem]:
    registers = analysis.function.registers
    for at, one in analysis.reachable():
        parsed = opcode(one.opcode)
        if parsed.base in _ACCESSES and parsed.space == "shared":
            for name in registers_in(address_in(one), registers):
                if TYPE_BITS.get(registers.type_of(name) or "", 0) == 64:
                    yield Problem(at, f"shared memory is addressed by {shown(name)}, a register of 64 bits")


def _unconverted(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield accesses to shared memory with a generic address, and generic accesses with an address of shared
    memory.
    """
    for at, name, space, tags in _tagged_accesses(analysis):
        if tags == {"shared"} and not space:
            yield Problem(at, f"{shown(name)} is an address of shared memory, and not converted to a generic one")
        elif tags == {"generic"} and space == "shared":
            yield Problem(at, f"{shown(name)} is a generic address, and not converted to one of shared memory")


def _generic(analysis: FunctionAnalysis) -> Iterator[Problem]:
    for at, name, space, tags in _tagged_accesses(analysis):
        if tags == {"generic"} and not space:
            yield Problem(at, f"{shown(name)} always points to shared memory, but the access is generic")


def _tagged_accesses(analysis: FunctionAnalysis) -> Iterator[tuple[int, str, str, set[str]]]:
    """Yield the accesses with the address of a shared variable: the instruction, the register of the address, the
    access's state space, and the possible kinds of address.
    """
    tags = _tags(analysis)
    for at, one in analysis.reachable() if tags else ():
        parsed = opcode(one.opcode)
        if parsed.base in _ACCESSES and parsed.space in ("", "shared"):
            for name in registers_in(address_in(one), analysis.function.registers)[:1]:
                if name in tags:
                    yield at, name, parsed.space, tags[name]


def _tags(analysis: FunctionAnalysis) -> dict[str, set[str]]:
    """Return which kinds of address a register can have: `shared`, `generic` (of shared memory) and `other`.

    Only registers that are computed from the address of a shared variable are included.
    """
    shared = {name for name, one in analysis.variables.items() if one.space == "shared"}
    tags: dict[str, set[str]] = {}
    work: list[int] = []
    for at, one in analysis.reachable() if shared else ():
        if any(operand.partition("+")[0].strip() in shared for operand in one.operands[1:]):
            work.append(at)
    while work:
        at = work.pop()
        found = _tag(analysis, at, tags, shared)
        for name in analysis.data.writes[at] if found else ():
            if found - tags.setdefault(name, set()):
                tags[name] |= found
                work += analysis.data.readers.get(name, ())
    for name in tags:
        if any(not _tag(analysis, at, tags, shared) for at in analysis.data.writers[name]):
            tags[name].add("other")
    return tags


def _tag(analysis: FunctionAnalysis, at: int, tags: dict[str, set[str]], shared: set[str]) -> set[str]:
    """Return which kinds of address an instruction's result can have."""
    one = analysis.instructions[at]
    parsed = opcode(one.opcode)
    given = set[str]().union(*(tags.get(name, ()) for name in analysis.data.reads[at]))
    if any(operand.partition("+")[0].strip() in shared for operand in one.operands[1:]):
        given.add("shared")
    if parsed.base == "cvta" and any(part.startswith("shared") for part in parsed.parts):
        return {"shared"} if "to" in parsed.parts else {"generic"}
    return given if parsed.base in _KEEPS_ADDRESS and parsed.type[:1] in "bsu" else set()


SHARED_64_BIT = Lint(
    "shared-64-bit", LintSeverity.LIKELY,
    "A load or store of shared memory has a 64-bit address register. Shared addresses have 32 bits, and a generic "
    "64-bit address in it reads the wrong bytes.",
    "convert the pointer with cvta.to.shared and cvt.u32.u64, and address by the 32-bit register", _wide,
)  # fmt: skip
SHARED_NOT_CONVERTED = Lint(
    "shared-not-converted", LintSeverity.CORRECTNESS,
    "The address of a shared variable is used as a generic address, or the reverse, without cvta.",
    "convert it with cvta.shared, or cvta.to.shared, or name the state space in the access", _unconverted,
)  # fmt: skip
GENERIC_SHARED = Lint(
    "generic-shared", LintSeverity.ADVICE,
    "A generic load or store always goes to shared memory. It is correct, but slower than ld.shared or st.shared.",
    "name the state space: ld.shared, st.shared", _generic,
)  # fmt: skip
