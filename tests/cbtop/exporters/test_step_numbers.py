"""Tests of step numbers: each call has the number of its step, wherever batches of records begin."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.exporters import step_numbers
from cbtop.exporters.base import RecordedProcess
from cbtop.exporters.records import Records
from cbtop.exporters.step_numbers import NO_STEP, UNKNOWN, numbered
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_CANCELLED, FLAG_PLAIN, LANE_SHIFT, LANES
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import NodeKind

DECODE, BRICK, PREFILL, OUTSIDE = 1, 2, 3, 4
Record = tuple[int, int, int, int, int]  # node, flags, start, end, elements


def table() -> NodeTable:
    found = NodeTable()
    found.add(Node(DECODE, None, NodeKind.STEP, "decode"))
    found.add(Node(BRICK, DECODE, NodeKind.BRICK, "a"))
    found.add(Node(PREFILL, None, NodeKind.STEP, "prefill"))
    found.add(Node(OUTSIDE, None, NodeKind.BRICK, "b"))
    return found


def batch_of(records: Sequence[Record]) -> Batch:
    columns = [np.array(column, np.int64) for column in zip(*records, strict=True)] or [np.zeros(0, np.int64)] * 5
    return Batch(*columns, overwritten=0)


def process_of(records: Sequence[Record], cuts: Sequence[int] = ()) -> RecordedProcess:
    bounds = [0, *sorted(cuts), len(records)]
    batches = [batch_of(records[first:end]) for first, end in pairwise(bounds)]
    return RecordedProcess("made", 1, table(), Records([lambda: batches]))


def steps_of(process: RecordedProcess) -> list[int]:
    return [number for found in numbered(process) for number in found.step.tolist()]


def lane(number: int) -> int:
    return number << LANE_SHIFT


def test_a_call_has_the_number_of_the_next_step_that_ends() -> None:
    records = [
        (BRICK, 0, 0, 1, 0),
        (BRICK, 0, 1, 2, 0),
        (DECODE, 0, 0, 3, 1),
        (BRICK, 0, 4, 5, 0),
        (DECODE, 0, 3, 6, 1),
    ]
    assert steps_of(process_of(records)) == [1, 1, 1, 2, 2]


def test_steps_at_the_same_time_are_told_apart_by_their_lanes() -> None:
    records = [
        (BRICK, lane(1), 1, 2, 0), (BRICK, lane(2), 1, 3, 0), (DECODE, lane(2), 0, 4, 1), (DECODE, lane(1), 0, 5, 1),
    ]  # fmt: skip
    assert steps_of(process_of(records)) == [2, 1, 1, 2]


def test_a_late_call_belongs_to_the_step_that_had_ended() -> None:
    late = (BRICK, 0, 1, 2, 0)
    records = [(DECODE, 0, 0, 3, 1), late, (BRICK, 0, 4, 5, 0), (DECODE, 0, 3, 6, 1)]
    assert steps_of(process_of(records)) == [1, 1, 2, 2]
    assert steps_of(process_of(records, [1])) == [1, 1, 2, 2]


def test_a_cancelled_step_has_no_number_and_its_calls_are_left_out() -> None:
    records = [
        (BRICK, FLAG_CANCELLED, 0, 1, 0), (DECODE, FLAG_CANCELLED, 0, 2, 1),
        (BRICK, 0, 3, 4, 0), (DECODE, 0, 2, 5, 1),
    ]  # fmt: skip
    assert steps_of(process_of(records)) == [1, 1]


def test_calls_outside_of_steps_and_in_the_shared_lane_have_no_step() -> None:
    shared = lane(LANES - 1)
    records = [(OUTSIDE, 0, 0, 1, 0), (BRICK, shared, 1, 2, 0), (DECODE, shared, 0, 3, 1)]
    assert steps_of(process_of(records)) == [NO_STEP, NO_STEP, 1]


def test_a_plain_step_is_numbered_and_takes_no_calls_of_others() -> None:
    records = [(BRICK, 0, 0, 1, 0), (DECODE, FLAG_PLAIN, 0, 2, 1), (DECODE, 0, 0, 3, 1)]
    assert steps_of(process_of(records)) == [2, 1, 2]


@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 2, 3]])
def test_a_step_has_its_sequences_and_cached_positions(cuts: list[int]) -> None:
    records = [
        (DECODE, 0, 0, 1, 1), (DECODE, FLAG_AMOUNTS, 8, 100, 0), (PREFILL, 0, 1, 2, 1), (DECODE, 0, 2, 3, 1),
    ]  # fmt: skip
    found = list(numbered(process_of(records, cuts)))
    assert [one for part in found for one in part.sequences.tolist()] == [8, UNKNOWN, UNKNOWN]
    assert [one for part in found for one in part.cached.tolist()] == [100, UNKNOWN, UNKNOWN]


def test_calls_of_a_step_that_does_not_end_have_no_step() -> None:
    assert steps_of(process_of([(DECODE, 0, 0, 1, 1), (BRICK, 0, 2, 3, 0)])) == [1, NO_STEP]


def test_too_many_waiting_calls_go_on_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_numbers, "MAX_WAITING", 2)
    records = [(BRICK, 0, at, at + 1, 0) for at in range(3)] + [(DECODE, 0, 0, 4, 1)]
    assert steps_of(process_of(records, [1, 2, 3])) == [NO_STEP, NO_STEP, NO_STEP, 1]


@st.composite
def lanes_of_steps(draw: st.DrawFn) -> tuple[list[Record], list[int]]:
    """Generate steps of up to three threads in any order. Also generate the expected step number of each record."""
    counts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    lanes = draw(st.lists(st.integers(0, 2), min_size=len(counts), max_size=len(counts)))
    queues: dict[int, list[tuple[Record, int]]] = {}
    for step, (bricks, where) in enumerate(zip(counts, lanes, strict=True)):
        queue = queues.setdefault(where, [])
        begin = 100 * step
        queue += [((BRICK, lane(where), begin + at, begin + at + 1, 0), step) for at in range(bricks)]
        queue.append(((DECODE, lane(where), begin, begin + 10, 1), step))
    mixed: list[tuple[Record, int]] = []
    while queues:
        where = draw(st.sampled_from(sorted(queues)))
        mixed.append(queues[where].pop(0))
        if not queues[where]:
            del queues[where]
    ended = [step for record, step in mixed if record[0] == DECODE]
    return [record for record, _ in mixed], [ended.index(step) + 1 for _, step in mixed]


@given(drawn=lanes_of_steps(), cuts=st.lists(st.integers(0, 12), max_size=4))
def test_batches_may_be_cut_anywhere(drawn: tuple[list[Record], list[int]], cuts: list[int]) -> None:
    records, expected = drawn
    assert steps_of(process_of(records, [min(cut, len(records)) for cut in cuts])) == expected
