"""Lint: a barrier for the whole block that some of its threads do not reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.dataflow import Divergence
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem
from cbtop.profiler.analysis.ptx.model import shown
from cbtop.profiler.analysis.ptx.opcodes import is_block_barrier, is_branch, is_cluster_arrival, is_end

FIX = "move the barrier out of the branch, so that all threads of the block execute it"


class DivergentBarrier(NamedTuple):
    """A barrier that perhaps only some threads reach, because of a branch. If `branch` is None, the barrier itself is
    conditional.
    """

    at: int
    branch: int | None
    severity: LintSeverity


def _proved(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield barriers that some threads certainly do not reach, so the others wait forever. Only thread ids decide the
    branch before the barrier, and its other side has no barrier.
    """
    for at, branch, severity in divergent_barriers(analysis):
        if severity is LintSeverity.CORRECTNESS:
            yield Problem(at, f"only the threads that {_condition(analysis, branch)} reach this barrier")


def _possible(analysis: FunctionAnalysis) -> Iterator[Problem]:
    for at, branch, severity in divergent_barriers(analysis):
        if severity is LintSeverity.LIKELY:
            yield Problem(at, f"threads may differ in whether they {_condition(analysis, branch)}")


def _condition(analysis: FunctionAnalysis, branch: int | None) -> str:
    if branch is None:
        return "pass its guard"
    one = analysis.instructions[branch]
    return f"go one way at line {one.line} ({'!' * one.is_negated}{shown(one.guard or one.operands[0])})"


def divergent_barriers(analysis: FunctionAnalysis) -> Iterator[DivergentBarrier]:
    """Yield barriers that depend on a divergent branch or condition. It is only advice if the other threads exit, and
    the barrier does not wait for exited threads. Arrivals at a cluster's barrier are yielded only if that is proved.
    """
    barriers = {at for at, one in analysis.reachable() if is_block_barrier(one) or is_cluster_arrival(one)}
    seen: set[int] = set()
    for at in sorted(barriers):
        guard = analysis.instructions[at].guard
        if guard and analysis.data.divergence_of(guard):
            seen.add(at)
            is_proved = analysis.is_split_by_ids(guard)
            if not is_proved and is_cluster_arrival(analysis.instructions[at]):
                continue
            yield DivergentBarrier(at, None, LintSeverity.CORRECTNESS if is_proved else LintSeverity.LIKELY)
    flow = analysis.flow
    barrier_blocks = {flow.block_of[at] for at in barriers}
    # A thread that waits for its cluster does not exit before the others have arrived.
    waits = {flow.block_of[at] for at, one in analysis.reachable() if one.opcode.startswith("barrier.cluster.wait")}
    meeting = analysis.meeting_barriers
    for branch in analysis.divergent_branches if barriers else ():
        region = flow.influence(branch)
        inside = [at for at in sorted(barriers - seen) if flow.block_of[at] in region]
        if not inside or flow.post_dominators[branch] in (None, flow.exit):
            continue  # one side leaves the function, so `exit-before-barrier` checks this branch
        by_thread = analysis.divergent_branches[branch] is Divergence.BY_THREAD
        if by_thread and branch not in flow.in_loop and analysis.is_early_return(branch):
            # The compiler has joined two returns, so `exit-before-barrier` checks this branch.
            seen.update(inside)
            continue
        last = flow.blocks[branch].end - 1
        is_loop = branch in region
        both = all(side & barrier_blocks & region for side in analysis.sides(branch))
        is_proved = not is_loop and not both and analysis.is_split_by_ids(analysis.instructions[last].guard)
        severity = LintSeverity.CORRECTNESS if is_proved else LintSeverity.LIKELY
        if not is_loop and not both and _others_only_exit(analysis, branch, barrier_blocks | waits):
            severity = LintSeverity.ADVICE
        for at in inside:
            is_of_cluster = is_cluster_arrival(analysis.instructions[at])
            if is_proved or (at not in meeting and not is_of_cluster):
                seen.add(at)
                yield DivergentBarrier(at, last, severity)


def _others_only_exit(analysis: FunctionAnalysis, branch: int, barrier_blocks: set[int]) -> bool:
    """Whether all threads that do not reach a barrier exit, and the barrier does not wait for exited threads. Threads
    that work before they exit must be whole warps, because `bar.sync` is undefined for a part of a warp.
    """
    if analysis.barriers_wait_for_exited:
        return False
    flow = analysis.flow
    values = analysis.data.most_lane_values
    value = values.of_register(analysis.instructions[flow.blocks[branch].end - 1].guard) if values else None
    is_by_warps = value is not None and value.is_number and value.is_same_in_warps
    for successor in flow.blocks[branch].successors:
        way = flow.reached_from([successor])
        if flow.exit in way and not way & barrier_blocks:
            places = (at for number in way for at in range(flow.blocks[number].start, flow.blocks[number].end))
            rest = [analysis.instructions[at] for at in places]
            return is_by_warps or all(is_end(one) or is_branch(one) for one in rest)
    return False


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
