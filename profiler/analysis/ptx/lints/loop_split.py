"""Lint: checks in a loop that change their result at most once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.induction import CountedLoop, counted_loops, exit_margins
from cbtop.profiler.analysis.ptx.lane_values import added
from cbtop.profiler.analysis.ptx.lints.base import Lint, LintSeverity, Problem, counted
from cbtop.profiler.analysis.ptx.opcodes import opcode

# Instructions that make it worth splitting a loop in two. Asynchronous copies are not among them: a pipeline checks
# in each iteration whether there is more to prefetch, and splitting would duplicate its loop.
_HEAVY = {
    "ld": "load", "st": "store", "atom": "atomic operation", "red": "atomic operation", "ldmatrix": "load",
    "mma": "tensor-core operation", "wmma": "tensor-core operation", "wgmma": "tensor-core operation",
}  # fmt: skip


def _find(analysis: FunctionAnalysis) -> Iterator[Problem]:
    """Yield comparisons of a loop's counter that change at most once in the loop, and decide on heavy work."""
    for loop in counted_loops(analysis):
        checks: dict[int, list[tuple[str, bool]]] = {}  # comparison -> the predicates computed from it
        guarded = _guarded_work(analysis, loop)
        for name, is_negated in guarded:
            if loop.direction(name):
                checks.setdefault(_place(analysis, loop, name), []).append((name, is_negated))
        for at, conditions in sorted(checks.items()):
            work = sum((guarded[one] for one in conditions), Counter[str]())
            what = ", ".join(counted(count, kind) for kind, count in sorted(work.items()))
            name, is_negated = conditions[0]
            how = _how_it_changes(analysis, loop, name, is_negated=is_negated)
            where = f"the loop at line {_line(analysis, loop)}"
            takes = _share(analysis, loop, {name for name, _ in conditions})
            yield Problem(at, f"this check {how} of {where}; it takes {takes}, and decides on {what}")


def _guarded_work(analysis: FunctionAnalysis, loop: CountedLoop) -> dict[tuple[str, bool], Counter[str]]:
    """Return the heavy work in a loop by predicate. The key also says whether the predicate must be false for the
    work to run.
    """
    flow = analysis.flow
    found: dict[tuple[str, bool], Counter[str]] = {}
    for at in loop.instructions():
        one = analysis.instructions[at]
        if not one.guard:
            continue
        if (kind := _kind(analysis, at)) is not None:
            found.setdefault((one.guard, one.is_negated), Counter())[kind] += 1
        number = flow.block_of[at]
        block = flow.blocks[number]
        if at != block.end - 1 or len(block.successors) != 2 or not set(block.successors) <= loop.loop.blocks:
            continue
        join = flow.post_dominators[number]
        stop = frozenset({loop.loop.header}) | (frozenset() if join is None else frozenset({join}))
        for side, is_taken in zip(block.successors, (True, False), strict=True):
            inside = flow.reached_from([side], stop) & loop.loop.blocks
            kinds = [_kind(analysis, place) for each in inside for place in _places(analysis, each)]
            work = Counter(one for one in kinds if one is not None)
            if work:
                found.setdefault((one.guard, is_taken is one.is_negated), Counter()).update(work)
    return found


def _line(analysis: FunctionAnalysis, loop: CountedLoop) -> int:
    return analysis.instructions[analysis.flow.blocks[loop.loop.header].start].line


def _share(analysis: FunctionAnalysis, loop: CountedLoop, names: set[str]) -> str:
    """Return the fraction of the loop's instructions that compare and branch."""
    inside = list(loop.instructions())
    branches = [at for at in inside if analysis.instructions[at].guard in names and _is_branch_at(analysis, at)]
    return f"{1 + len(branches)} of its {len(inside)} instructions"


def _is_branch_at(analysis: FunctionAnalysis, at: int) -> bool:
    return opcode(analysis.instructions[at].opcode).base == "bra"


def _places(analysis: FunctionAnalysis, number: int) -> range:
    block = analysis.flow.blocks[number]
    return range(block.start, block.end)


def _kind(analysis: FunctionAnalysis, at: int) -> str | None:
    parsed = opcode(analysis.instructions[at].opcode)
    return None if parsed.space == "param" else _HEAVY.get(parsed.base)


def _place(analysis: FunctionAnalysis, loop: CountedLoop, name: str) -> int:
    """Return the comparison of a counter that a predicate depends on."""
    at = analysis.data.writers[name][0]
    one = analysis.instructions[at]
    if opcode(one.opcode).base == "setp":
        return at
    return next(_place(analysis, loop, operand) for operand in one.operands[1:] if loop.direction(operand))


def _how_it_changes(analysis: FunctionAnalysis, loop: CountedLoop, name: str, *, is_negated: bool) -> str:
    margin = loop.margin(name, is_negated=is_negated)
    is_true_first = (loop.direction(name) == -1) is not is_negated
    exits = exit_margins(analysis, loop)
    if margin is not None and is_true_first and len(exits) == 1:
        ((leaving, goes_on),) = exits.items()
        distance = None if goes_on is None else added(margin, goes_on, -1)
        is_at_end = leaving in loop.loop.latches
        if is_at_end and distance is not None and distance.is_number and min(distance.lanes) >= 0:
            return "is true in all iterations but the last"
    return "changes at most once in the iterations"


SPLIT_LOOP = Lint(
    "split-loop", LintSeverity.ADVICE,
    "A loop compares its counter with a fixed value in each iteration, to decide on memory or tensor-core work. "
    "The result changes at most once, as in a bounds check.",
    "split the loop there: one loop without the check, and then the rest", _find,
)  # fmt: skip
