"""Lint: threads that exit before a barrier, while the other threads of the block wait there for them."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.dataflow import Divergence
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.lints.divergent_barrier import divergent_barriers
from cbtop.profiler.analysis.ptx.opcodes import is_block_barrier, is_end, opcode

FIX = "let these threads skip their work instead of returning, so that they reach the barrier"


def _proved(analysis: FunctionAnalysis) -> Iterator[Problem]:
    yield from _with_severity(analysis, LintSeverity.CORRECTNESS)


def _possible(analysis: FunctionAnalysis) -> Iterator[Problem]:
    yield from _with_severity(analysis, LintSeverity.LIKELY)


def _harmless(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield the barriers before which threads may exit, if barriers do not wait for exited threads."""
    yield from _with_severity(analysis, LintSeverity.ADVICE)
    for at, branch, severity in divergent_barriers(analysis):
        if severity is LintSeverity.ADVICE and branch is not None:
            line = analysis.instructions[branch].line
            yield Problem(at, f"threads can leave, by the branch at line {line}, without this barrier")


def _with_severity(analysis: FunctionAnalysis, severity: LintSeverity) -> Iterator[Problem]:
    yield from (problem for found, problem in _exits(analysis) if found is severity)


def _exits(analysis: FunctionAnalysis) -> Iterator[tuple[LintSeverity, Problem]]:
    """Yield the first branch by thread id after which some threads exit without a barrier, while others reach one."""
    barriers = sorted(at for at, one in analysis.reachable() if is_block_barrier(one))
    if not barriers:
        return
    flow = analysis.flow
    blocks = {flow.block_of[at] for at in barriers}
    for branch, level in analysis.divergent_branches.items():
        if level is not Divergence.BY_THREAD or branch in flow.in_loop or not analysis.is_early_return(branch):
            continue  # the sides join and go on, so `divergent-barrier` checks this branch
        sides = [flow.reached_from([one]) for one in flow.blocks[branch].successors]
        leaving = [side for side in sides if not side & blocks and not _traps(analysis, side)]
        waiting = [side for side in sides if side & blocks]
        if leaving and waiting:
            at = next(at for at in barriers if flow.block_of[at] in waiting[0])
            last = flow.blocks[branch].end - 1
            # If the other threads return at the same instruction, report the branch instead.
            is_shared = flow.post_dominators[branch] != flow.exit
            place = last if is_shared else _end_of(analysis, last, leaving[0])
            is_proved = analysis.is_split_by_ids(analysis.instructions[last].guard)
            severity = LintSeverity.CORRECTNESS if is_proved else LintSeverity.LIKELY
            problem = Problem(at, f"the threads that return at {_written(analysis, place)} never reach this barrier")
            yield severity if analysis.barriers_wait_for_exited else LintSeverity.ADVICE, problem
            return


def _written(analysis: FunctionAnalysis, at: int) -> str:
    """Return the source line of an instruction, or its PTX line without debug lines."""
    line, source = analysis.place_of(at)
    return f"line {line}" if source is None else f"{source[0]}:{source[1]} (PTX line {line})"


def _traps(analysis: FunctionAnalysis, side: frozenset[int]) -> bool:
    """Whether a side of a branch ends the whole grid with `trap`."""
    blocks = analysis.flow.blocks
    return any(
        opcode(analysis.instructions[at].opcode).base == "trap"
        for number in side for at in range(blocks[number].start, blocks[number].end)
    )  # fmt: skip


def _end_of(analysis: FunctionAnalysis, last: int, side: frozenset[int]) -> int:
    """Return the first instruction on a side of a branch that ends the function. This may be the branch itself."""
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
    "Some threads of a block, chosen by their ids, return before a barrier that waits for the whole block, as it "
    "does up to sm_62.",
    FIX, _proved,
)  # fmt: skip
MAYBE_EXIT_BEFORE_BARRIER = Lint(
    "maybe-exit-before-barrier", LintSeverity.LIKELY,
    "Some threads of a block can return before a barrier that waits for the whole block, as it does up to sm_62. A "
    "parameter or the size of the block decides.",
    FIX, _possible,
)  # fmt: skip
EXITED_THREADS = Lint(
    "exited-threads", LintSeverity.ADVICE,
    "Some threads of a block can return without a barrier that the others execute. Threads that returned do not take "
    "part. Up to sm_62 this hangs.",
    FIX, _harmless,
)  # fmt: skip
