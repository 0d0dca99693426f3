"""Lint: use of local memory, which has a thread's arrays that do not fit into registers."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.opcodes import opcode


def _find(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield the first access to local memory, or the function if it only declares some."""
    size = sum(one.size_bytes or 0 for one in analysis.function.variables if one.space == "local")
    accesses = [at for at, one in analysis.reachable() if opcode(one.opcode).space == "local"]
    if size or accesses:
        yield Problem(
            accesses[0] if accesses else None,
            f"{size} bytes of local memory a thread, {len(accesses)} accesses that name it; spills are extra",
        )


LOCAL_MEMORY = Lint(
    "local-memory", LintSeverity.ADVICE,
    "A thread keeps an array in local memory, which is in the GPU's memory. An index that is not constant, or an "
    "address that is taken, keeps it out of registers.",
    "unroll the loops that index the array, or keep it in shared memory", _find,
)  # fmt: skip
