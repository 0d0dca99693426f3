"""Lint: a load into a register of the wrong type."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.model import TYPE_BITS, shown
from cbtop.profiler.analysis.ptx.opcodes import opcode

_FLOATS = frozenset({"f16", "f16x2", "bf16", "bf16x2", "f32", "f64"})


def _find(analysis: FunctionAnalysis) -> Iterator[Problem]:
    registers = analysis.function.registers
    for at, one in analysis.reachable():
        parsed = opcode(one.opcode)
        if parsed.base not in ("ld", "ldu") or not parsed.type:
            continue
        for name in analysis.data.writes[at]:
            kind = registers.type_of(name) or ""
            if problem := _problem(parsed.type, kind):
                yield Problem(
                    at, f"{one.opcode} loads .{parsed.type} into {shown(name)}, a .{kind} register: {problem}"
                )


def _problem(loaded: str, register: str) -> str:
    """Return why a register cannot hold a value of a loaded type, or "" if it can."""
    if register not in TYPE_BITS or register == "pred":
        return "a predicate cannot be loaded" if register == "pred" else ""
    if TYPE_BITS[register] < TYPE_BITS[loaded]:
        return "it is too small"
    if register in _FLOATS and TYPE_BITS[register] > TYPE_BITS[loaded]:
        return "the loaded bits are no such number"
    if loaded[0] in "us" and register in _FLOATS:
        return "an integer is read as a floating-point number"
    if loaded in _FLOATS and register[0] in "us":
        return "a floating-point number is read as an integer"
    return ""


LOAD_TYPE = Lint(
    "load-type", LintSeverity.CORRECTNESS,
    "A load writes a register that cannot hold the loaded type.",
    "load into a register of the loaded type, and convert it with cvt", _find,
)  # fmt: skip
