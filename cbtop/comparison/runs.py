"""A run: the times of its steps, bricks and layers, by phase and batch. All are derived from records."""

# Words
# - A part of a run is a group of steps that do the same work: one phase, and similar numbers of tokens and sequences.
# - A place is a brick, a layer, a brick in a layer, or the whole step.
# - A unit is a token, or a step if tokens are unknown. Times are exclusive and in µs per unit. Times of calls are
#   inclusive. Rules
# - wall = bricks + between bricks + not recorded inside + between steps, per unit, even if steps overlap.
# - Steps with more cached positions take longer. This is not noise, so each time is given at the mean number of
#   positions, with its slope.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cbtop.comparison.baseline import Surroundings
from cbtop.comparison.contents import Contents
from cbtop.comparison.drift import Thirds, thirds_of, without_pauses
from cbtop.comparison.items import (
    WHOLE_STEP,
    Brick,
    PhasePlaces,
    Place,
    PlaceTimes,
    median_of,
    place_times,
)
from cbtop.comparison.memory_peaks import PhaseMemory
from cbtop.comparison.noise import MIN_BLOCKS, Figure, figures, slow_start, stretched
from cbtop.comparison.phase_rates import PhaseRates
from cbtop.comparison.quantiles import MEDIAN, P99, CallTimes
from cbtop.comparison.step_blocks import StepBlock, StepWork
from cbtop.profiler.analysis.brick_stats import brick_stats, name_and_category
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.profiler.analysis.growth import Growth
from cbtop.profiler.analysis.node_columns import SPARSE_COLUMNS
from cbtop.profiler.analysis.phase_totals import PhaseTotals
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.vocabulary import NodeKind

MAX_KERNELS = 8  # Each brick lists at most this many kernels.

_KEPT, _KEPT_GIVEN, _SEQUENCES, _SEQUENCES_GIVEN, _PLAIN, _PLAIN_TOKENS, _PLAIN_NS = (
    SPARSE_COLUMNS.index(name)
    for name in ("kept", "kept_given", "sequences", "sequences_given", "plain", "plain_tokens", "plain_ns")
)


@dataclass(frozen=True, slots=True)
class StepGroup:
    """The steps of a phase with about the same numbers of tokens and sequences."""

    phase: str
    work: tuple[int | None, int | None]  # (tokens, sequences) per step, rounded down as described in `StepWork`
    unit: str  # "token" or "step": the unit of times (µs per unit)
    steps: int
    tokens: float | None  # mean tokens per step
    sequences: float | None
    cached: float | None  # mean cached positions before a step
    cached_least: float | None  # smallest mean number of cached positions in any block
    cached_most: float | None
    wall_us: Figure  # wall-clock time per unit, from the end of one step to the end of the next
    warm_up: int  # number of slow steps at the beginning of the run, which are excluded
    inside_us: Figure  # time of recorded steps per unit, without the time between steps
    # The times of each place (brick, layer, or brick in a layer). WHOLE_STEP also has steps that were timed only as a
    # whole.
    places: Mapping[Place, PlaceTimes]
    # the allowed time of each brick with a budget, in µs per token
    budgets: Mapping[Brick, float] = field(default_factory=dict)
    # Wall-clock time per unit if every step took the median time without pauses. None if unknown.
    typical_us: Figure | None = None
    failed: int = 0  # number of steps that were cancelled, or ended by an exception
    thirds: tuple[Thirds, ...] = ()  # the median step in the first and last third of each run with enough steps
    # Each part of a training step in µs, in the median step of the phase. Empty for other steps.
    training: Mapping[str, Figure] = field(default_factory=dict)
    # Mean tokens and mean sequences per step, with their scatter. None in files of older versions.
    tokens_a_step: Figure | None = None
    sequences_a_step: Figure | None = None

    @property
    def runs(self) -> int:
        """Number of runs in this average."""
        return self.wall_us.runs

    @property
    def units_a_step(self) -> float:
        return self.tokens or 1.0 if self.unit == "token" else 1.0

    @property
    def amount(self) -> float:
        """Number of tokens or steps (units) in this group."""
        return self.steps * self.units_a_step

    @property
    def time_us(self) -> float:
        """Total time of this group's steps in µs, with the time before each."""
        return self.amount * self.wall_us.mean

    @property
    def bricks(self) -> dict[Brick, PlaceTimes]:
        """The times of each brick over all layers and outside of layers."""
        return {brick: times for (brick, layer), times in self.places.items() if brick and layer is None}


@dataclass(frozen=True, slots=True)
class TooShort:
    """Steps that do the same work, but too few to compare."""

    phase: str
    steps: int
    needed: int
    time_us: float = 0.0  # wall-clock time of these steps in µs, with the time before each; 0 if unknown
    # (tokens, sequences) per step (see `StepGroup`); None in files of older versions
    work: tuple[int | None, int | None] | None = None


@dataclass(frozen=True, slots=True)
class MissingPart:
    """Steps or bricks that some averaged runs lack."""

    phase: str
    what: str  # the steps or bricks as text, such as `decode (240 steps of about 8 tokens)`
    runs: int  # number of runs that have them
    of: int
    why_not: tuple[str, ...]  # names of the runs without them, with the reasons
    # If too few runs have them to learn the scatter: the name of the run that is used.
    only: str = ""


