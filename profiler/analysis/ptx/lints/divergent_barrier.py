"""A barrier of the whole block that some of its threads do not reach."""

from __future__ import annotations

from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.dataflow import Divergence
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.model import shown
from cbtop.profiler.analysis.ptx.opcodes import is_block_barrier

FIX = "move the barrier out of the branch, so that all threads of the block execute it"


def _proved(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield barriers on one side of a branch by thread id, outside loops of that branch, without one on the other
    side. The threads that wait there wait forever."""
    for at, branch, is_proved in _divergent(analysis):
        if is_proved:
            yield Problem(at, f"only the threads that {_condition(analysis, branch)} reach this barrier")


def _possible(analysis: FunctionAnalysis) -> Iterator[Problem]:
    for at, branch, is_proved in _divergent(analysis):
        if not is_proved:
            yield Problem(at, f"threads may differ in whether they {_condition(analysis, branch)}")


def _condition(analysis: FunctionAnalysis, branch: int | None) -> str:
    if branch is None:
        return "pass its guard"
    one = analysis.instructions[branch]
    return f"go one way at line {one.line} ({'!' * one.is_negated}{shown(one.guard or one.operands[0])})"


def _divergent(analysis: FunctionAnalysis) -> Iterator[tuple[int, int | None, bool]]:
    """Yield barriers that depend on a divergent branch or guard: instruction, branch, whether proved."""
    barriers = {at for at, one in analysis.reachable() if is_block_barrier(one)}
    seen: set[int] = set()
    for at in sorted(barriers):
        guard = analysis.instructions[at].guard
        level = analysis.data.divergence_of(guard) if guard else Divergence.UNIFORM
        if level is not Divergence.UNIFORM:
            seen.add(at)
            yield at, None, level is Divergence.BY_THREAD
    flow = analysis.flow
    barrier_blocks = {flow.block_of[at] for at in barriers}
    meeting = analysis.meeting_barriers
    for branch, level in analysis.divergent_branches.items() if barriers else ():
        region = flow.influence(branch)
        inside = [at for at in sorted(barriers - seen) if flow.block_of[at] in region]
        if not inside or flow.post_dominators[branch] in (None, flow.exit):
            continue  # if a side leaves the function, it is `exit-before-barrier`
        if level is Divergence.BY_THREAD and branch not in flow.in_loop and analysis.is_early_return(branch):
            seen.update(inside)  # the compiler let both sides return at one place: it is `exit-before-barrier`
            continue
        is_loop = branch in region
        both = all(side & barrier_blocks & region for side in analysis.sides(branch))
        is_proved = level is Divergence.BY_THREAD and not is_loop and not both
        for at in inside:
            if is_proved or at not in meeting:
                seen.add(at)
                yield at, flow.blocks[branch].end - 1, is_proved


DIVERGENT_BARRIER = Lint(
    "divergent-barrier", LintSeverity.CORRECTNESS,
    "A barrier of the whole block is executed by some of its threads only, chosen by their ids. The others never "
    "arrive.", FIX, _proved,
)  # fmt: skip
MAYBE_DIVERGENT_BARRIER = Lint(
    "maybe-divergent-barrier", LintSeverity.LIKELY,
    "A barrier of the whole block is in a branch or loop that depends on loaded values or on the thread, so that "
    "threads may execute it different numbers of times.", FIX, _possible,
)  # fmt: skip
