"""Hypothesis strategies for the counters of bricks."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from cbtop.protocol.counter_messages import BrickCounters, CountedBrick
from tests.protocol.sample_strategies import COUNTS
from tests.protocol.serving_strategies import TEXTS


def _brick(node: int, most: list[int], counts: list[int]) -> CountedBrick:
    """Return a brick. Counts of a part are at most those of the whole: `most` has the calls and the page faults."""
    calls, faults = most
    disk, *switches, core, cycles, instructions, branch_misses, l1_misses, cache, l2_misses, l3_misses = counts
    of_core = min(core, calls + 1), cycles, instructions, branch_misses, l1_misses
    of_cache = min(cache, calls + 1), l2_misses, l3_misses
    return CountedBrick(node, calls + 1, faults, min(disk, faults), *switches, *of_core, *of_cache)


BRICKS = st.builds(
    _brick, COUNTS, st.lists(COUNTS, min_size=2, max_size=2), st.lists(COUNTS, min_size=11, max_size=11)
)
COUNTED: dict[Any, st.SearchStrategy[Any]] = {
    CountedBrick: BRICKS,
    BrickCounters: st.builds(
        BrickCounters,
        COUNTS,
        COUNTS,
        st.lists(BRICKS, max_size=3, unique_by=lambda brick: brick.node).map(tuple),
        TEXTS,
    ),
}
