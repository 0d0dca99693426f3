"""Tests of how a run is read from its records: its steps, its tokens or samples, and its warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cbtop.comparison.items import BETWEEN_BRICKS, WHOLE_STEP
from cbtop.comparison.noise import Figure
from cbtop.comparison.runs import MAX_KERNELS, Run, StepGroup, kernels_of, part_of
from cbtop.comparison.step_blocks import StepBlock, StepBlocks, StepWork
from cbtop.profiler.analysis.graph.node_table import NodeTable
from cbtop.profiler.analysis.growth import Growth
from cbtop.profiler.analysis.stats import NodeStats
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_FAILED, FLAG_PLAIN
from cbtop.protocol.ring_reader import Batch
from cbtop.protocol.vocabulary import BrickCategory, NodeKind
from tests.cbtop.comparison.made_runs import BRICKS, Noise, made_batch, made_run, made_table
from tests.representatives import first_by_default

STEADY = Noise(pauses=0)


def part_in(batch: Batch) -> StepGroup | None:
    """Return the steps of `batch`. All of these steps have the same phase and batch size."""
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


def test_inside_times_are_of_steps_recorded_inside_and_need_five_blocks() -> None:
    """Sampling began late: the steps in the first few of eight blocks have no bricks."""
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
            for place, one in part.places.items():
                calls = whole.places[place].calls
                assert calls is not None
                assert one.calls is not None
                assert (one.calls.mean, one.calls.error) == (calls.mean, 0.0)


def test_all_steps_took_the_time_from_the_first_begin_to_the_last_end() -> None:
    for tokens in (1, 3):
        batch = made_batch(1, STEADY, 40)
        batch = replace(batch, elements=tokens * batch.elements)
        part = part_in(batch)
        assert part is not None
        assert part.time_us == pytest.approx((batch.end_ns[-1] - batch.start_ns[batch.node == 1][0]) / 1e3)


def test_a_brick_is_that_in_all_layers() -> None:
    (part,) = made_run(1, STEADY, 40).parts
    assert set(part.bricks) == {*((name, category) for name, (category, _) in BRICKS.items()), BETWEEN_BRICKS}
    for brick, times in part.bricks.items():
        assert times == part.places[brick, None]


def test_budgets_are_those_that_definitions_give_their_bricks() -> None:
    table = NodeTable()
    for node in made_table().nodes:
        table.add(replace(node, budget_us_per_token=7.5) if node.name == "RmsNorm" else node)
    blocks = StepBlocks(table)
    blocks.take(made_batch(1, STEADY, 40))
    ((work, found),) = blocks.blocks().items()
    part = part_of(table, work, found)
    assert part is not None
    assert part.budgets == {("RmsNorm", BrickCategory.NORM): 6 * 7.5}


def test_cached_length_and_sequences_are_known_if_every_step_says_them() -> None:
    """Each step caches one more position: 100 to 103 in the first block of steps, 136 to 139 in the last block."""
    batch = made_batch(1, STEADY, 40, cached_from=100)
    part = part_in(batch)
    assert part is not None
    assert (part.cached, part.cached_least, part.cached_most, part.sequences) == (119.5, 101.5, 137.5, 1.0)
    three = part_in(replace(batch, start_ns=np.where(batch.flags == FLAG_AMOUNTS, 3, batch.start_ns)))
    assert three is not None
    assert three.sequences == 3.0
    silent = part_in(made_batch(1, STEADY, 40))
    assert silent is not None
    assert (silent.cached, silent.cached_least, silent.cached_most, silent.sequences) == (None,) * 4
    # The step itself counts as one call in every step.
    assert silent.places[WHOLE_STEP].calls == Figure(1.0, 0.0, 10)


def test_calls_grow_with_the_cache_by_what_each_position_takes() -> None:
    places = made_run(1, STEADY, 240, cached_from=0, us_a_position=0.5).parts[0].places
    attention = places[("Attention", BrickCategory.ATTENTION), None].p50
    assert attention is not None
    assert attention.slope == pytest.approx(0.5, rel=0.05)


def test_bricks_and_the_time_between_them_are_the_time_of_recorded_steps() -> None:
    part = part_in(made_batch(1, STEADY, 40, unnamed_us=7.0))
    assert part is not None
    assert sum(times.time.mean for times in part.bricks.values()) == pytest.approx(part.inside_us.mean)
    named_us = sum(times.time.mean for (brick, layer), times in part.places.items() if brick is None and layer)
    assert part.inside_us.mean == pytest.approx(named_us + 7.0, abs=0.01)


def test_a_call_of_a_brick_is_typical_whatever_a_few_pauses_add() -> None:
    part = made_run(1, Noise(pauses=0.003), 240).parts[0]
    down = part.places[("DownProjection", BrickCategory.FFN), None]
    assert down.call is not None
    assert down.call.mean == pytest.approx(240, rel=0.02)
    assert down.time.mean > 1.1 * 6 * 240


def test_what_a_machine_does_to_all_bricks_is_no_own_error_of_one() -> None:
    part = made_run(1, Noise(pauses=0, memory=0, machine=0.05, brick=0, call=0.003), 120).parts[0]
    down = part.places[("DownProjection", BrickCategory.FFN), None].call
    assert down is not None
    assert down.own_error is not None
    assert down.own_error < down.error / 4


@pytest.mark.parametrize(("layers", "is_known"), [(1, False), (2, True)])
def test_eight_bricks_in_layers_show_the_pace_of_a_machine(layers: int, is_known: bool) -> None:
    part = made_run(1, STEADY, 40, layers=layers, in_layer=0).parts[0]
    down = part.places[("DownProjection", BrickCategory.FFN), None]
    assert (down.time.own_error is not None) is is_known


def test_a_growing_cache_leaves_the_calls_of_five_blocks_known() -> None:
    part = made_run(1, STEADY, 20, cached_from=0, us_a_position=0.2).parts[0]
    assert all(times.call is not None for times in part.places.values())


def test_a_run_of_no_known_tokens_amounts_to_its_steps() -> None:
    (part,) = made_run(1, STEADY, 40).parts
    assert replace(part, tokens=None).amount == 40
    assert replace(part, tokens=2.5).amount == 100
    assert replace(part, tokens=2.5, unit="step").amount == 40


def test_five_blocks_are_a_part_and_four_are_too_few() -> None:
    assert part_of(made_table(), StepWork(1, 1, None), blocks_of([100.0] * 4)) is None
    part = part_of(made_table(), StepWork(1, 1, None), blocks_of([100.0] * 5))
    assert part is not None
    assert (part.steps, part.wall_us.blocks) == (20, 5)


def blocks_of(us: Sequence[float]) -> list[StepBlock]:
    """Return blocks of four steps, each with one brick. `us` has the duration of a step in each block.

    The brick takes the same time in all blocks.
    """
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


# median distance of the durations from their median: 0.5 µs
USUAL = [100.0, 101.0, 99.0, 100.5, 99.5] * 4


@first_by_default(
    ("us", "left_out"),
    [
        (USUAL, 0),
        ([140.0, *USUAL], 1),
        ([140.0, 120.0, 103.0, *USUAL], 3),
        # The second block has a usual duration, so the warm-up is only the first block.
        ([140.0, 101.5, 140.0, *USUAL], 1),
        ([*USUAL, 140.0], 0),
        # The first block takes 2 µs longer than the median. This difference is only four times the median distance,
        # so the block is no warm-up.
        ([102.0, *USUAL], 0),
        ([102.1, *USUAL], 1),
        ([140.0] * 7 + USUAL, 5),  # At most a fifth of the 27 blocks counts as warm-up.
        # Five blocks remain after the warm-up. Fewer are not allowed.
        ([140.0, 130.0, 100.0, 99.0, 101.0, 100.0], 1),
        ([140.0, 100.0, 99.0, 101.0, 100.0], 0),
    ],
    4,
)
def test_blocks_at_the_beginning_that_are_slower_than_almost_all_are_warm_up(
    us: Sequence[float], left_out: int
) -> None:
    part = part_of(made_table(), StepWork(1, 1, None), blocks_of(us))
    assert part is not None
    assert (part.warm_up, part.steps) == (4 * left_out, 4 * (len(us) - left_out))
    assert part.places[WHOLE_STEP].time.mean == pytest.approx(np.mean(us[left_out:]), rel=1e-3)


def test_a_block_of_more_steps_than_the_others_is_no_slower_for_that() -> None:
    usual = blocks_of(USUAL)
    first = StepBlock(8, 2 * usual[0].wall_ns, Growth.of([usual[0].growth] * 2))
    part = part_of(made_table(), StepWork(1, 1, None), [first, *usual])
    assert part is not None
    assert (part.warm_up, part.steps) == (0, 8 + 4 * len(usual))


@pytest.mark.parametrize("one_in", [2, 4])
def test_one_step_in_a_few_recorded_inside_tells_what_is_inside(one_in: int) -> None:
    """Only some steps are recorded with their bricks. The other steps have no bricks and take twice as long."""
    batch = made_batch(1, STEADY, 80)
    step = np.arange(len(batch.node)) // (len(batch.node) // 80)
    is_plain = step % one_in != 0
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
    plain = 1 - 1 / one_in
    assert part.places[WHOLE_STEP].time.mean == pytest.approx((1 + plain) * alone.inside_us.mean, rel=0.02)


# pauses between steps in µs; their median distance from their median is 1 µs
BETWEEN_US = [9.0, 11.0, 10.0, 9.0, 11.0, 9.0, 11.0, 10.0, 10.0, 9.0, 11.0]


def test_between_steps_four_usual_distances_are_a_pause_and_less_is_not() -> None:
    def typical_us(between_us: Sequence[float]) -> float:
        """Return the typical wall-clock time of steps of 100 µs that follow these pauses."""
        blocks = [
            replace(block, wall_ns=round(4_000 * (100 + us)))
            for block, us in zip(blocks_of([100.0] * len(between_us)), between_us, strict=True)
        ]
        part = part_of(made_table(), StepWork(1, 1, None), blocks)
        assert part is not None
        assert part.typical_us is not None
        assert part.wall_us.mean == pytest.approx(np.mean(between_us) + 100)
        # The typical wall-clock time per step is the typical step plus the typical pause.
        typical = part.places[WHOLE_STEP].call
        assert typical is not None
        assert part.wall_us.median_us == pytest.approx(typical.mean + np.mean(between_us))
        return part.typical_us.mean

    none_us = typical_us([0.0] * 11)
    assert none_us == pytest.approx(100, rel=0.05)
    assert typical_us([10.0] * 11) == pytest.approx(none_us + 10)
    assert typical_us(BETWEEN_US) == pytest.approx(none_us + np.mean(BETWEEN_US))
    for odd_us, taken_as_us in ((13.9, 13.9), (14.1, 14.0), (5_000.0, 14.0), (6.1, 6.1), (2.0, 6.0)):
        us = [*BETWEEN_US, odd_us, 10.0]
        assert typical_us(us) == pytest.approx(none_us + np.mean([*BETWEEN_US, taken_as_us, 10.0]))


def test_a_typical_step_of_steps_at_the_same_time_may_have_no_own_time() -> None:
    """One of three steps takes 1 ms and overlaps the two other steps.

    By the wall clock, there is one step every 50 µs.
    """
    short, long = (blocks_of([us])[0].growth for us in (10.0, 1_000.0))
    block = StepBlock(12, 12 * 50_000, Growth.of([short, short, long]))
    part = part_of(made_table(), StepWork(1, 1, None), [block] * 12)
    assert part is not None
    assert part.typical_us is None
    assert part.wall_us.mean == pytest.approx(50)


def test_a_step_of_less_than_a_microsecond_has_a_typical_time_too() -> None:
    blocks = [replace(block, wall_ns=2_400) for block in blocks_of([0.5] * 12)]
    part = part_of(made_table(), StepWork(1, 1, None), blocks)
    assert part is not None
    assert part.typical_us is not None
    assert part.typical_us.mean == pytest.approx(0.6, rel=0.05)


def test_wall_clock_time_has_half_the_blocks_and_nothing_seen_loses_nothing() -> None:
    (short,), (long,) = (made_run(1, STEADY, steps).parts for steps in (40, 240))
    # Runs of 10 and of 30 blocks. Wall-clock time is averaged over two blocks at a time.
    assert [part.wall_us.blocks for part in (short, long)] == [5, 15]
    run = made_run(1, STEADY, 40)
    assert [replace(run, seen=seen, lost=1).lost_percent for seen in (0, 50)] == [0.0, 2.0]


def kernels_in(*nodes: Node) -> dict[str, tuple[str, ...]]:
    table = NodeTable()
    for node in nodes:
        table.add(node)
    return {name: kernels for (name, _), kernels in kernels_of(table).items()}


def test_a_brick_runs_the_kernels_that_lie_in_it_however_deep_and_no_others() -> None:
    found = kernels_in(
        Node(1, None, NodeKind.STEP, "decode"),
        Node(2, 1, NodeKind.KERNEL, "in no brick"),
        Node(3, None, NodeKind.KERNEL, "nowhere"),
        Node(4, 1, NodeKind.BRICK, "Attention", category=BrickCategory.ATTENTION),
        Node(5, 4, NodeKind.KERNEL, "softmax"),
        Node(6, 4, NodeKind.FUNCTION, "forward"),
        Node(7, 6, NodeKind.KERNEL, "dot"),
        Node(8, 1, NodeKind.BRICK, "Norm", category=BrickCategory.NORM),
        Node(9, 1, NodeKind.BRICK, "Attention", label="again", category=BrickCategory.ATTENTION),
        Node(10, 9, NodeKind.KERNEL, "dot"),
        Node(11, 9, NodeKind.KERNEL, "scale"),
    )
    assert found == {"Attention": ("dot", "scale", "softmax")}


def test_of_a_brick_the_first_eight_kernels_are_named() -> None:
    brick = Node(1, None, NodeKind.BRICK, "Attention", category=BrickCategory.ATTENTION)
    kernels = [Node(number, 1, NodeKind.KERNEL, f"kernel {number}") for number in range(2, 12)]
    found = kernels_in(brick, *kernels)["Attention"]
    assert len(found) == MAX_KERNELS == 8
    assert set(found) == {kernel.name for kernel in kernels[:8]}


def test_a_run_was_closed_and_is_one_unless_it_says_otherwise() -> None:
    run = made_run(1, STEADY, 40)
    made = Run(run.name, run.key, run.surroundings, None, 1.0, run.parts, (), {}, 0, 1)
    assert (made.is_cut, made.runs, made.untrusted) == (False, 1, "")
