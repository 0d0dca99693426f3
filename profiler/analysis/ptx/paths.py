"""Finds the paths that a thread can take through a function without contradictory conditions."""

from __future__ import annotations

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.opcodes import is_warp_sync, may_order

MAX_STATES = 20_000  # at most this many pairs of a block and known conditions in one search

Conditions = frozenset[tuple[object, bool]]


def has_unordered_path(
    analysis: FunctionAnalysis, first: int, second: int, *, in_warps: bool, thread: int | None = None
) -> bool:
    """Whether a thread can go from one instruction to another without passing an instruction that orders memory
    accesses.

    A condition that does not change is the same at each branch of the path. With `thread`, conditions on its id are
    known.
    """
    flow = analysis.flow
    start = flow.block_of[first], first + 1, _known_before(analysis, flow.block_of[first])
    work, done = [start], {start}
    while work and len(done) < MAX_STATES:
        number, at, known = work.pop()
        while at < flow.blocks[number].end:
            one = analysis.instructions[at]
            if at == second:
                return True
            if may_order(one) or (in_warps and is_warp_sync(one)):
                break
            at += 1
        else:
            for successor, conditions in _ways(analysis, number, known, thread):
                state = successor, flow.blocks[successor].start, conditions
                if state not in done:
                    done.add(state)
                    work.append(state)
    return False


def _known_before(analysis: FunctionAnalysis, number: int) -> Conditions:
    found = {(_condition(analysis, name), is_true) for name, is_true in analysis.conditions(number).values()}
    return frozenset((condition, is_true) for condition, is_true in found if condition is not None)


def _ways(
    analysis: FunctionAnalysis, number: int, known: Conditions, thread: int | None
) -> list[tuple[int, Conditions]]:
    """Return the blocks that can follow a block, each with the conditions that are known on entering it."""
    block = analysis.flow.blocks[number]
    last = analysis.instructions[block.end - 1] if block.end > block.start else None
    condition = _condition(analysis, last.guard) if last is not None and len(block.successors) == 2 else None
    if last is None or condition is None:
        return [(successor, known) for successor in block.successors]
    value = _value_in(analysis, last.guard, thread)
    found = []
    for successor, is_taken in zip(block.successors, (True, False), strict=True):
        is_true = is_taken is not last.is_negated
        if (condition, not is_true) not in known and value is not (not is_true):
            found.append((successor, known | {(condition, is_true)}))
    return found


def _value_in(analysis: FunctionAnalysis, name: str, thread: int | None) -> bool | None:
    values = analysis.data.lane_values
    value = values.of_register(name) if values is not None and thread is not None else None
    if value is None or thread is None or not value.is_number:
        return None
    return bool(value.lanes[thread if len(value.lanes) > 1 else 0])


def _condition(analysis: FunctionAnalysis, name: str) -> object | None:
    """Return a description of the comparison that gives a predicate, equal for equal comparisons. None if the
    predicate can change.
    """
    data, flow = analysis.data, analysis.flow

    def is_constant(register: str) -> bool:
        return data.only_writer(register) is not None and flow.block_of[data.writers[register][0]] not in flow.in_loop

    writer = data.only_writer(name)
    if writer is None or not is_constant(name):
        return None
    is_comparison = writer.opcode.startswith("setp.") and all(map(is_constant, data.reads[data.writers[name][0]]))
    return (writer.opcode, writer.operands[1:]) if is_comparison else name
