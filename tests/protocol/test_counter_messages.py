"""Tests of the message with counters of bricks: counts that contradict each other are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from cbtop.protocol import codec
from cbtop.protocol.counter_messages import MAX_COUNTED_BRICKS, BrickCounters, CountedBrick

BRICK = CountedBrick(3, 10, 5, 1, 2, 4, 9, 900, 1_800, 7, 30, 8, 12, 3)
COUNTERS = BrickCounters(1_000_000, 900, (BRICK,), "L2 and L3 misses: not permitted")


def test_counters_are_the_same_after_their_way() -> None:
    assert codec.decode(codec.encode(COUNTERS)) == COUNTERS


@pytest.mark.parametrize(
    "made",
    [
        lambda: dataclasses.replace(BRICK, calls=0),
        lambda: dataclasses.replace(BRICK, cycles=-1),
        lambda: dataclasses.replace(BRICK, disk_faults=6),
        lambda: dataclasses.replace(BRICK, core_calls=11),
        lambda: dataclasses.replace(BRICK, cache_calls=11),
        lambda: dataclasses.replace(BRICK, instructions=10**30),
        lambda: dataclasses.replace(COUNTERS, cost_ns=-1),
        lambda: dataclasses.replace(COUNTERS, over_ns=-1),
        lambda: dataclasses.replace(COUNTERS, bricks=(BRICK, BRICK)),
        lambda: BrickCounters(
            1, 1, tuple(dataclasses.replace(BRICK, node=at) for at in range(MAX_COUNTED_BRICKS + 1))
        ),
    ],
)
def test_counters_that_contradict_each_other_are_refused(made: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="count"):
        made()
