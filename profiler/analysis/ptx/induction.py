"""Loops with counters, and comparisons in them that change at most once.

A counter is a register that each iteration changes by the same amount. A comparison of a counter with a value that
the loop does not change can change its result only once, unless the counter overflows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cbtop.profiler.analysis.ptx.analysis import FunctionAnalysis
from cbtop.profiler.analysis.ptx.control_flow import ControlFlow
from cbtop.profiler.analysis.ptx.lane_values import LaneValue, LaneValues, Threads, added
from cbtop.profiler.analysis.ptx.model import PtxInstruction
from cbtop.profiler.analysis.ptx.opcodes import opcode

MAX_DEPTH = 20  # most instructions between a comparison and its branch, or between a counter and its comparison
UNKNOWN_SHAPE = Threads((1, 1, 1), is_whole_block=False)
_INTEGER = re.compile(r"[sub](?:16|32|64)")
_LESS, _MORE = ("lt", "lo", "le", "ls"), ("gt", "hi", "ge", "hs")
_NOT_NEGATIVE = frozenset({*(f"%{name}.{axis}" for name in ("ctaid", "nctaid", "ntid") for axis in "xyz")})
_OR_EQUAL = ("le", "ls", "ge", "hs")


@dataclass(frozen=True, slots=True)
class NaturalLoop:
    """A loop that can be entered only at its header. Its latches are the blocks that jump back to the header."""

    header: int
    blocks: frozenset[int]
    latches: frozenset[int]


def natural_loops(flow: ControlFlow) -> list[NaturalLoop]:
    """Return the loops of a function, also inner loops, by header."""
    latches: dict[int, set[int]] = {}
    for number in sorted(flow.in_loop & flow.reachable):
        for successor in flow.blocks[number].successors:
            if flow.dominates(successor, number):
                latches.setdefault(successor, set()).add(number)
    found = []
    for header, ends in sorted(latches.items()):
        blocks, work = {header}, list(ends)
        while work:
            one = work.pop()
            if one not in blocks:
                blocks.add(one)
                work += [before for before in flow.blocks[one].predecessors if before in flow.reachable]
        found.append(NaturalLoop(header, frozenset(blocks), frozenset(ends)))
    return found


class CountedLoop:
    """A loop, its counters (registers that each iteration changes by the same amount), and the values computed from
    them.

    `steps` has the amount of each counter. It is None if a register that the loop does not change has the amount.
    """

    def __init__(self, analysis: FunctionAnalysis, loop: NaturalLoop, inner: frozenset[int]) -> None:
        """`inner` are the blocks of loops inside this one."""
        self.loop = loop
        self._analysis = analysis
        self._flow, self._data = analysis.flow, analysis.data
        self.steps: dict[str, int | None] = {}
        self._updates: dict[str, int] = {}  # counter -> the instruction that adds its step
        once = [
            number
            for number in loop.blocks - inner
            if all(self._flow.dominates(number, latch) for latch in loop.latches)
        ]
        for number in once:
            for at in range(self._flow.blocks[number].start, self._flow.blocks[number].end):
                self._add_counter(at)
        self._values = self._values_of_counters()

    def instructions(self) -> Iterator[int]:
        """Yield the numbers of the loop's instructions, in the order of the text."""
        for number in sorted(self.loop.blocks):
            yield from range(self._flow.blocks[number].start, self._flow.blocks[number].end)

    def _writers_inside(self, name: str) -> list[int]:
        return [at for at in self._data.writers.get(name, ()) if self._flow.block_of[at] in self.loop.blocks]

    def is_invariant(self, name: str) -> bool:
        return not self._writers_inside(name)

    def _add_counter(self, at: int) -> None:
        """Store the counter that an instruction such as `add %r1, %r1, 4` changes. A copy may follow: `add %r2, %r1,
        4; mov %r1, %r2`.
        """
        one = self._analysis.instructions[at]
        if one.guard or len(self._data.writes[at]) != 1:
            return
        (name,) = self._data.writes[at]
        if self._writers_inside(name) != [at]:
            return
        if opcode(one.opcode).base == "mov" and len(one.operands) == 2:
            sources = self._writers_inside(one.operands[1])
            if len(sources) != 1:
                return
            one = self._analysis.instructions[sources[0]]
        parts = opcode(one.opcode).parts
        if parts[0] not in ("add", "sub") or one.guard or not _INTEGER.fullmatch(parts[-1]) or len(parts) != 2:
            return
        left, right = one.operands[1:]
        step = right if left == name else left if right == name and parts[0] == "add" else ""
        amount = _amount(step)
        if amount or (amount is None and step and step != name and self.is_invariant(step)):
            self.steps[name] = amount if amount is None or parts[0] == "add" else -amount
            self._updates[name] = at

    def _values_of_counters(self) -> LaneValues:
        """Return registers as sums of counters and of registers that the loop does not change."""
        base = self._data.most_lane_values
        known = {name: LaneValue({name: 1}, (0,)) for name in self.steps}
        writers: dict[str, PtxInstruction] = {}
        for at in self.instructions():
            for name in self._data.writes[at]:
                one = self._data.only_writer(name)
                if one is not None:
                    writers[name] = one
            for name in self._data.reads[at]:
                if name not in known and self.is_invariant(name):
                    value = base.of_register(name) if base is not None else None
                    known[name] = LaneValue({name: 1}, (0,)) if value is None else value
        threads = UNKNOWN_SHAPE if base is None else base.threads
        return LaneValues(threads, writers, frozenset(), self._analysis.variables, known)

    def margin(self, name: str, *, is_negated: bool = False) -> LaneValue | None:
        """Return a value that is above 0 exactly when a predicate holds, or None if unknown.

        It is a sum of counters (at the start of an iteration) and of registers that the loop does not change.
        """
        at = self._only_write(name)
        one = None if at is None else self._analysis.instructions[at]
        if at is None or one is None or len(one.operands) != 3 or "|" in one.operands[0]:
            return None
        parts = opcode(one.opcode).parts
        if parts[0] != "setp" or len(parts) != 3 or not _INTEGER.fullmatch(parts[2]):
            return None
        low, high = self._at_start(one.operands[1], at), self._at_start(one.operands[2], at)
        if low is None or high is None or parts[1] not in (*_LESS, *_MORE):
            return None
        for operand, value in zip(one.operands[1:], (low, high), strict=True):
            if self._is_unsigned(operand, at) and not self._is_never_negative(value):
                return None  # (unsigned) i - 2 < n: false, then true, and then false again
        margin = added(high, low, -1) if parts[1] in _LESS else added(low, high, -1)
        margin = added(margin, _constant(int(parts[1] in _OR_EQUAL)))
        return added(_constant(1), margin, -1) if is_negated else margin

    def _only_write(self, name: str) -> int | None:
        """Return the only instruction that writes a register, if it is in the loop."""
        writers = self._data.writers.get(name, [])
        is_only = self._data.only_writer(name) is not None and self._flow.block_of[writers[0]] in self.loop.blocks
        return writers[0] if is_only else None

    def _is_unsigned(self, operand: str, at: int, depth: int = 0) -> bool:
        """Whether a negative number becomes a large positive number in the computation or comparison of an
        operand.
        """
        one = self._analysis.instructions[at]
        parts = opcode(one.opcode).parts
        if (parts[-1][0] != "s" and parts[0] in ("setp", "cvt")) or (parts[-1] in ("u16", "u32") and "wide" in parts):
            return True
        write = self._only_write(operand)
        return (
            write is not None
            and depth < MAX_DEPTH
            and any(self._is_unsigned(name, write, depth + 1) for name in self._data.reads[write])
        )

    def _is_never_negative(self, value: LaneValue) -> bool:
        """Whether a value is free of counters, or is one counter plus numbers of 0 or above. The counter must start
        at 0 or above and grow.
        """
        counters = [name for name in value.terms if name in self.steps]
        if not counters:
            return True
        (name, *others) = counters
        step = self.steps[name]
        if others or value.terms[name] < 0 or (step is not None and step < 0) or min(value.lanes) < 0:
            return False
        rest = [factor if term in _NOT_NEGATIVE else -1 for term, factor in value.terms.items() if term != name]
        starts = [at for at in self._data.writers[name] if self._flow.block_of[at] not in self.loop.blocks]
        return min(rest, default=0) >= 0 and all(self._starts_at_0_or_above(at) for at in starts)

    def _starts_at_0_or_above(self, at: int) -> bool:
        one = self._analysis.instructions[at]
        base = self._data.most_lane_values
        if opcode(one.opcode).base != "mov" or len(one.operands) != 2 or base is None:
            return False
        value = base.of_address(one.operands[1])
        if value is None:
            return False
        factors = [factor if term in _NOT_NEGATIVE else -1 for term, factor in value.terms.items()]
        return min(*value.lanes, *factors, 0) >= 0

    def slope(self, margin: LaneValue) -> int | None:
        """Return the sign of a value's change per iteration, or 0 if it never changes. None if its direction is
        unknown.
        """
        change = 0
        for term, factor in margin.terms.items():
            if term in self.steps:
                step = self.steps[term]
                if step is None and len([name for name in margin.terms if name in self.steps]) > 1:
                    return None
                change += factor * (1 if step is None else step)
            elif any(name in re.findall(r"[\w$%#]+", term) for name in self.steps):
                return None  # a product of a counter
        return change

    def direction(self, name: str, depth: int = 0) -> int | None:
        """Return 1 if a predicate goes from false to true at most once, -1 for the reverse, and 0 if it does not
        change.

        Returns None if nothing is certain.
        """
        if self.is_invariant(name):
            return 0
        at = self._only_write(name)
        one = None if at is None else self._analysis.instructions[at]
        if one is None or depth > MAX_DEPTH:
            return None
        parts = opcode(one.opcode).parts
        if parts[0] == "setp":
            margin = self.margin(name)
            slope = None if margin is None else self.slope(margin)
            return None if slope is None else (slope > 0) - (slope < 0)
        if parts[-1] != "pred" or parts[0] not in ("and", "or", "not", "mov"):
            return None
        given = [self.direction(operand, depth + 1) for operand in one.operands[1:]]
        changing = [one for one in given if one]
        directions = set(changing)
        # The sign of a step in a register is unknown, so two counters may change in different directions.
        if None in given or len(directions) > 1 or (len(changing) > 1 and None in self.steps.values()):
            return None
        direction = directions.pop() if directions else 0
        return -direction if parts[0] == "not" else direction

    # --- counters before and after their update ---------------------------------------------------------------------

    def _at_start(self, operand: str, at: int) -> LaneValue | None:
        """Return the value of an operand, computed from the counters at the start of the iteration."""
        value = self._values.of_address(operand)
        for name in self.steps if value is not None else ():
            factor = value.terms.get(name, 0) if value is not None else 0
            if not factor:
                continue
            places = {self._is_updated(name, read) for read in self._reads_of(name, operand, at, 0)}
            step = self.steps[name]
            if places == {True} and step is not None and value is not None:
                value = added(value, _constant(factor * step))
            elif places != {False}:
                return None if step is not None else value
        return value

    def _reads_of(self, name: str, operand: str, at: int, depth: int) -> Iterator[int]:
        """Yield the instructions that read a counter to compute an operand."""
        if operand == name:
            yield at
            return
        write = self._only_write(operand)
        if write is not None and depth < MAX_DEPTH:
            for one in self._data.reads[write]:
                yield from self._reads_of(name, one, write, depth + 1)

    def _is_updated(self, name: str, read: int) -> bool | None:
        """Whether an instruction reads a counter after the iteration has updated it. None if this depends on the
        path.
        """
        update = self._updates[name]
        before, after = self._flow.block_of[update], self._flow.block_of[read]
        if before == after:
            return update < read
        if self._flow.dominates(before, after):
            return True
        reached = self._flow.reached_from(self._flow.blocks[before].successors, frozenset({self.loop.header}))
        return None if after in reached else False