@dataclass(frozen=True, slots=True)
class Pace:
    """The time of a fixed amount of work on the machine, while the program did not run."""

    cache_us: float  # time of a fixed amount of arithmetic on data in a cache, in µs
    memory_us: float  # reading a fixed amount of data, larger than the caches, in µs


@dataclass(frozen=True, slots=True)
class Run:
    """One recorded process."""

    name: str  # name of the recording file or of the process
    key: str
    surroundings: Surroundings
    clock_resolution_us: float | None
    covers_s: float
    parts: tuple[StepGroup, ...]
    too_short: tuple[TooShort, ...]
    kernels: Mapping[Brick, tuple[str, ...]]  # for each brick, the names of its kernels
    lost: int  # number of lost records
    seen: int
    untrusted: str = ""  # why no figure of this run can be trusted, or ""
    # Whether the recording was not closed: its writer was killed or is still writing, or the file was cut off.
    is_cut: bool = False
    # Whether the process ended without a goodbye: it was killed, or ended by os._exit or exec.
    is_gone: bool = False
    failed_checks: tuple[str, ...] = ()
    gpu_clock_mhz: float | None = None  # median clock in MHz of the process's GPUs during the run
    host_busy_percent: float | None = None  # median load of all processors by all programs during the run
    paces: tuple[Pace, ...] = ()  # the machine's pace directly before and after the run; empty if not measured
    runs: int = 1  # number of runs in this average
    gaps: tuple[MissingPart, ...] = ()  # steps and bricks that some averaged runs lack
    rates: tuple[PhaseRates, ...] = ()  # the rates of each phase over the whole run
    memory: tuple[PhaseMemory, ...] = ()  # the peak memory of each phase with training steps on a GPU
    # The contents of the run's steps: layers, bricks and operations
    contents: Contents = field(default_factory=Contents)

    @property
    def lost_percent(self) -> float:
        return 100 * self.lost / self.seen if self.seen else 0.0

    @property
    def time_us(self) -> float:
        """Total time of all steps in µs, with the time before each."""
        return sum(part.time_us for part in self.parts) + sum(one.time_us for one in self.too_short)


@dataclass(frozen=True, slots=True)
class _StepSums:
    """The sums over each block's steps, as arrays of shape (blocks,)."""

    count: NDArray[np.float64]
    total_ns: NDArray[np.float64]
    elements: NDArray[np.float64]
    failed: NDArray[np.float64]
    plain: NDArray[np.float64]
    plain_tokens: NDArray[np.float64]
    plain_ns: NDArray[np.float64]
    # Mean cached positions before a step. None if a block does not report them.
    cached: NDArray[np.float64] | None
    sequences: NDArray[np.float64] | None


def _step_sums(growths: Sequence[Growth], step: int) -> _StepSums:
    count, total_ns, elements, failed = (
        _of(growths, name, step) for name in ("count", "total_ns", "elements", "failed")
    )
    plain, plain_tokens, plain_ns = (_rare(growths, at, step) for at in (_PLAIN, _PLAIN_TOKENS, _PLAIN_NS))
    return _StepSums(
        count=count,
        total_ns=total_ns,
        elements=elements,
        failed=failed,
        plain=plain,
        plain_tokens=plain_tokens,
        plain_ns=plain_ns,
        cached=_mean(_rare(growths, _KEPT, step), _rare(growths, _KEPT_GIVEN, step)),
        sequences=_mean(_rare(growths, _SEQUENCES, step), _rare(growths, _SEQUENCES_GIVEN, step)),
    )


