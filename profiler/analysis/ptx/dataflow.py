"""The registers of a PTX function: where they are read and written, whether they differ between threads, and
liveness.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import cached_property

from cbtop.profiler.analysis.ptx.control_flow import ControlFlow
from cbtop.profiler.analysis.ptx.lane_values import LaneValues, Threads, most_threads_of, threads_of
from cbtop.profiler.analysis.ptx.model import PtxFunction, PtxInstruction, Variable
from cbtop.profiler.analysis.ptx.opcodes import inputs, is_block_reduction, opcode, results

_THREAD_IDS = ("%tid.x", "%laneid", "%warpid", "%lanemask")
_OTHER_IDS = ("%tid.y", "%tid.z", "%clock", "%globaltimer", "%pm")
_MIXING = frozenset({"sub", "xor", "rem", "min", "max", "selp", "slct", "and", "mul24"})
_EXCHANGES = frozenset({"shfl", "vote", "match", "redux", "activemask", "call", "atom", "mbarrier", "elect", "tex"})


class Divergence(IntEnum):
    """Whether a register may differ between the threads of a block, and how certain this is."""

    UNIFORM = 0
    POSSIBLE = 1  # may differ: the value was loaded, comes from another thread, or depends on a thread's path
    BY_THREAD = 2  # differs: the value is computed from the thread's id


class Dataflow:
    """The reads and writes of a function's registers. Unreachable instructions are left out."""

    def __init__(
        self, function: PtxFunction, flow: ControlFlow, variables: dict[str, Variable], launch: Sequence[int] | None,
        shared: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """`shared` are the instructions with the same result in all threads, found by `thread_bits`."""
        self._function = function
        self._flow = flow
        self._variables = variables
        self._launch = launch
        self._shared = shared
        registers = function.registers
        self.writes = [results(one, registers) for one in function.instructions]
        self.reads = [inputs(one, registers) for one in function.instructions]
        self.writers: dict[str, list[int]] = defaultdict(list)
        self.readers: dict[str, list[int]] = defaultdict(list)
        # Write -> the reads that certainly get its value. No other write is in between. Both are in one block, or in
        # adjacent blocks outside of loops that always follow each other.
        self._readers_of_write: dict[int, list[int]] = defaultdict(list)
        self._other_readers: dict[str, list[int]] = defaultdict(list)
        latest: dict[str, int] = {}
        for at in self._reachable_indexes():
            number = flow.block_of[at]
            if at == flow.blocks[number].start and not self._only_follows(number):
                latest.clear()
            for name in self.reads[at]:
                self.readers[name].append(at)
                write = latest.get(name)
                (self._other_readers[name] if write is None else self._readers_of_write[write]).append(at)
            for name in self.writes[at]:
                self.writers[name].append(at)
                if function.instructions[at].guard:
                    latest.pop(name, None)
                else:
                    latest[name] = at

    def _only_follows(self, number: int) -> bool:
        """Whether the block before this one is its only predecessor, and is not in a loop."""
        return self._flow.blocks[number].predecessors == [number - 1] and number - 1 not in self._flow.in_loop

    def _reachable_indexes(self) -> Iterator[int]:
        for number in sorted(self._flow.reachable):
            block = self._flow.blocks[number]
            yield from range(block.start, block.end)

    def only_writer(self, name: str) -> PtxInstruction | None:
        """Return the only instruction that writes a register. None if there are several, or if it is conditional."""
        writers = self.writers.get(name, ())
        if len(writers) != 1 or name in self._function.registers.given:
            return None
        one = self._function.instructions[writers[0]]
        return None if one.guard else one

    def has_same_turn(self, write: int, read: int) -> bool:
        """Whether a read always gets the value that was written in the same iteration of its loop. True if the write
        is outside of loops.
        """
        number = self._flow.block_of[write]
        return number not in self._flow.in_loop or number == self._flow.block_of[read]

    # --- divergence -------------------------------------------------------------------------------------------------

    @cached_property
    def divergence(self) -> dict[str, Divergence]:
        """Register that may differ between threads -> its divergence."""
        divergent = self._divergent()
        proved = set(divergent)
        work = list(divergent)
        while work:
            name = work.pop()
            if name in proved and not all(self._is_by_thread(at, proved) for at in self.writers[name]):
                proved.discard(name)
                for at in self.readers.get(name, ()):
                    work += [written for written in self.writes[at] if written in proved]
        return {name: Divergence.BY_THREAD if name in proved else Divergence.POSSIBLE for name in sorted(divergent)}

    def _is_by_thread(self, at: int, proved: set[str]) -> bool:
        """Whether the results of an instruction certainly differ by thread, given that the registers in `proved`
        do.
        """
        one = self._function.instructions[at]
        parsed = opcode(one.opcode)
        if parsed.base in ("ld", "tex", "ldu", "suld", "tld4", "ldmatrix") or parsed.base in _EXCHANGES or one.guard:
            return False
        own = sum(_names(one, ids) for ids in _THREAD_IDS)
        divergent = [name for name in self.reads[at] if name in self._divergent_names]
        if any(name not in proved for name in divergent):
            return False
        count = own + len(set(divergent))
        return count == 1 if parsed.base in _MIXING else count > 0

    @cached_property
    def _divergent_names(self) -> set[str]:
        return self._divergent()

    def _divergent(self) -> set[str]:
        """Return the registers that may differ between threads."""
        found: set[str] = set()
        given = [] if self._function.is_entry else list(self._function.registers.given)
        branches = self._branches()
        done: set[int] = set()  # instructions with results that may differ between threads
        instructions = self._function.instructions
        work = [at for at in self._reachable_indexes() if self._starts_divergence(instructions[at])]
        names = given
        while work or names:
            if names:
                if (name := names.pop()) not in found:
                    found.add(name)
                    work += self._other_readers.get(name, ())
                continue
            at = work.pop()
            if at in done or at in self._shared or is_block_reduction(instructions[at]):
                continue
            done.add(at)
            names += self.writes[at]
            work += self._readers_of_write.get(at, ())
            if at in branches:
                names += self._written_by_some(branches[at])
        return found

    def _written_by_some(self, number: int) -> Iterator[str]:
        """Yield registers that may differ because threads take the branch at the end of a block differently."""
        for block_number in self._flow.influence(number):
            block = self._flow.blocks[block_number]
            for at in range(block.start, block.end):
                yield from [name for name in self.writes[at] if self._leaves_region(name, at)]

    def _leaves_region(self, name: str, at: int) -> bool:
        """Whether a register that is written in a divergent region may still differ after it. With a single write, it
        may differ if threads leave a loop at different times.
        """
        return len(self.writers[name]) > 1 or self._flow.block_of[at] in self._flow.in_loop

    def _branches(self) -> dict[int, int]:
        """Return each branch instruction's number -> the block that it ends."""
        return {
            block.end - 1: number
            for number, block in enumerate(self._flow.blocks)
            if block.end > block.start and len(block.successors) > 1
        }

    def _starts_divergence(self, one: PtxInstruction) -> bool:
        parsed = opcode(one.opcode)
        if parsed.base in ("elect", "activemask", "call", "atom", "mbarrier") or "match" in parsed.parts:
            return True
        if parsed.base == "ld" and parsed.space == "param" and not self._function.is_entry:
            return True
        return any(_names(one, ids) for ids in (*_THREAD_IDS, *_OTHER_IDS))

    def divergence_of(self, name: str) -> Divergence:
        """Return the divergence of a register. It is uniform if its value is known to be the same in all threads.

        If the block size is unknown, this must be so in the largest possible block.
        """
        found = self.divergence.get(name, Divergence.UNIFORM)
        if found is Divergence.UNIFORM or self.most_lane_values is None:
            return found
        is_whole = self.most_lane_values.threads.is_whole_block
        if not is_whole and found is not Divergence.BY_THREAD:
            return found
        value = self.most_lane_values.of_register(name)
        if value is not None and value.is_uniform:
            return Divergence.UNIFORM
        return Divergence.BY_THREAD if value is not None and is_whole else found

    # --- values -----------------------------------------------------------------------------------------------------

    @cached_property
    def lane_values(self) -> LaneValues | None:
        """The values of registers in each thread of a block. None if the block's shape is unknown."""
        threads = threads_of(self._function, self._launch)
        return None if threads is None else self._values_in(threads)

    @cached_property
    def most_lane_values(self) -> LaneValues | None:
        """The values of registers in each thread of the largest possible block. None if a row of the block may have
        any length.
        """
        if self.lane_values is None or self.lane_values.threads.is_whole_block:
            return self.lane_values
        return self._values_in(most_threads_of(self._function))

    def _values_in(self, threads: Threads) -> LaneValues:
        writer_of = {name: one for name in self.writers if (one := self.only_writer(name)) is not None}
        steady = frozenset(
            name
            for name in writer_of
            if name not in self.divergence and self._flow.block_of[self.writers[name][0]] not in self._flow.in_loop
        )
        return LaneValues(threads, writer_of, steady, self._variables)

    # --- liveness ---------------------------------------------------------------------------------------------------

    def live_at_ends(self, names: Sequence[str]) -> list[int]:
        """Return a bit mask for each basic block: which registers in `names` are still read after it."""
        bit = {name: 1 << place for place, name in enumerate(names)}
        blocks = self._flow.blocks
        needed, written = [0] * len(blocks), [0] * len(blocks)
        for number in self._flow.reachable:
            for at in range(blocks[number].start, blocks[number].end):
                for name in self.reads[at]:
                    needed[number] |= bit.get(name, 0) & ~written[number]
                if not self._function.instructions[at].guard:
                    for name in self.writes[at]:
                        written[number] |= bit.get(name, 0)
        live = [0] * len(blocks)
        work = sorted(self._flow.reachable)
        while work:
            number = work.pop()
            before = needed[number] | live[number] & ~written[number]
            for previous in blocks[number].predecessors:
                if before & ~live[previous]:
                    live[previous] |= before
                    work.append(previous)
        return live

    @cached_property
    def possibly_unwritten(self) -> list[tuple[int, str, bool]]:
        """Reads of registers that some path does not write before: instruction, register, and whether no path writes
        it.

        A write with a guard may leave a register unwritten.
        """
        names = sorted(self.readers.keys() - self._function.registers.given)
        bit = {name: 1 << place for place, name in enumerate(names)}
        everything = (1 << len(names)) - 1
        blocks = self._flow.blocks
        # `on_any` counts all writes; `written` only those without a guard.
        written, on_any = [0] * len(blocks), [0] * len(blocks)
        for number in self._flow.reachable:
            for at in range(blocks[number].start, blocks[number].end):
                for name in self.writes[at]:
                    on_any[number] |= bit.get(name, 0)
                    written[number] |= 0 if self._function.instructions[at].guard else bit.get(name, 0)
        some = [everything if number else 0 for number in range(len(blocks))]  # written on all paths
        any_path = [0] * len(blocks)  # written on any path
        work = sorted(self._flow.reachable, reverse=True)
        while work:
            number = work.pop()
            for successor in blocks[number].successors:
                all_new = some[successor] & (some[number] | written[number])
                any_new = any_path[successor] | any_path[number] | on_any[number]
                if all_new != some[successor] or any_new != any_path[successor]:
                    some[successor], any_path[successor] = all_new, any_new
                    work.append(successor)
        found = []
        for number in sorted(self._flow.reachable):
            always, ever = some[number], any_path[number]
            for at in range(blocks[number].start, blocks[number].end):
                for name in dict.fromkeys(self.reads[at]):
                    if name in bit and not always & bit[name]:
                        found.append((at, name, not ever & bit[name]))
                for name in self.writes[at]:
                    always |= 0 if self._function.instructions[at].guard else bit.get(name, 0)
                    ever |= bit.get(name, 0)
        return found


def _names(one: PtxInstruction, identifier: str) -> bool:
    return any(identifier in operand for operand in one.operands)
