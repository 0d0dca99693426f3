"""Group a process's records into blocks of steps that do the same work. Runs are compared by these blocks."""

# Rules
# - Only whole steps count. A record belongs to the next step that ends in its lane. A step's sequences and cached
#   positions follow directly after it.
# - A block has a number of steps, not of seconds. So a short run has as many blocks as a long one, but shorter ones.
# - Every nanosecond after the first step's end is in a block: each step gets the time since the previous one ended.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cbtop.comparison.noise import MIN_BLOCKS
from cbtop.comparison.rate_blocks import STEPS_A_BLOCK, EndedSteps, RateBlocks
from cbtop.comparison.step_counts import StepCounts
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.growth import Growth
from cbtop.profiler.analysis.histograms import Column
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.record_batch import joined
from cbtop.protocol.ring import (
    FLAG_AMOUNTS,
    FLAG_CANCELLED,
    FLAG_LOOSE,
    FLAG_PLAIN,
    FLAG_UNCOUNTED,
    LANE_SHIFT,
    LANES,
)
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import is_warm_up

Flags = NDArray[np.bool_]

LEAST_STEPS = MIN_BLOCKS * STEPS_A_BLOCK  # A group of steps has at least this many steps.
# At most this many blocks per kind of work. Above, neighbouring blocks are merged in pairs.
MAX_BLOCKS = 64
MAX_WORKS = 256
MAX_HELD = 1 << 20  # At most this many records wait for the ends of their steps.
# Amounts are equal if they differ only after this many significant bits.
ALIKE_BITS = 3


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step: its node, and its tokens and sequences, rounded down (None: not reported).

    Numbers that differ by less than a quarter may be rounded to the same value.
    """

    step: int
    tokens: int | None
    sequences: int | None


@dataclass(frozen=True, slots=True)
class StepBlock:
    """Consecutive steps with the same work: their number, wall-clock time, and growth of the statistics.

    The wall-clock time of a step begins when the previous one ends, so it has the pauses.
    """

    steps: int
    wall_ns: int
    growth: Growth


@dataclass(slots=True)
class _Pile:
    """The full blocks of one kind of work, and the steps that do not fill a block yet."""

    each: int = STEPS_A_BLOCK
    blocks: list[StepBlock] = field(default_factory=list)
    steps: int = 0
    wall_ns: int = 0
    parts: list[Batch] = field(default_factory=list)


class StepBlocks:
    """Groups the records of a process into blocks. `table` has the nodes of the process."""

    def __init__(self, table: NodeTable) -> None:
        self._table = table
        self._piles: dict[StepWork, _Pile] = {}
        self._held: list[Batch] = []
        self._reached_ns: int | None = None  # latest end of any step
        self.rates = RateBlocks()
        self.steps = 0
        self.counts = StepCounts(table)
        self.left_out = 0  # number of steps beyond MAX_WORKS kinds of work, which are left out

    def take(self, batch: Batch) -> None:
        """Add the next records of the recording. Their nodes must already be in the node table."""
        self._held.append(batch)
        together = joined(self._held)
        self._held = [self._count(together, is_last=False)]
        if len(self._held[0].node) > MAX_HELD:
            self._held = []

    def blocks(self) -> dict[StepWork, list[StepBlock]]:
        """Return each kind of work's full blocks, by first appearance. Nothing may be added after that."""
        self._count(joined(self._held), is_last=True)
        self._held = []
        return {work: pile.blocks for work, pile in self._piles.items()}

    def count_of(self, work: StepWork) -> int:
        """Return the number of all steps with this work, with the steps of the unfinished block."""
        pile = self._piles[work]
        return sum(block.steps for block in pile.blocks) + pile.steps

    def time_us_of(self, work: StepWork) -> float:
        """Return the wall-clock time (µs) of all steps with this work, with the time before each."""
        pile = self._piles[work]
        return (sum(block.wall_ns for block in pile.blocks) + pile.wall_ns) / 1e3

    def _count(self, batch: Batch, *, is_last: bool) -> Batch:
        """Count the steps that end in `batch`. Return the records of steps that have not ended yet."""
        step_of, _, _ = self._table.columns()
        is_step = step_of[batch.node] == batch.node
        plain, amounts = batch.are(FLAG_PLAIN), batch.are(FLAG_AMOUNTS)
        odd = amounts | batch.are(FLAG_LOOSE)
        ends = np.flatnonzero(is_step & ~odd)
        # The records with the last step's amounts may still follow, so count it with the next batch.
        done = len(ends) if is_last else max(0, len(ends) - 1)
        owner = _owners(batch, ends, is_step, plain, odd)
        owner[step_of[batch.node] < 0] = -2  # Records outside of steps belong to no block.
        if done:
            self._count_steps(batch, ends[:done], owner, amounts)
        return batch.only((owner == -1) | (owner >= done))

    def _count_steps(self, batch: Batch, ends: Column, owner: Column, amounts: Flags) -> None:
        self.counts.take(batch, ends, owner)
        counted = np.flatnonzero(~batch.are(FLAG_CANCELLED)[ends])
        if not len(counted):
            return
        if self._reached_ns is None:
            # The first block's wall-clock time begins with the first step.
            self._reached_ns = int(batch.start_ns[ends[counted[0]]])
        reached = np.maximum(np.maximum.accumulate(batch.end_ns[ends[counted]]), self._reached_ns)
        wall_ns = np.zeros(len(ends), np.int64)
        # A step's wall-clock time includes cancelled steps before it.
        wall_ns[counted] = np.diff(reached, prepend=self._reached_ns)
        self._reached_ns = int(reached[-1])
        sequences, cached = np.full(len(ends), -1), np.full(len(ends), -1)
        said = np.flatnonzero(amounts & (owner >= 0) & (owner < len(ends)))
        said = said[batch.node[said] == batch.node[ends[owner[said]]]]
        sequences[owner[said]], cached[owner[said]] = batch.start_ns[said], batch.end_ns[said]
        self._take_rates(batch, ends[counted], sequences[counted], cached[counted])
        numbers: dict[StepWork, int] = {}
        of = np.full(len(ends), -1)
        columns = (counted, batch.node[ends[counted]], batch.elements[ends[counted]], sequences[counted])
        for at, node, tokens, given in zip(*(column.tolist() for column in columns), strict=True):
            of[at] = numbers.setdefault(StepWork(node, _alike(tokens or None), _alike(given)), len(numbers))
        own = (owner >= 0) & (owner < len(ends))
        work_of_record = np.full(len(owner), -1)
        work_of_record[own] = of[owner[own]]
        for work, number in numbers.items():
            chosen = np.flatnonzero(of == number)
            records = np.flatnonzero(work_of_record == number)
            self._pile(work, batch, chosen, records, owner, wall_ns)
        self.steps += len(counted)

    def _take_rates(self, batch: Batch, ends: Column, sequences: Column, cached: Column) -> None:
        nodes = batch.node[ends]
        warm_ups = {node for node in np.unique(nodes).tolist() if is_warm_up(self._table[node].name)}
        is_uncounted = batch.are(FLAG_UNCOUNTED)[ends]
        steps = EndedSteps(
            nodes, batch.start_ns[ends], batch.end_ns[ends], batch.elements[ends], sequences, cached, is_uncounted
        )
        self.rates.take(steps, warm_ups)

    def _pile(
        self, work: StepWork, batch: Batch, chosen: Column, records: Column, owner: Column, wall_ns: Column
    ) -> None:
        """Add the steps with the indices `chosen`, and the records inside them, to the blocks of steps that do
        `work`.
        """
        pile = self._piles.get(work)
        if pile is None:
            if len(self._piles) >= MAX_WORKS:
                self.left_out += len(chosen)
                return
            pile = self._piles[work] = _Pile()
        while len(chosen):
            taken, chosen = np.split(chosen, [pile.each - pile.steps])
            now = owner[records] <= taken[-1]
            is_taken = np.zeros(len(batch.node), np.bool_)
            is_taken[records[now]] = True
            records = records[~now]
            pile.parts.append(batch.only(is_taken))
            pile.steps += len(taken)
            pile.wall_ns += int(wall_ns[taken].sum())
            if pile.steps == pile.each:
                stats = NodeStats()
                stats.add(joined(pile.parts), *self._table.columns())
                pile.blocks.append(StepBlock(pile.steps, pile.wall_ns, stats.everything()))
                pile.steps, pile.wall_ns, pile.parts = 0, 0, []
                if len(pile.blocks) == MAX_BLOCKS:
                    pile.blocks = list(_by_twos(pile.blocks))
                    pile.each *= 2


