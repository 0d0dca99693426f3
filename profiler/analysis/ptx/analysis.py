"""The results of all analyses of one PTX function for the lints. Each is computed when it is first needed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from cbtop.profiler.analysis.ptx.control_flow import ControlFlow
from cbtop.profiler.analysis.ptx.dataflow import Dataflow, Divergence
from cbtop.profiler.analysis.ptx.lane_values import WARP_THREADS, LaneValue
from cbtop.profiler.analysis.ptx.model import Module, PtxFunction, PtxInstruction, Variable
from cbtop.profiler.analysis.ptx.opcodes import (
    address_in,
    copied_bytes,
    is_block_barrier,
    is_end,
    is_plain_access,
    may_diverge_at,
    opcode,
)
from cbtop.profiler.analysis.ptx.thread_bits import shared_results

FIRST_WITHOUT_EXITED = 70  # the architecture
MAX_SHARED_ACCESSES = 400  # at most this many accesses with known addresses, because each is compared with all others


@dataclass(frozen=True, slots=True)
class SharedAccess:
    """A load or store of shared memory with known addresses. `root` is the part of the address that is the same in
    all threads, as (term, factor).

    `offsets` has each thread's first byte, relative to `root`. `threads` has the numbers of the threads that run the
    instruction.
    """

    at: int
    is_store: bool
    root: tuple[tuple[str, int], ...]
    offsets: tuple[int, ...]
    size_bytes: int
    threads: tuple[int, ...]

    @property
    def footprint(self) -> tuple[object, ...]:
        """The bytes that each thread accesses. Equal footprints have equal bank conflicts."""
        return self.offsets, self.size_bytes, self.threads


class FunctionAnalysis:
    """A function of a module, and the results of the analyses. `launch` is the block size, if it is known."""

    def __init__(self, module: Module, function: PtxFunction, launch: Sequence[int] | None = None) -> None:
        self.module = module
        self.function = function
        self.launch = launch
        self.instructions: Sequence[PtxInstruction] = function.instructions
        self._threads: dict[tuple[int, str, bool], tuple[int, ...] | None] = {}  # by block and guard

    @cached_property
    def flow(self) -> ControlFlow:
        return ControlFlow(self.function)

    @cached_property
    def data(self) -> Dataflow:
        found = Dataflow(self.function, self.flow, self.variables, self.launch)
        conditions = self._conditions_of_branches(found)
        if all(found.divergence_of(name) is not Divergence.POSSIBLE for name in conditions):
            return found
        shared = shared_results(found)
        return Dataflow(self.function, self.flow, self.variables, self.launch, shared) if shared else found

    def _conditions_of_branches(self, data: Dataflow) -> Iterator[str]:
        for number in self.flow.reachable:
            block = self.flow.blocks[number]
            if len(block.successors) > 1 and block.end > block.start:
                yield from data.reads[block.end - 1]

    @cached_property
    def variables(self) -> dict[str, Variable]:
        """The variables that the function can use: its own and those of the module."""
        own = self.function
        return {one.name: one for one in (*self.module.variables, *own.parameters, *own.variables)}

    def reachable(self) -> Iterator[tuple[int, PtxInstruction]]:
        """Yield the instructions that a thread can reach, and their numbers."""
        for number in sorted(self.flow.reachable):
            block = self.flow.blocks[number]
            for at in range(block.start, block.end):
                yield at, self.instructions[at]

    def place_of(self, index: int | None) -> tuple[int, tuple[str, int] | None]:
        """Return an instruction's line in the PTX, and its file and line in the source if the PTX has debug lines."""
        if index is None:
            return self.function.line, None
        one = self.function.instructions[index]
        path = self.module.files.get(one.source[0]) if one.source else None
        return one.line, (path, one.source[1]) if path and one.source else None

    def address(self, at: int) -> LaneValue | None:
        """Return the address of a memory access in each thread."""
        values = self.data.lane_values
        return None if values is None else values.of_address(address_in(self.instructions[at]))

    @cached_property
    def barriers_wait_for_exited(self) -> bool:
        """Whether a barrier waits for threads that have already returned. It does not from sm_70 on (CUDA Programming
        Guide, "Independent Thread Scheduling").
        """
        match = re.match(r"sm_([0-9]+)", self.module.target)
        return match is not None and int(match[1]) < FIRST_WITHOUT_EXITED

    # --- which threads execute what ---------------------------------------------------------------------------------

    @cached_property
    def divergent_branches(self) -> dict[int, Divergence]:
        """Block that ends with a divergent branch -> the divergence. Threads of a thread block may take such a branch
        differently.
        """
        found: dict[int, Divergence] = {}
        for number in sorted(self.flow.reachable):
            block = self.flow.blocks[number]
            if len(block.successors) > 1 and block.end > block.start:
                level = max(map(self.data.divergence_of, self.data.reads[block.end - 1]), default=Divergence.UNIFORM)
                if level is not Divergence.UNIFORM:
                    found[number] = level
        return found

    def is_split_by_ids(self, name: str) -> bool:
        """Whether a predicate certainly differs between the threads of a block, because only their ids decide it.

        If it also depends on a parameter or on an unknown block size, all threads may have the same value.
        """
        values = self.data.lane_values
        value = values.of_register(name) if values is not None else None
        return value is not None and value.is_number and not value.is_uniform

    def sides(self, branch: int) -> list[frozenset[int]]:
        """Return the basic blocks on each side of a branch, until the sides join. Block number `branch` ends with the
        branch.
        """
        join = self.flow.post_dominators[branch]
        stop = frozenset() if join is None else frozenset({join})
        return [self.flow.reached_from([one], stop) for one in self.flow.blocks[branch].successors]

    def is_early_return(self, branch: int) -> bool:
        """Whether a divergent branch is an early return: one side goes directly to the end of the function, where the
        sides meet. Block number `branch` ends with the branch.
        """
        join = self.flow.post_dominators[branch]
        if join is None or join == self.flow.exit:
            return join is not None
        block = self.flow.blocks[join]
        only_ends = block.end == block.start + 1 and is_end(self.instructions[block.start])
        return only_ends and join in self.flow.blocks[branch].successors

    @cached_property
    def meeting_barriers(self) -> frozenset[int]:
        """The barriers at which warps with different work meet, each at its own instruction.

        These barriers are not aligned, and both sides of a divergent branch have a barrier with the same number.
        """
        free = {at for at, one in self.reachable() if is_block_barrier(one) and may_diverge_at(one)}
        met: set[tuple[str, ...]] = set()
        for branch in self.divergent_branches if free else ():
            names = [
                {self.instructions[at].operands for at in free if self.flow.block_of[at] in side}
                for side in self.sides(branch)
            ]
            met |= set.intersection(*names)
        return frozenset(at for at in free if self.instructions[at].operands in met)

    @cached_property
    def _controllers(self) -> dict[int, list[int]]:
        """Basic block -> the blocks with divergent branches that decide whether it runs."""
        found: dict[int, list[int]] = {}
        for branch in self.divergent_branches:
            for number in self.flow.influence(branch):
                found.setdefault(number, []).append(branch)
        return found

    def threads_at(self, at: int) -> tuple[int, ...] | None:
        """Return the numbers of the threads that run an instruction, or None if unknown."""
        one = self.instructions[at]
        key = self.flow.block_of[at], one.guard, one.is_negated
        if key not in self._threads:
            self._threads[key] = self._threads_at(at)
        return self._threads[key]

    def _threads_at(self, at: int) -> tuple[int, ...] | None:
        values = self.data.lane_values
        if values is None:
            return None
        number = self.flow.block_of[at]
        conditions = self.conditions(number)
        if any(branch not in conditions for branch in self._controllers.get(number, ())):
            return None
        given = [conditions[branch] for branch in self._controllers.get(number, ())]
        one = self.instructions[at]
        if one.guard:
            given.append((one.guard, not one.is_negated))
        threads = set(range(values.threads.count))
        for name, is_true in given:
            value = values.of_register(name)
            if value is None or value.terms:
                return None
            lanes = value.lanes * values.threads.count if len(value.lanes) == 1 else value.lanes
            threads &= {thread for thread, lane in enumerate(lanes) if bool(lane) is is_true}
        return tuple(sorted(threads))

    def conditions(self, number: int) -> dict[int, tuple[str, bool]]:
        """Return what must be true for a basic block to run: a map from a block with a branch to the register that
        decides the branch, and the value that it must have.
        """
        found = {}
        blocks, dominators = self.flow.blocks, self.flow.dominators
        at: int | None = number
        while at is not None and dominators[at] not in (None, at):
            above = dominators[at]
            last = self.instructions[blocks[above].end - 1] if above is not None else None
            if above is not None and last is not None and last.guard and blocks[at].predecessors == [above]:
                taken, not_taken = blocks[above].successors[0], blocks[above].successors[-1]
                if taken != not_taken:
                    found[above] = last.guard, (at == taken) is not last.is_negated
            at = above
        return found

    def facts(self, at: int) -> frozenset[tuple[object, ...]]:
        """Return what is known when an instruction runs. Equal comparisons give equal facts."""
        conditions = self.conditions(self.flow.block_of[at]).values()
        return frozenset(self.fact_of(name, is_true=is_true) for name, is_true in conditions)

    def fact_of(self, name: str, *, is_true: bool) -> tuple[object, ...]:
        """Return the fact that the predicate `name` is true (or false, if `is_true` is False)."""
        writer = self.data.only_writer(name)
        return (writer.opcode, writer.operands[1:]) if writer else name, is_true

    def depends_on_threads_alone(self, at: int) -> bool:
        """Whether thread ids alone decide if an instruction runs, without any parameter or loaded value."""
        number = self.flow.block_of[at]
        values = self.data.lane_values
        if values is None or self.flow.post_dominates(number, 0):
            return values is not None
        conditions = self.conditions(number)
        for branch in sorted(self.flow.reachable):
            if len(self.flow.blocks[branch].successors) < 2 or number not in self.flow.influence(branch):
                continue
            value = values.of_register(conditions[branch][0]) if branch in conditions else None
            if value is None or value.terms:
                return False
        return True

    @cached_property
    def shared_accesses(self) -> list[SharedAccess]:
        """The first weak loads, stores and asynchronous copies of shared memory with known addresses and threads."""
        values = self.data.lane_values
        if values is None:
            return []
        found = []
        for at, one in self.reachable():
            copied = copied_bytes(one)
            if not copied and not is_plain_access(one, "shared"):
                continue
            address = self.address(at)
            if address is None or not any(name.startswith("shared:") for name in address.terms):
                continue
            threads = self.threads_at(at)
            if threads:
                parsed = opcode(one.opcode)
                count = values.threads.count
                offsets = address.lanes * count if len(address.lanes) == 1 else address.lanes
                root = tuple(sorted(address.terms.items()))
                found.append(SharedAccess(at, parsed.base != "ld", root, offsets, copied or parsed.bytes, threads))
                if len(found) == MAX_SHARED_ACCESSES:
                    break
        return found


def are_in_one_warp(one: int, other: int) -> bool:
    return one // WARP_THREADS == other // WARP_THREADS
