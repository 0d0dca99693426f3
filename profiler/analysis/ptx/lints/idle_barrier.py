"""Lint: a barrier that orders no memory accesses, so it is not needed."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.model import PtxInstruction
from cbtop.profiler.analysis.ptx.opcodes import is_block_barrier, opcode

_TOUCHES_MEMORY = frozenset({
    "ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix", "tex", "call", "mbarrier", "wgmma", "tcgen05",
    "multimem", "suld", "sust", "sured", "fence", "membar", "ldu", "tld4", "wmma", "prefetch", "bar", "barrier",
    "griddepcontrol",
    "setmaxnreg", "nanosleep", "clusterlaunchcontrol", "tensormap",
})  # fmt: skip


def _find(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield barriers with no memory access between them and the last barrier, on any path.

    A barrier where warps with different work meet is left out, because it may order the accesses of other warps.
    """
    flow = analysis.flow
    # Basic block -> whether memory may have been accessed since the last barrier.
    touched = dict.fromkeys(flow.reachable, False)
    work = sorted(flow.reachable)
    while work:
        number = work.pop()
        if _after(analysis, number, touched[number]):
            for successor in flow.blocks[number].successors:
                if not touched.get(successor, True):
                    touched[successor] = True
                    work.append(successor)
    for number in sorted(flow.reachable):
        state = touched[number]
        for at in range(flow.blocks[number].start, flow.blocks[number].end):
            one = analysis.instructions[at]
            if is_block_barrier(one):
                is_only_order = not one.guard and "red" not in opcode(one.opcode).parts
                if not state and is_only_order and at not in analysis.meeting_barriers:
                    yield Problem(
                        at, "no path accesses memory between the barrier before, or the entry, and this one"
                    )
                state = False
            elif _touches(one):
                state = True


def _after(analysis: FunctionAnalysis, number: int, state: bool) -> bool:
    """Whether, at the end of a basic block, memory may have been accessed since the last barrier."""
    block = analysis.flow.blocks[number]
    for at in range(block.start, block.end):
        one = analysis.instructions[at]
        state = (state or _touches(one)) and not is_block_barrier(one)
    return state


def _touches(one: PtxInstruction) -> bool:
    parsed = opcode(one.opcode)
    return parsed.base in _TOUCHES_MEMORY and parsed.space != "param"


IDLE_BARRIER = Lint(
    "idle-barrier", LintSeverity.ADVICE,
    "A barrier follows another one, or the entry, with no memory access between. It orders nothing.",
    "remove the barrier", _find,
)  # fmt: skip
