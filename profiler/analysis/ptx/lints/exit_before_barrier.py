"""Threads that leave before a barrier at which the others wait for them."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.dataflow import Divergence
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.opcodes import is_block_barrier, is_end, opcode


def _find(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield the branches by thread id with a side that always ends without a barrier, and a side with one."""
    barriers = sorted(at for at, one in analysis.reachable() if is_block_barrier(one))
    if not barriers:
        return
    flow = analysis.flow
    blocks = {flow.block_of[at] for at in barriers}
    for branch, level in analysis.divergent_branches.items():
        if level is not Divergence.BY_THREAD or branch in flow.in_loop or not analysis.is_early_return(branch):
            continue  # if the sides meet again and do more, it is `divergent-barrier`
        sides = [flow.reached_from([one]) for one in flow.blocks[branch].successors]
        leaving = [side for side in sides if not side & blocks and not _traps(analysis, side)]
        waiting = [side for side in sides if side & blocks]
        if leaving and waiting:
            at = next(at for at in barriers if flow.block_of[at] in waiting[0])
            last = flow.blocks[branch].end - 1
            is_shared = flow.post_dominators[branch] != flow.exit  # the others return there too: name the branch
            place = last if is_shared else _end_of(analysis, last, leaving[0])
            yield Problem(at, f"the threads that return at {_written(analysis, place)} never reach this barrier")
            return


def _written(analysis: FunctionAnalysis, at: int) -> str:
    """Return the source line of an instruction, or its line in the PTX if there are no debug lines."""
    line, source = analysis.place_of(at)
    return f"line {line}" if source is None else f"{source[0]}:{source[1]} (PTX line {line})"


def _traps(analysis: FunctionAnalysis, side: frozenset[int]) -> bool:
    """Whether a side ends the whole grid with `trap`."""
    blocks = analysis.flow.blocks
    return any(
        opcode(analysis.instructions[at].opcode).base == "trap"
        for number in side for at in range(blocks[number].start, blocks[number].end)
    )  # fmt: skip


def _end_of(analysis: FunctionAnalysis, last: int, side: frozenset[int]) -> int:
    """Return the first instruction of a side that ends the function, or the branch if it ends the function itself."""
    if is_end(analysis.instructions[last]):
        return last
    blocks = analysis.flow.blocks
    ends = [
        at for number in sorted(side) for at in range(blocks[number].start, blocks[number].end)
        if is_end(analysis.instructions[at])
    ]  # fmt: skip
    return ends[0] if ends else last


EXIT_BEFORE_BARRIER = Lint(
    "exit-before-barrier", LintSeverity.CORRECTNESS,
    "Some threads of a block, chosen by their ids, return before a barrier that waits for the whole block.",
    "let these threads skip their work instead of returning, so that they reach the barrier", _find,
)  # fmt: skip