def _owners(batch: Batch, ends: Column, is_step: Flags, plain: Flags, odd: Flags) -> Column:
    """Return for each record the index in `ends` of its step: -1 if it has not ended yet, -2 outside of steps."""
    owner = np.full(len(batch.node), -1)
    owner[ends] = np.arange(len(ends))
    lane = (batch.flags >> LANE_SHIFT) & (LANES - 1)
    inside = ~is_step & ~odd
    for one in np.unique(lane[inside]).tolist():
        here = np.flatnonzero(inside & (lane == one))
        of_lane = np.flatnonzero((lane[ends] == one) & ~plain[ends])
        next_end = np.searchsorted(ends[of_lane], here)
        known = next_end < len(of_lane)
        owner[here[known]] = of_lane[next_end[known]]
    # A step's own amounts follow directly after it, then the amounts of calls.
    said = np.flatnonzero(odd)
    before = np.searchsorted(ends, said) - 1
    owner[said] = np.where(before >= 0, before, -2)
    return owner


def _by_twos(blocks: Iterable[StepBlock]) -> Iterator[StepBlock]:
    for one, other in zip(*[iter(blocks)] * 2, strict=True):
        growth = Growth.of([one.growth, other.growth])
        yield StepBlock(one.steps + other.steps, one.wall_ns + other.wall_ns, growth)


def _alike(amount: int | None) -> int | None:
    """Round `amount` down to ALIKE_BITS significant bits."""
    if amount is None or amount < 0:
        return None
    shift = max(0, amount.bit_length() - ALIKE_BITS)
    return amount >> shift << shift


def most_alike(least: int) -> int:
    """Return the largest amount that is rounded down to `least`, and so counts as equal."""
    return least + (1 << max(0, least.bit_length() - ALIKE_BITS)) - 1