def counted_loops(analysis: FunctionAnalysis) -> Iterator[CountedLoop]:
    """Yield the loops of a function that have counters."""
    loops = natural_loops(analysis.flow)
    for one in loops:
        inner = [other.blocks for other in loops if other is not one and other.header in one.blocks]
        counted = CountedLoop(analysis, one, frozenset().union(*(blocks for blocks in inner if blocks < one.blocks)))
        if counted.steps:
            yield counted


def _constant(value: int) -> LaneValue:
    return LaneValue({}, (value,))


def _amount(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def exit_margins(analysis: FunctionAnalysis, counted: CountedLoop) -> dict[int, LaneValue | None]:
    """Return for each block that can leave a loop a value that is above 0 exactly when the loop continues there."""
    flow = analysis.flow
    found: dict[int, LaneValue | None] = {}
    for at in sorted(counted.loop.blocks):
        block = flow.blocks[at]
        outside = [one for one in block.successors if one not in counted.loop.blocks]
        if not outside:
            continue
        last = analysis.instructions[block.end - 1]
        found[at] = None
        if last.guard and len(block.successors) == 2 and len(outside) == 1:
            goes_on_if_taken = block.successors[0] in counted.loop.blocks
            found[at] = counted.margin(last.guard, is_negated=goes_on_if_taken is last.is_negated)
    return found
