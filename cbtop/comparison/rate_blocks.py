"""Divide a process's wall-clock time into blocks of steps, with the tokens and the time of each phase."""

# Rules
# - The time begins with the first step after the warm-up, as on the screen. Each later step adds the time since the
#   previous step of any phase ended.
# - At MAX_BLOCKS, neighbouring blocks are merged in pairs.

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]

STEPS_A_BLOCK = 4  # A block has at least this many steps.
MAX_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class EndedSteps:
    """Steps in the order of their ends, as columns of equal length."""

    node: Column
    start_ns: Column
    end_ns: Column
    tokens: Column  # tokens of each step; 0 if not reported
    sequences: Column  # sequences of each step; -1 if not reported
    cached: Column  # cached positions before each step; -1 if not reported
    is_uncounted: NDArray[np.bool_]  # whether the step's tokens were not reported


@dataclass(slots=True)
class PhaseSums:
    """Sums over some steps of one phase."""

    steps: int = 0
    tokens: int = 0
    uncounted: int = 0  # number of steps without reported tokens
    sequences: int = 0
    told_sequences: int = 0  # number of steps with reported sequences
    cached: int = 0
    told_cached: int = 0  # number of steps with reported cached positions
    in_steps_ns: int = 0  # time (ns) when at least one of these steps ran

    def add(self, other: PhaseSums) -> None:
        for name in PhaseSums.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class RateBlock:
    """Consecutive steps of a process: their wall-clock time, and each phase's sums by its step node."""

    steps: int = 0
    wall_ns: int = 0
    phases: dict[int, PhaseSums] = field(default_factory=dict)

    def add(self, other: RateBlock) -> None:
        self.steps += other.steps
        self.wall_ns += other.wall_ns
        for node, sums in other.phases.items():
            self.phases.setdefault(node, PhaseSums()).add(sums)


class RateBlocks:
    """Collects the steps of a process in blocks."""

    def __init__(self) -> None:
        self.began_ns: int | None = None  # when the first step after the warm-up began
        self._each = STEPS_A_BLOCK
        self._blocks = [RateBlock()]
        self._reached_ns = 0  # when the last step ended
        self._reached_by: dict[int, int] = {}  # step node of a phase -> end of its last step

    def take(self, steps: EndedSteps, warm_ups: set[int]) -> None:
        """Add the next steps of the process. `warm_ups` are the step nodes of warm-up phases."""
        columns = (
            steps.node,
            steps.start_ns,
            steps.end_ns,
            steps.tokens,
            steps.sequences,
            steps.cached,
            steps.is_uncounted,
        )
        for row in zip(*(column.tolist() for column in columns), strict=True):
            node, start_ns, end_ns, tokens, sequences, cached, is_uncounted = row
            if self.began_ns is None:
                if node in warm_ups:
                    continue
                self.began_ns = self._reached_ns = start_ns
            wall_ns = max(0, end_ns - self._reached_ns)
            self._reached_ns += wall_ns
            ran_ns = max(0, end_ns - max(start_ns, self._reached_by.get(node, start_ns)))
            self._reached_by[node] = max(end_ns, self._reached_by.get(node, end_ns))
            block = self._blocks[-1]
            block.steps += 1
            block.wall_ns += wall_ns
            sums = block.phases.setdefault(node, PhaseSums())
            sums.steps += 1
            sums.tokens += tokens
            sums.uncounted += is_uncounted
            sums.sequences += max(0, sequences)
            sums.told_sequences += sequences >= 0
            sums.cached += max(0, cached)
            sums.told_cached += cached >= 0
            sums.in_steps_ns += ran_ns
            if block.steps == self._each:
                self._next_block()

    def _next_block(self) -> None:
        if len(self._blocks) == MAX_BLOCKS:
            for one, other in zip(self._blocks[::2], self._blocks[1::2], strict=True):
                one.add(other)
            self._blocks = self._blocks[::2]
            self._each *= 2
        self._blocks.append(RateBlock())

    @property
    def blocks(self) -> list[RateBlock]:
        """The full blocks of steps, in order."""
        return self._blocks[:-1]

    @property
    def whole(self) -> RateBlock:
        """One block with the sums over all steps of all blocks."""
        found = RateBlock()
        for block in self._blocks:
            found.add(block)
        return found