def part_of(table: NodeTable, work: StepWork, blocks: Sequence[StepBlock]) -> StepGroup | None:
    """Combine the steps in `blocks` to a group. None if too few blocks have recorded steps."""
    step = work.step
    if len(blocks) < MIN_BLOCKS:
        return None
    blocks, warm_up = _warm(blocks, step)
    stats = NodeStats()
    stats.count(Growth.of([block.growth for block in blocks]))
    totals = PhaseTotals.below(table[step], table, stats, hides_small=False)
    growths = [block.growth for block in blocks]
    sums = _step_sums(growths, step)
    count, elements, inside, cached = sums.count, sums.elements, sums.count - sums.plain, sums.cached
    ran = np.flatnonzero(inside > 0)
    if len(ran) < MIN_BLOCKS:
        return None
    is_counted = work.tokens is not None
    every = elements if is_counted else count
    recorded = (elements - sums.plain_tokens if is_counted else inside)[ran]
    along = None if cached is None else cached[ran]
    places = PhasePlaces(totals)
    found, pace = place_times(places, totals, [growths[at] for at in ran], recorded, inside[ran], along)
    paces = _paces(pace, ran, len(blocks))
    wall = _wall(blocks, every, cached, paces)
    (whole,) = figures(sums.total_ns[:, None] / 1e3, every, cached, paces)
    (recorded_us,) = figures((sums.total_ns - sums.plain_ns)[ran][:, None] / 1e3, recorded, along, pace)
    steps_at = np.where(np.arange(step + 1) == step, 0, -1)
    calls = CallTimes(growths, [steps_at], 1, count, cached, paces)
    p50, p99 = (calls.quantile(fraction) for fraction in (MEDIAN, P99))
    between_ns = np.array([block.wall_ns for block in blocks]) - sums.total_ns
    before_us = without_pauses(between_ns, every) / 1e3
    of_step = [figures(us, every, cached, paces)[0] for us in (p50.typical_us, p50.typical_us + before_us[:, None])]
    typical, paced = (stretched(one, p50.stretch[0]) if p50.figures[0] else None for one in of_step)
    whole = replace(whole, median_us=median_of(p50.figures[0]))
    # This median changes only if the typical step or the time before it does.
    if typical:
        wall = replace(wall, median_us=typical.mean + wall.mean - whole.mean)
    thirds = thirds_of(growths, steps_at, between_ns, count, elements if is_counted else count, cached)
    call = stretched(figures(p50.typical_us, count, cached, paces)[0], p50.stretch[0]) if typical else None
    found[WHOLE_STEP] = PlaceTimes(whole, call, p50.figures[0], p99.figures[0], Figure(1.0, 0.0, len(blocks)))
    return StepGroup(
        phase=display_name(table[step]),
        work=(work.tokens, work.sequences),
        unit="token" if is_counted else "step",
        steps=int(count.sum()),
        tokens=float(elements.sum() / count.sum()) if is_counted else None,
        sequences=None if sums.sequences is None else float(np.average(sums.sequences, weights=count)),
        cached=None if cached is None else float(np.average(cached, weights=every)),
        cached_least=None if cached is None else float(cached.min()),
        cached_most=None if cached is None else float(cached.max()),
        warm_up=warm_up,
        wall_us=wall,
        inside_us=recorded_us,
        places=found,
        budgets=_budgets(totals),
        typical_us=paced if paced and paced.mean > 0 else None,
        failed=int(sums.failed.sum()),
        thirds=() if thirds is None else (thirds,),
        tokens_a_step=figures(elements[:, None], count)[0] if is_counted else None,
        sequences_a_step=None if sums.sequences is None else figures((sums.sequences * count)[:, None], count)[0],
    )


def _paces(pace: NDArray[np.float64] | None, ran: NDArray[np.intp], blocks: int) -> NDArray[np.float64] | None:
    """Return the pace of all blocks. For a block without recorded steps it is unknown, and 1 is used."""
    if pace is None:
        return None
    found = np.ones(blocks)
    found[ran] = pace
    return found


def _wall(
    blocks: Sequence[StepBlock],
    units: NDArray[np.float64],
    along: NDArray[np.float64] | None,
    pace: NDArray[np.float64] | None,
) -> Figure:
    """Return the wall-clock time per unit (token or step).

    Pauses by other programs are rare and long, so few blocks have them. The error is computed from half as many
    blocks.
    """
    (wall,) = figures(np.array([[block.wall_ns / 1e3] for block in blocks]), units, along, pace)
    return replace(wall, blocks=max(MIN_BLOCKS, wall.blocks // 2))


def _budgets(totals: PhaseTotals) -> dict[Brick, float]:
    known = ((one.name, one.category, one.budget_us_per_token) for one in brick_stats(totals))
    return {(name, category): budget_us for name, category, budget_us in known if budget_us is not None}


def _warm(blocks: Sequence[StepBlock], step: int) -> tuple[Sequence[StepBlock], int]:
    """Drop blocks at the beginning that are much slower than the median block, at most a fifth of all.

    Returns the remaining blocks, and the number of dropped steps.
    """
    us = np.array(
        [block.growth.column("total_ns")[block.growth.node == step].sum() / block.steps for block in blocks]
    )
    first = slow_start(us)
    return blocks[first:], sum(block.steps for block in blocks[:first])


def kernels_of(table: NodeTable) -> dict[Brick, tuple[str, ...]]:
    """Return the names of the kernels of each brick, without repetitions."""
    found: dict[Brick, dict[str, None]] = {}
    for node in table.nodes:
        if node.kind is not NodeKind.KERNEL or not node.parent:
            continue
        above = table[node.parent]
        while above.kind is not NodeKind.BRICK and above.parent:
            above = table[above.parent]
        if above.kind is NodeKind.BRICK:
            names = found.setdefault(name_and_category(above), {})
            if len(names) < MAX_KERNELS:
                names[node.name] = None
    return {brick: tuple(sorted(names)) for brick, names in found.items()}


def _of(growths: Sequence[Growth], column: str, node: int) -> NDArray[np.float64]:
    return np.array([float(growth.column(column)[growth.node == node].sum()) for growth in growths])


def _rare(growths: Sequence[Growth], column: int, node: int) -> NDArray[np.float64]:
    return np.array([float(growth.rare.get((column, node), 0)) for growth in growths])


def _mean(amount: NDArray[np.float64], given: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return the mean of each block's values. None if a block has none."""
    return amount / given if given.min() > 0 else None
