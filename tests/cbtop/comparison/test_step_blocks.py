"""Tests of blocks of steps: each record of a whole step is in exactly one block, wherever batches begin."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.comparison.step_blocks import (
    LEAST_STEPS,
    MAX_BLOCKS,
    STEPS_A_BLOCK,
    StepBlock,
    StepBlocks,
    StepWork,
    most_alike,
)
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_CANCELLED, FLAG_PLAIN, LANE_SHIFT
from cbtop.protocol.ring_reader import Batch
from tests.cbtop.comparison.made_runs import BETWEEN_STEPS_US, Noise, made_batch, made_table

QUIET = Noise(machine=0, brick=0, call=0, pauses=0)
RECORDS_A_STEP = 6 * 5 + 1


def blocks_of(batch: Batch, cuts: list[int]) -> StepBlocks:
    found = StepBlocks(made_table())
    edges = [0, *sorted(cuts), len(batch.node)]
    for begin, end in itertools.pairwise(edges):
        chosen = np.zeros(len(batch.node), np.bool_)
        chosen[begin:end] = True
        found.take(batch.only(chosen))
    return found


def told(blocks: list[StepBlock]) -> list[tuple[int, int, dict[int, int]]]:
    """Return for each block: the number of steps, the wall-clock time, and the time of finished calls by node."""
    return [
        (
            one.steps,
            one.wall_ns,
            dict(zip(one.growth.node.tolist(), one.growth.column("closed_ns").tolist(), strict=True)),
        )
        for one in blocks
    ]


@given(st.lists(st.integers(0, 20 * (RECORDS_A_STEP + 1)), max_size=6))
def test_where_a_stream_is_cut_changes_no_block(cuts: list[int]) -> None:
    batch = made_batch(1, Noise(), 20, cached_from=0)
    whole, cut = blocks_of(batch, []), blocks_of(batch, [min(at, len(batch.node)) for at in cuts])
    assert {work: told(found) for work, found in whole.blocks().items()} == {
        work: told(found) for work, found in cut.blocks().items()
    }


def test_a_step_counts_as_soon_as_another_has_ended() -> None:
    found = blocks_of(made_batch(1, QUIET, 8), [])
    assert (found.steps, len(found.blocks()), found.steps) == (7, 1, 8)
    assert (found.rates.whole.phases[1].told_cached, found.rates.whole.phases[1].told_sequences) == (0, 0)


def test_a_million_records_without_an_end_of_a_step_are_dropped() -> None:
    found, none = StepBlocks(made_table()), np.zeros(2**20 + 1, np.int64)
    found.take(Batch(none + 3, none, none, none + 1, none, overwritten=0))
    found.take(made_batch(1, QUIET, 8))
    (blocks,) = found.blocks().values()
    assert [block.growth.column("count").max() for block in blocks] == [4, 4]


def test_blocks_hold_all_time_from_the_first_step_on() -> None:
    batch = made_batch(1, Noise(), 40)
    (found,) = blocks_of(batch, []).blocks().values()
    assert sum(block.wall_ns for block in found) == batch.end_ns[-1] - batch.start_ns[RECORDS_A_STEP - 1]
    assert [block.steps for block in found] == [STEPS_A_BLOCK] * 10
    step = [int(block.growth.column("total_ns")[block.growth.node == 1].sum()) for block in found]
    rest = [block.wall_ns - ns for block, ns in zip(found, step, strict=True)]
    assert rest == [3 * round(BETWEEN_STEPS_US * 1e3)] + [4 * round(BETWEEN_STEPS_US * 1e3)] * 9


def test_steps_that_fill_no_block_yet_have_their_number_and_time() -> None:
    batch = made_batch(1, Noise(), 42)
    found = blocks_of(batch, [])
    ((work, blocks),) = found.blocks().items()
    assert (len(blocks), found.count_of(work)) == (10, 42)
    assert found.time_us_of(work) == (batch.end_ns[-1] - batch.start_ns[RECORDS_A_STEP - 1]) / 1e3


def test_however_long_a_run_is_it_has_few_blocks() -> None:
    steps = 3 * MAX_BLOCKS * STEPS_A_BLOCK
    (found,) = blocks_of(made_batch(1, QUIET, steps), []).blocks().values()
    assert MAX_BLOCKS / 2 <= len(found) < MAX_BLOCKS
    assert sum(block.steps for block in found) == steps


def test_steps_on_other_batches_are_in_other_blocks() -> None:
    batch = made_batch(1, QUIET, 40)
    is_step = batch.node == 1
    batch.elements[is_step] = np.where(np.arange(40) % 2, 1, 16)
    found = blocks_of(batch, []).blocks()
    assert {work.tokens: sum(block.steps for block in blocks) for work, blocks in found.items()} == {1: 20, 16: 20}
    assert StepWork(1, 14, None) in blocks_of(replace(batch, elements=np.where(is_step, 15, 0)), []).blocks()


def test_amounts_are_alike_up_to_the_next_of_three_bits() -> None:
    assert LEAST_STEPS == 20
    assert [most_alike(least) for least in (0, 1, 2, 7, 8, 14, 16, 512)] == [0, 1, 2, 7, 9, 15, 19, 639]


def test_steps_of_too_many_kinds_of_work_are_counted_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbtop.comparison.step_blocks.MAX_WORKS", 2)
    batch = made_batch(1, QUIET, 40)
    batch.elements[batch.node == 1] = np.repeat([1, 2, 4, 2], 10)
    found = blocks_of(batch, [])
    assert [work.tokens for work in found.blocks()] == [1, 2]
    assert found.left_out == 10


def test_a_cancelled_step_is_in_no_block_and_its_time_in_the_next() -> None:
    batch = made_batch(1, QUIET, 41)
    (whole,) = blocks_of(batch, []).blocks().values()
    inside = slice(5 * RECORDS_A_STEP, 6 * RECORDS_A_STEP)
    batch.flags[inside] |= FLAG_CANCELLED
    found = blocks_of(batch, [])
    (left,) = found.blocks().values()
    assert found.steps == 40
    assert sum(block.steps for block in left) == 40
    assert left[1].wall_ns == pytest.approx(whole[1].wall_ns * 5 / 4, rel=0.01)


def test_a_plain_step_counts_with_nothing_inside() -> None:
    batch = made_batch(1, QUIET, 40)
    step = np.arange(len(batch.node)) // RECORDS_A_STEP
    is_plain = step % 4 != 0
    batch = batch.only(~is_plain | (batch.node == 1))
    ended = np.flatnonzero(batch.node == 1)
    batch.flags[ended[np.arange(40) % 4 != 0]] = FLAG_PLAIN
    (found,) = blocks_of(batch, []).blocks().values()
    for block in found:
        count = dict(zip(block.growth.node.tolist(), block.growth.column("count").tolist(), strict=True))
        assert (count[1], count[3]) == (4, 1)


def test_steps_that_run_at_the_same_time_keep_their_own_bricks() -> None:
    """Two threads record alternately, each in its own lane of the ring.

    Their steps have different numbers of tokens.
    """
    one, other = made_batch(1, QUIET, 20), made_batch(2, QUIET, 20)
    other.elements[other.node == 1] = 16
    columns = {}
    for name in ("node", "start_ns", "end_ns", "elements"):
        columns[name] = np.stack([getattr(one, name), getattr(other, name)], 1).reshape(-1)
    flags = np.tile([0, 1 << LANE_SHIFT], len(one.node))
    batch = Batch(columns["node"], flags, columns["start_ns"], columns["end_ns"], columns["elements"], overwritten=0)
    found = blocks_of(batch, [100, 333])
    of_lanes = found.blocks()
    assert [sum(block.steps for block in blocks) for blocks in of_lanes.values()] == [20, 20]
    blocks = [block for each in of_lanes.values() for block in each]
    for block in blocks:
        count = dict(zip(block.growth.node.tolist(), block.growth.column("count").tolist(), strict=True))
        assert set(count.values()) == {block.steps}
    assert sum(block.wall_ns for block in blocks) == one.end_ns[-1] - one.start_ns[RECORDS_A_STEP - 1]


def test_what_a_step_says_of_its_sequences_is_its_own_also_in_the_next_batch() -> None:
    batch = made_batch(1, QUIET, 40, cached_from=0)
    said = (batch.flags & FLAG_AMOUNTS) != 0
    batch.start_ns[said] = np.where(np.arange(40) < 20, 1, 2)
    found = blocks_of(batch, np.flatnonzero(said).tolist()).blocks()
    assert {work.sequences: sum(block.steps for block in blocks) for work, blocks in found.items()} == {1: 20, 2: 20}
