"""Tests of blocks of steps: every step of a phase is in exactly one block.

All wall-clock time after the warm-up is counted exactly once.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.comparison.rate_blocks import MAX_BLOCKS, STEPS_A_BLOCK, EndedSteps, PhaseSums, RateBlocks

DECODE, PREFILL, WARM_UP = 1, 2, 3


def ended(rows: list[tuple[int, int, int]], **others: list[int]) -> EndedSteps:
    """Return finished steps from rows (node, begin, end).

    By default, each step has two tokens, three sequences and seven cached positions.
    """
    node, start, end = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    given = {"tokens": [2] * len(rows), "sequences": [3] * len(rows), "cached": [7] * len(rows), **others}
    columns = {name: np.array(column, np.int64) for name, column in given.items()}
    return EndedSteps(node, start, end, is_uncounted=columns["tokens"] == 0, **columns)


def collected(rows: list[tuple[int, int, int]], cuts: list[int] = [], **others: list[int]) -> RateBlocks:  # noqa: B006
    found, edges = RateBlocks(), sorted({0, *(min(cut, len(rows)) for cut in cuts), len(rows)})
    for begin, end in pairwise(edges):
        part = {name: column[begin:end] for name, column in others.items()}
        found.take(ended(rows[begin:end], **part), {WARM_UP})
    return found


STEPS = st.tuples(st.sampled_from([DECODE, PREFILL]), st.integers(0, 50), st.integers(1, 50))


@given(st.lists(STEPS, min_size=1, max_size=600), st.lists(st.integers(0, 600), max_size=4))
def test_blocks_have_all_steps_and_all_time_wherever_the_stream_was_cut(
    steps: list[tuple[int, int, int]], cuts: list[int]
) -> None:
    rows, at = [], 100
    for node, pause, length in steps:
        rows.append((node, at + pause, at + pause + length))
        at += pause + length
    found = collected(rows, cuts)
    whole = found.whole
    assert whole.wall_ns == at - rows[0][1]
    assert whole.steps == len(rows)
    for node in (DECODE, PREFILL):
        lengths = [end - begin for one, begin, end in rows if one == node]
        sums = whole.phases.get(node, PhaseSums())
        assert (sums.steps, sums.in_steps_ns) == (len(lengths), sum(lengths))
        assert (sums.tokens, sums.sequences, sums.cached) == (2 * sums.steps, 3 * sums.steps, 7 * sums.steps)


@pytest.mark.parametrize(
    ("steps", "each", "blocks"), [(3, 4, 0), (252, 4, 63), (255, 4, 63), (256, 8, 32), (1000, 16, 62)]
)
def test_blocks_are_equally_long_and_at_most_63(steps: int, each: int, blocks: int) -> None:
    found = collected([(DECODE, 10 * at, 10 * at + 9) for at in range(steps)])
    assert [block.steps for block in found.blocks] == [each] * blocks
    assert [block.wall_ns for block in found.blocks[1:]] == [10 * each] * max(0, blocks - 1)
    assert len(found.blocks) < MAX_BLOCKS
    assert each % STEPS_A_BLOCK == 0


def test_time_begins_with_the_first_step_after_the_warm_up() -> None:
    rows = [(WARM_UP, 0, 1000), (DECODE, 1500, 1600), (WARM_UP, 1600, 1700), (DECODE, 1700, 1800)]
    found = collected(rows)
    assert found.began_ns == 1500
    assert found.whole.wall_ns == 300
    assert found.whole.phases[WARM_UP].steps == 1


def test_steps_that_run_at_the_same_time_share_it() -> None:
    rows = [(DECODE, 0, 100), (DECODE, 60, 90), (DECODE, 50, 140), (PREFILL, 20, 160), (DECODE, 150, 170)]
    found = collected(rows).whole
    assert found.wall_ns == 170
    assert found.phases[DECODE].in_steps_ns == 100 + 40 + 20
    assert found.phases[PREFILL].in_steps_ns == 140
    assert collected([(DECODE, 0, 100), (DECODE, 60, 90)]).whole.wall_ns == 100


def test_amounts_that_steps_do_not_report_count_as_unknown() -> None:
    rows = [(DECODE, 0, 10), (DECODE, 10, 20), (DECODE, 20, 30)]
    found = collected(rows, tokens=[5, 0, 5], sequences=[4, -1, 0], cached=[-1, 0, 9]).whole.phases[DECODE]
    assert (found.tokens, found.uncounted) == (10, 1)
    assert (found.sequences, found.told_sequences) == (4, 2)
    assert (found.cached, found.told_cached) == (9, 2)


def test_sums_add_up_in_every_field() -> None:
    one = PhaseSums(*range(1, len(fields(PhaseSums)) + 1))
    one.add(PhaseSums(*[10] * len(fields(PhaseSums))))
    assert [getattr(one, each.name) for each in fields(one)] == [11, 12, 13, 14, 15, 16, 17, 18]
