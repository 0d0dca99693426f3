"""A run is read from its records: what its steps were, in which unit, and which of them were warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cbtop.client.step_blocks import StepBlock, StepBlocks, Work
from cbtop.profiler.stats import NodeStats
from cbtop.protocol.ring import FLAG_FAILED, FLAG_PLAIN, Batch
from cbtop.viewmodels.places import WHOLE_STEP
from cbtop.viewmodels.runs import Part, part_of
from tests.cbtop.viewmodels.made_runs import Noise, made_batch, made_run, made_table

STEADY = Noise(pauses=0)


def part_in(batch: Batch) -> Part | None:
    """The only part of a run of `batch`."""
    table = made_table()
    blocks = StepBlocks(table)
    blocks.take(batch)
    ((work, found),) = blocks.blocks().items()
    return part_of(table, work, found)


def test_steps_that_failed_are_counted() -> None:
    batch = made_batch(1, STEADY, 40)
    part = part_in(
        replace(batch, flags=np.where((batch.node == 1) & (batch.end_ns % 2 == 0), FLAG_FAILED, batch.flags))
    )
    assert part is not None
    assert part.failed == np.count_nonzero((batch.node == 1) & (batch.end_ns % 2 == 0)) > 5


def test_times_are_for_a_token_where_every_step_says_how_many() -> None:
    batch = made_batch(1, STEADY, 40)
    one, three = part_in(batch), part_in(replace(batch, elements=3 * batch.elements))
    assert one is not None
    assert three is not None
    assert (one.tokens, one.unit, one.amount, one.steps) == (1.0, "token", 40, 40)
    assert (three.tokens, three.unit, three.amount, three.steps) == (3.0, "token", 120, 40)
    for place in one.places:
        assert three.places[place].time.mean == pytest.approx(one.places[place].time.mean / 3)
        assert three.places[place].calls == one.places[place].calls
    none = part_in(replace(batch, elements=0 * batch.elements))
    assert none is not None
    assert (none.tokens, none.unit, none.amount) == (None, "step", 40)
    assert none.places[WHOLE_STEP].time == one.places[WHOLE_STEP].time


def test_what_is_inside_is_of_the_steps_that_were_recorded_inside_and_needs_five_blocks_of_them() -> None:
    """Of eight blocks of four steps some are plain, as a sampling that begins late leaves them."""
    batch = made_batch(1, STEADY, 32)
    each = len(batch.node) // 32
    whole = part_in(batch)
    assert whole is not None
    for plain_blocks, is_known in ((3, True), (4, False)):
        step = np.arange(len(batch.node)) // each
        is_plain = step < 4 * plain_blocks
        kept = ~is_plain | (batch.node == 1)
        flags = np.where(is_plain & (batch.node == 1), batch.flags | FLAG_PLAIN, batch.flags)
        part = part_in(replace(batch, flags=flags).only(kept))
        assert (part is not None) is is_known
        if part is not None:
            assert (part.steps, part.tokens) == (32, 1.0)
            assert part.inside_us.mean == pytest.approx(whole.inside_us.mean, rel=0.02)
            assert all(one.calls == whole.places[place].calls for place, one in part.places.items())


def test_a_run_of_no_known_tokens_amounts_to_its_steps() -> None:
    (part,) = made_run(1, STEADY, 40).parts
    assert replace(part, tokens=None).amount == 40
    assert replace(part, tokens=2.5).amount == 100
    assert replace(part, tokens=2.5, unit="step").amount == 40


def blocks_of(us: Sequence[float]) -> list[StepBlock]:
    """Blocks of four steps with a brick in each, whose part of them says nothing of how long they are."""
    table, found = made_table(), []
    for at, each in enumerate(us):
        end = np.array([round(each * 1_000 * part) for part in (0.1 if at % 2 else 0.9, 1.0)] * 4)
        node = np.array([3, 1] * 4)
        elements = (node == 1).astype(np.int64)
        stats = NodeStats()
        begin = 10_000_000 * (4 * at + np.arange(8) // 2)
        stats.add(Batch(node, 0 * node, begin, begin + end, elements, 0), *table.columns())
        found.append(StepBlock(4, round(4_000 * each), stats.everything()))
    return found


USUAL = [100.0, 101.0, 99.0, 100.5, 99.5] * 4  # half a µs is the median of how far they are off


@pytest.mark.parametrize(
    ("us", "left_out"),
    [
        (USUAL, 0),
        ([140.0, *USUAL], 1),
        ([140.0, 120.0, 103.0, *USUAL], 3),
        ([140.0, 101.5, 140.0, *USUAL], 1),  # the second is as the others are
        ([*USUAL, 140.0], 0),
        ([140.0] * 7 + USUAL, 5),  # a fifth of 27
        ([140.0, 130.0, 100.0, 99.0, 101.0, 100.0], 1),  # five are left
    ],
)
def test_blocks_at_the_beginning_that_are_slower_than_almost_all_are_warm_up(
    us: Sequence[float], left_out: int
) -> None:
    part = part_of(made_table(), Work(1, 1, None), blocks_of(us))
    assert part is not None
    assert (part.warm_up, part.steps) == (4 * left_out, 4 * (len(us) - left_out))
    assert part.places[WHOLE_STEP].time.mean == pytest.approx(np.mean(us[left_out:]), rel=1e-3)


def test_of_blocks_of_which_half_is_plain_the_other_half_tells_what_lies_inside() -> None:
    """Every other step is plain, and takes twice as long as the others."""
    batch = made_batch(1, STEADY, 80)
    step = np.arange(len(batch.node)) // (len(batch.node) // 80)
    is_plain = step % 2 == 1
    alone = part_in(batch.only(~is_plain))
    is_step = is_plain & (batch.node == 1)
    end_ns = np.where(is_step, 2 * batch.end_ns - batch.start_ns, batch.end_ns)
    flags = np.where(is_step, batch.flags | FLAG_PLAIN, batch.flags)
    part = part_in(replace(batch, flags=flags, end_ns=end_ns).only(~is_plain | is_step))
    assert alone is not None
    assert part is not None
    assert part.steps == 80
    assert part.inside_us.mean == pytest.approx(alone.inside_us.mean)
    for place, one in part.places.items():
        if place != WHOLE_STEP:
            assert one.time.mean == pytest.approx(alone.places[place].time.mean)
    assert part.places[WHOLE_STEP].time.mean == pytest.approx(1.5 * alone.inside_us.mean, rel=0.02)


def test_wall_clock_time_is_known_as_of_half_as_many_blocks_and_of_nothing_seen_nothing_is_lost() -> None:
    (short,), (long,) = (made_run(1, STEADY, steps).parts for steps in (40, 240))
    assert [part.wall_us.blocks for part in (short, long)] == [5, 15]  # of 10 and, twice as long, of 30
    run = made_run(1, STEADY, 40)
    assert [replace(run, seen=seen, lost=1).lost_percent for seen in (0, 50)] == [0.0, 2.0]
