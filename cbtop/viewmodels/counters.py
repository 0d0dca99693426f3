"""The counters of bricks: page faults, context switches, instructions per cycle, and misses, in a mean call."""

from __future__ import annotations

from dataclasses import dataclass

from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.graph.nodes import display_name
from cbtop.protocol.counter_messages import BrickCounters, CountedBrick
from cbtop.protocol.vocabulary import BrickCategory

LINE_BYTES = 64  # of a cache line of every x86-64 and most ARM processors


@dataclass(frozen=True, slots=True)
class BrickCounts:
    """The counters of a brick in a mean call, with the bricks inside, for the calling thread. None: not counted.

    The figures are means over `calls` counted calls. The bytes of a level are the loads that missed the level before
    it, times 64 B, so `dram_bytes` are the loads from memory. Stores and prefetches are not in them.
    """

    brick: str
    category: BrickCategory | None
    calls: int
    page_faults: float
    disk_faults: float
    voluntary_switches: float
    involuntary_switches: float
    instructions: float | None = None
    cycles: float | None = None
    ipc: float | None = None
    branch_misses: float | None = None
    l1_misses: float | None = None
    l2_misses: float | None = None
    l3_misses: float | None = None
    l2_bytes: float | None = None
    l3_bytes: float | None = None
    dram_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class CountersView:
    """The counters of the bricks in a phase since recording began.

    `why_not` is the reason if events of the processor are missing, or "". `cost_percent` is the time that counting
    took, in percent of the process's time.
    """

    bricks: tuple[BrickCounts, ...]
    why_not: str
    cost_percent: float

    def of(self, key: tuple[str, BrickCategory]) -> BrickCounts | None:
        """Return the counters of the brick with this name and category, or None if it was not counted."""
        return next((one for one in self.bricks if (one.brick, one.category) == key), None)


def counters_view(found: BrickCounters | None, nodes: NodeTable, phase: str | None) -> CountersView | None:
    """Return the counters of the bricks in steps of `phase` (None: outside of steps). None if nothing is counted."""
    if found is None:
        return None
    bricks = []
    for one in found.bricks:
        if not 0 < one.node <= len(nodes):
            continue
        node = step = nodes[one.node]
        while step.parent is not None:
            step = nodes[step.parent]
        if phase is None or display_name(step) == phase:
            bricks.append(_counts(node.name, node.category, one))
    return CountersView(tuple(bricks), found.why_not, 100 * found.cost_ns / max(1, found.over_ns))


def _counts(name: str, category: BrickCategory | None, one: CountedBrick) -> BrickCounts:
    core, cache = one.core_calls or None, one.cache_calls or None
    l1 = _mean(one.l1_misses, core)
    l2, l3 = _mean(one.l2_misses, cache), _mean(one.l3_misses, cache)
    return BrickCounts(
        brick=name,
        category=category,
        calls=one.calls,
        page_faults=one.page_faults / one.calls,
        disk_faults=one.disk_faults / one.calls,
        voluntary_switches=one.voluntary_switches / one.calls,
        involuntary_switches=one.involuntary_switches / one.calls,
        instructions=_mean(one.instructions, core),
        cycles=_mean(one.cycles, core),
        ipc=one.instructions / one.cycles if one.cycles else None,
        branch_misses=_mean(one.branch_misses, core),
        l1_misses=l1,
        l2_misses=l2,
        l3_misses=l3,
        l2_bytes=_bytes(l1),
        l3_bytes=_bytes(l2),
        dram_bytes=_bytes(l3),
    )


def _mean(count: int, calls: int | None) -> float | None:
    return count / calls if calls else None


def _bytes(misses: float | None) -> float | None:
    return None if misses is None else LINE_BYTES * misses
