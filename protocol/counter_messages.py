"""The message with counters of bricks: page faults, context switches, and events of the processor."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from cbtop.protocol.attributes import MAX_QUANTITY

MAX_COUNTED_BRICKS = 256


@dataclass(frozen=True, slots=True)
class CountedBrick:
    """The counters of `calls` calls of a brick in all places, with the bricks inside. `node` is one of the places.

    Only the calling thread is counted. `disk_faults` are the `page_faults` that read a disk. The processor
    counted cycles to `l1_misses` in `core_calls` calls, and loads that missed L2 and L3 in `cache_calls` calls. Loads
    that reach L3 count as `l2_misses`.
    """

    node: int
    calls: int
    page_faults: int
    disk_faults: int
    voluntary_switches: int
    involuntary_switches: int
    core_calls: int = 0
    cycles: int = 0
    instructions: int = 0
    branch_misses: int = 0
    l1_misses: int = 0
    cache_calls: int = 0
    l2_misses: int = 0
    l3_misses: int = 0

    def __post_init__(self) -> None:
        counts = astuple(self)
        if min(counts) < 0 or max(counts) >= MAX_QUANTITY or self.calls < 1:
            raise ValueError(f"brick {self.node}: a count is out of range: {counts}")
        if max(self.core_calls, self.cache_calls) > self.calls or self.disk_faults > self.page_faults:
            raise ValueError(f"brick {self.node}: a count is larger than its whole: {counts}")


@dataclass(frozen=True, slots=True)
class BrickCounters:
    """The counters of bricks since recording began. The message replaces the previous one.

    Counting took `cost_ns` of `over_ns`. `why_not` is the reason why events of the processor are missing, or "".
    """

    over_ns: int
    cost_ns: int
    bricks: tuple[CountedBrick, ...]
    why_not: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.cost_ns < MAX_QUANTITY or not 0 <= self.over_ns < MAX_QUANTITY:
            raise ValueError(f"counters: {self.cost_ns} ns of {self.over_ns}")
        nodes = {brick.node for brick in self.bricks}
        if len(self.bricks) > MAX_COUNTED_BRICKS or len(nodes) < len(self.bricks):
            raise ValueError(f"{len(self.bricks)} counted bricks; expected up to {MAX_COUNTED_BRICKS}, each once")
