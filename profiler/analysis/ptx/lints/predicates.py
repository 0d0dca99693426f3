"""Lint: more predicate registers in use than the hardware has."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem

# Number of predicate registers, P0 to P6; PT is always true (CUDA Binary Utilities, "Instruction Set Reference").
MAX_LIVE = 7


def _find(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield the instruction with the most predicates in use after it, if the hardware has fewer."""
    registers, flow, data = analysis.function.registers, analysis.flow, analysis.data
    names = sorted(name for name in data.writers if registers.type_of(name) == "pred")
    if len(names) <= MAX_LIVE:
        return
    bit = {name: 1 << place for place, name in enumerate(names)}
    most, place = 0, 0
    for number, after in enumerate(data.live_at_ends(names)):
        if number not in flow.reachable:
            continue
        live = after
        for at in range(flow.blocks[number].end - 1, flow.blocks[number].start - 1, -1):
            if (count := live.bit_count()) > most:
                most, place = count, at
            if not analysis.instructions[at].guard:
                for name in data.writes[at]:
                    live &= ~bit.get(name, 0)
            for name in data.reads[at]:
                live |= bit.get(name, 0)
    if most > MAX_LIVE:
        yield Problem(place, f"{most} predicates are live after this instruction; the hardware has {MAX_LIVE}")


PREDICATE_PRESSURE = Lint(
    "predicate-pressure", LintSeverity.ADVICE,
    f"More than {MAX_LIVE} predicates are live at once. Unless it can reorder them, the assembler keeps "
    "the others in general registers, with two more instructions each.",
    "test conditions where they are used, or keep them as bits of one register", _find,
)  # fmt: skip
