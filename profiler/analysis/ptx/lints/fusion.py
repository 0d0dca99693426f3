"""Lint: a multiplication and an addition that could be one fused instruction."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.model import shown
from cbtop.profiler.analysis.ptx.opcodes import opcode


def _find(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield an addition of a product that is used once, if a rounding mode keeps the assembler from fusing the two.

    Without one, the assembler fuses `mul.f32` and `add.f32`.
    """
    data = analysis.data
    for at, one in analysis.reachable():
        parsed = opcode(one.opcode)
        if parsed.base not in ("add", "sub") or parsed.type not in ("f32", "f64", "f16", "f16x2"):
            continue
        for name in data.reads[at]:
            factor = data.only_writer(name)
            if factor is None or len(data.readers[name]) != 1 or one.guard:
                continue
            parts = opcode(factor.opcode).parts
            if parts[0] == "mul" and parts[-1] == parsed.type and ("rn" in parts or "rn" in parsed.parts):
                yield Problem(at, f"adds the product {shown(name)} of line {factor.line}, rounded on its own")


NOT_FUSED = Lint(
    "not-fused", LintSeverity.ADVICE,
    "A product is rounded and then added: two instructions for one, and less exact. The rounding mode .rn forbids "
    "the assembler to fuse them.",
    "use fma.rn, or compile with --fmad=true", _find,
)  # fmt: skip
