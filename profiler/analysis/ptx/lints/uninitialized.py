"""Lint: a register that is read before it is written."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.model import shown
from cbtop.profiler.analysis.ptx.opcodes import address_in, opcode, registers_in

FIX = "write the register on every path before it is read"


def _always(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield reads of registers that no path writes, if the value decides an address, a branch or arithmetic.

    Other reads are fine: compilers may move and pack undefined elements of vectors.
    """
    for at, name, is_never in analysis.data.possibly_unwritten:
        if is_never and _matters(analysis, at, name):
            yield Problem(at, f"{shown(name)} is read, but no path writes it before")


def _sometimes(analysis: FunctionAnalysis) -> Iterator[Problem]:
    for at, name, is_never in analysis.data.possibly_unwritten:
        if not is_never and _matters(analysis, at, name) and not _is_written_on_same_facts(analysis, at, name):
            yield Problem(at, f"{shown(name)} is read, but a path does not write it before")


def _is_written_on_same_facts(analysis: FunctionAnalysis, at: int, name: str) -> bool:
    """Whether every path to the read contains a write: `if (i < n) x = 1; ...; if (i < n) use(x);`.

    A register is written under conditions that also hold at the read, or both under a condition and under its
    opposite.
    """
    facts = _facts_with_guard(analysis, at)
    rest = [_facts_with_guard(analysis, writer) - facts for writer in analysis.data.writers.get(name, ())]
    if not all(rest):
        return True
    single = {fact for one in rest if len(one) == 1 for fact in one}
    return any((what, not is_true) in single for what, is_true in single)


def _facts_with_guard(analysis: FunctionAnalysis, at: int) -> frozenset[tuple[object, ...]]:
    one = analysis.instructions[at]
    facts = analysis.facts(at)
    return facts | {analysis.fact_of(one.guard, is_true=not one.is_negated)} if one.guard else facts


def _never_runs(analysis: FunctionAnalysis, at: int) -> bool:
    """Whether the guard of an instruction is constant and false. Triton leaves such stores, with any address."""
    one = analysis.instructions[at]
    writer = analysis.data.only_writer(one.guard) if one.guard else None
    if writer is None or opcode(writer.opcode).base != "mov" or writer.operands[-1] not in ("0", "1", "-1"):
        return False
    return (writer.operands[-1] == "0") is not one.is_negated


def _matters(analysis: FunctionAnalysis, at: int, name: str) -> bool:
    one = analysis.instructions[at]
    if _never_runs(analysis, at):
        return False
    if one.guard == name or name in registers_in(address_in(one), analysis.function.registers):
        return True
    return opcode(one.opcode).base not in ("mov", "selp", "st", "prmt", "call", "shfl", "mma", "wgmma", "cvt")


UNINITIALIZED = Lint(
    "uninitialized", LintSeverity.CORRECTNESS,
    "A register is read that no path has written. It contains any number.", FIX, _always,
)  # fmt: skip
MAYBE_UNINITIALIZED = Lint(
    "maybe-uninitialized", LintSeverity.LIKELY,
    "A register is read that one of the paths to the instruction does not write.", FIX, _sometimes,
)  # fmt: skip
