"""Tests of the straggler, which is the rank that works longer. A rank that waits longer is no straggler.

A single pause makes no straggler.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.client.busy import MAX_SILENT_SLICES, SLICE_S, SLICES, BusySlices
from cbtop.client.source_record import SourceRecord
from cbtop.client.store import Store
from cbtop.client.window import Window
from cbtop.daemon.source import Source
from cbtop.profiler.analysis.node_columns import COLUMNS
from cbtop.profiler.definitions import BrickDefinition
from cbtop.protocol.messages import HostHello, Manifest, Node
from cbtop.protocol.training_messages import PartTime, TrainingTimes
from cbtop.protocol.vocabulary import BrickCategory, NodeKind, TrainingPart
from cbtop.viewmodels.straggler import MIN_SLICES, bound_of_median, job_of, straggler
from tests.cbtop.recorded import Clock, apply, profiler_in, said_at, source_of
from tests.representatives import first_by_default

SLICE_NS = round(SLICE_S * 1e9)


class RankRun:
    """A rank with a fake clock. Between two of its updates, one time slice passes."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory = directory / str(rank)
        directory.mkdir()
        self.clock = Clock()
        self.profiler = profiler_in(directory, self.clock)
        self.step()
        self.source: Source = source_of(directory)
        self.store = Store()
        self.rank = rank
        self.now_ns = 0
        self.source.poll()
        apply(self.store, said_at(self.source.snapshot(), self.now_ns))

    def step(self, **us: float) -> None:
        """Run one step. `us` maps bricks to their durations."""
        with self.profiler.step("decode", 1):
            for name, value in us.items():
                with self.profiler.brick(name, 1):
                    self.clock.sleep_us(value)

    def slice(self, *steps: dict[str, float]) -> None:
        """Run these steps in one time slice."""
        for us in steps:
            self.step(**us)
        self.source.poll()
        self.now_ns += SLICE_NS
        delta = self.source.delta()
        apply(self.store, [replace(m, monotonic_ns=self.now_ns) if hasattr(m, "monotonic_ns") else m for m in delta])
        record = self.record
        assert record.hello is not None
        if record.hello.rank is None:
            apply_rank(record, self.rank)
        assert record.busy is not None
        record.busy.tick(self.now_ns, record.nodes, record.stats)

    @property
    def record(self) -> SourceRecord:
        return self.store.sources[self.source.key]


def apply_rank(record: SourceRecord, rank: int) -> None:
    assert record.hello is not None
    record.hello = replace(record.hello, rank=rank, world_size=8)
    record.busy = BusySlices()


@pytest.fixture
def three(tmp_path: Path) -> list[RankRun]:
    return [RankRun(tmp_path, rank) for rank in range(3)]


def run_slices(ranks: list[RankRun], work: list[dict[str, float]], count: int = SLICES + 1) -> None:
    for _ in range(count):
        for rank, us in zip(ranks, work, strict=True):
            rank.slice(us, us)


def found(ranks: list[RankRun]) -> int | None:
    verdict = straggler([rank.record for rank in ranks], "decode")
    return verdict.rank if verdict else None


def test_equal_ranks_have_no_straggler_and_nine_percent_is_no_reason(three: list[RankRun]) -> None:
    run_slices(three, [{"Ffn": 1000}] * 3)
    assert found(three) is None
    run_slices(three, [{"Ffn": 1000}, {"Ffn": 1090}, {"Ffn": 1000}])
    assert found(three) is None


def test_the_slow_one_is_named_with_the_brick_that_makes_it_slow(three: list[RankRun]) -> None:
    run_slices(three, [{"Ffn": 800, "Norm": 200}, {"Ffn": 950, "Norm": 200}, {"Ffn": 800, "Norm": 200}])
    verdict = straggler([rank.record for rank in three], "decode")
    assert verdict is not None
    assert (verdict.rank, verdict.brick, verdict.ranks, verdict.steps) == (1, "Ffn", 3, 2 * SLICES)
    assert verdict.percent == pytest.approx(15)
    assert (verdict.busy_us, verdict.others_us, verdict.brick_excess_us) == (1150, 1000, 150)


@first_by_default("name", ["AllReduce", "all_gather", "ncclDevKernel_ReduceScatter", "barrier", "recv"], 2)
def test_who_waits_for_the_slow_one_is_not_taken_for_it(three: list[RankRun], name: str) -> None:
    run_slices(three, [{"Ffn": 1000, name: 900}, {"Ffn": 1200, name: 10}, {"Ffn": 1000, name: 900}])
    assert found(three) == 1


def _layered(run: RankRun, work_us: float, gap_us: float, wait_us: float) -> None:
    """Run a step of one layer: first `gap_us` without a brick, then a brick.

    The brick works for `work_us` and then waits for other ranks in a collective for `wait_us`.
    """
    with run.profiler.step("decode", 1), run.profiler.layer(0):
        run.clock.sleep_us(gap_us)
        with run.profiler.brick("DownProjection", 1):
            run.clock.sleep_us(work_us)
            with run.profiler.brick(REDUCE, 1):
                run.clock.sleep_us(wait_us)


REDUCE = BrickDefinition("Reduce", BrickCategory.COMMUNICATION)


def test_a_rank_slow_between_bricks_is_named_by_time_out_of_communication(three: list[RankRun]) -> None:
    for _ in range(SLICES + 1):
        for run in three:
            # The steps of all ranks take equally long. Rank 1 works in the gap, and all other ranks wait in the
            # collective.
            _layered(run, 400, *((700, 0) if run.rank == 1 else (200, 500)))
            run.slice()
    verdict = straggler([rank.record for rank in three], "decode")
    assert verdict is not None
    assert (verdict.rank, verdict.brick, verdict.brick_excess_us) == (1, "gaps between its bricks", 500)
    assert (verdict.busy_us, verdict.others_us) == (1100, 600)


@pytest.mark.parametrize("backend", ["", "torch on cuda: launches"])
def test_where_nobody_sees_who_waits_gaps_are_no_reason_to_name_one(three: list[RankRun], backend: str) -> None:
    """The host measures no collective, or it measures only the launch of a collective.

    So a gap may be the time in which a rank waits.
    """
    for _ in range(SLICES + 1):
        for run in three:
            with run.profiler.step("decode", 1):
                run.clock.sleep_us(900 if run.rank == 1 else 300)
                with run.profiler.brick("Ffn", 1):
                    run.clock.sleep_us(300)
                if backend:
                    with run.profiler.brick(REDUCE, 1):
                        run.clock.sleep_us(1)
            run.slice()
    for run in three:
        run.record.manifest = Manifest("m", "llama", backend or "torch", "", 1, 1, 1, 1, 1, 1)
    assert found(three) is None


def test_a_brick_inside_another_is_counted_once(three: list[RankRun]) -> None:
    for _ in range(SLICES + 1):
        for rank in three:
            with rank.profiler.step("decode", 1), rank.profiler.brick("Outer", 1):
                rank.clock.sleep_us(500)
                with rank.profiler.brick("Inner", 1):
                    rank.clock.sleep_us(600 if rank.rank == 2 else 300)
            rank.slice()
    verdict = straggler([rank.record for rank in three], "decode")
    assert verdict is not None
    assert (verdict.rank, verdict.brick, verdict.busy_us, verdict.others_us) == (2, "Inner", 1100, 800)


def test_one_bad_moment_is_no_straggler(three: list[RankRun]) -> None:
    run_slices(three, [{"Ffn": 1000}] * 3, count=SLICES)
    run_slices(three, [{"Ffn": 1000}, {"Ffn": 9000}, {"Ffn": 1000}], count=1)
    assert found(three) is None


def test_a_rank_that_was_slow_once_is_forgotten_after_a_second(three: list[RankRun]) -> None:
    run_slices(three, [{"Ffn": 1000}, {"Ffn": 2000}, {"Ffn": 1000}])
    assert found(three) == 1
    run_slices(three, [{"Ffn": 1000}] * 3)
    assert found(three) is None


def test_a_rank_that_has_stopped_and_one_alone_are_not_compared(three: list[RankRun]) -> None:
    run_slices(three, [{"Ffn": 1000}, {"Ffn": 2000}, {"Ffn": 1000}])
    assert found(three[1:2]) is None
    for _ in range(MAX_SILENT_SLICES + 1):
        three[1].slice()
    assert found(three) is None


# --- simulated histories without clock and process ----------------------------------------------------------------


class MadeRank:
    """A simulated rank with a given history.

    A time slice has 100 equal steps, each with a brick and possibly a collective.
    """

    STEPS = 100  # steps per slice

    def __init__(self, rank: int) -> None:
        hello = HostHello(2, 0, 100 + rank, 1, "here", "boot", "train.py", "3", "made", 0, 0, rank, rank, 8)
        self.record = SourceRecord(f"here:{rank}", Window(10.0), hello=hello, busy=BusySlices())
        self.record.nodes.add(Node(1, None, NodeKind.STEP, "decode"))
        self.record.nodes.add(Node(2, 1, NodeKind.BRICK, "Ffn"))
        self.now_ns = 0
        self.took_us = np.zeros(3)
        self.steps = 0

    def slice(self, step_us: float, brick_us: float | None = None, wait_us: float | None = None) -> None:
        """Add a time slice. By default, the brick takes the whole step. Without `wait_us` there is no collective."""
        assert self.record.busy is not None
        if wait_us is not None and len(self.record.nodes) == 2:
            self.record.nodes.add(Node(3, 1, NodeKind.BRICK, "Reduce", category=BrickCategory.COMMUNICATION))
        nodes = 2 if wait_us is None else 3
        self.steps += self.STEPS
        self.took_us += self.STEPS * np.array([step_us, step_us if brick_us is None else brick_us, wait_us or 0])
        self.now_ns += SLICE_NS
        columns = {name: np.zeros(nodes, np.int64) for name in COLUMNS}
        columns["count"][:] = self.steps
        columns["closed_ns"][:] = columns["total_ns"][:] = np.rint(self.took_us * 1e3)[:nodes]
        totals, none = np.array([columns[name] for name in COLUMNS]), np.zeros(0, np.int64)
        self.record.stats.take_over(np.arange(1, nodes + 1), totals, none, none, {})
        self.record.busy.tick(self.now_ns, self.record.nodes, self.record.stats)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (TrainingPart.OTHER, "the part `other` of its step, code of the loop itself"),
        (TrainingPart.FORWARD, "the part `forward` of its step, outside of bricks"),
    ],
)
def test_time_between_bricks_of_training_is_named_by_the_part_of_the_step(part: TrainingPart, name: str) -> None:
    ranks = [MadeRank(number) for number in range(3)]
    for _ in range(SLICES + 1):
        for rank, between_us in zip(ranks, (100, 600, 100), strict=True):
            rank.slice(step_us=2000, brick_us=900, wait_us=1100 - between_us)
    for rank, between_us in zip(ranks, (100, 600, 100), strict=True):
        took_us = {part: between_us, TrainingPart.BACKWARD: 900, TrainingPart.COMMUNICATION: 1100 - between_us}
        parts = tuple(PartTime(one, us * 1000, us * 1000) for one, us in took_us.items())
        rank.record.training_times["decode", ""] = TrainingTimes("decode", "", 1, 2_000_000, parts)
    said = straggler([rank.record for rank in ranks], "decode")
    assert said is not None
    assert (said.rank, said.brick) == (1, name)
    ranks[0].record.training_times.clear()
    unknown = straggler([rank.record for rank in ranks], "decode")
    assert unknown is not None
    assert unknown.brick == "gaps between its bricks"


def verdict_on(histories: Sequence[Sequence[float]]) -> int | None:
    """Return the number of the rank that is reported as straggler, or None.

    `histories` has for each rank the µs per step in each slice.
    """
    ranks = [MadeRank(number) for number in range(len(histories))]
    for rank, history in zip(ranks, histories, strict=True):
        for step_us in (1000, *history):  # The first slice is only the base for the differences to later slices.
            rank.slice(step_us)
    found = straggler([rank.record for rank in ranks], "decode")
    return found.rank if found else None


RARE = bound_of_median(SLICES) - 1  # at most this number of slices have a pause
pauses = st.dictionaries(st.integers(0, SLICES - 1), st.floats(0, 1e6), max_size=RARE)  # µs per step, by slice
noises = st.lists(st.floats(0.98, 1.02), min_size=SLICES, max_size=SLICES)
histories = st.tuples(noises, pauses).map(
    lambda made: [1000 * n + made[1].get(at, 0) for at, n in enumerate(made[0])]
)
many_histories = st.lists(histories, min_size=2, max_size=8)


@given(many_histories)
def test_rare_pauses_name_no_rank_whenever_they_come_and_however_long(ranks: list[list[float]]) -> None:
    assert verdict_on(ranks) is None


@given(many_histories, st.floats(1.15, 10), st.data())
def test_a_true_straggler_is_named_whatever_pauses_there_are(
    ranks: list[list[float]], factor: float, data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, len(ranks) - 1))
    assert verdict_on([[us * factor for us in h] if at == slow else h for at, h in enumerate(ranks)]) == slow


shares = st.lists(st.floats(0, 1), min_size=8, max_size=8)


@given(many_histories, shares, st.floats(1.15, 10), st.data())
def test_who_works_longer_is_named_though_all_wait_until_it_is_there(
    ranks: list[list[float]], of_gaps: list[float], factor: float, data: st.DataObject
) -> None:
    """Ranks wait for each other in collectives, so the steps of all ranks are as long as those of the slowest.

    The work that differs between ranks is in bricks or in the gaps between bricks.
    """
    slow = data.draw(st.integers(0, len(ranks) - 1))
    works = [[us * factor for us in history] if at == slow else history for at, history in enumerate(ranks)]
    made = [MadeRank(number) for number in range(len(ranks))]
    for at in range(-1, SLICES):
        busy_us = [work[max(at, 0)] for work in works]
        for rank, us, share in zip(made, busy_us, of_gaps, strict=False):
            rank.slice(max(busy_us), brick_us=us * (1 - share), wait_us=max(busy_us) - us)
    verdict = straggler([rank.record for rank in made], "decode")
    assert verdict is not None
    assert verdict.rank == slow


@given(many_histories, st.floats(1.3, 10), st.data())
def test_all_wait_for_a_slow_one_only_if_their_steps_are_as_long_as_its_own(
    ranks: list[list[float]], factor: float, data: st.DataObject
) -> None:
    """Replicas that never wait for each other have steps of different length: the slow rank has longer steps."""
    slow = data.draw(st.integers(0, len(ranks) - 1))
    works = [[us * factor for us in history] if at == slow else history for at, history in enumerate(ranks)]
    for do_wait in (True, False):
        made = [MadeRank(number) for number in range(len(ranks))]
        for at in range(-1, SLICES):
            busy_us = [work[max(at, 0)] for work in works]
            for rank, us in zip(made, busy_us, strict=True):
                wait_us = max(busy_us) - us if do_wait else 0.0
                rank.slice(us + wait_us, brick_us=us, wait_us=wait_us)
        verdict = straggler([rank.record for rank in made], "decode")
        assert verdict is not None
        assert verdict.others_wait == do_wait
        assert verdict.waited_us == pytest.approx(verdict.step_us - verdict.others_us if do_wait else 0.0, rel=0.05)


def test_two_that_run_as_the_same_rank_are_of_two_jobs_and_nobody_waits() -> None:
    ranks = [MadeRank(0), MadeRank(0), MadeRank(1)]
    for _ in range(SLICES + 1):
        for rank, us in zip(ranks, (1000, 2000, 1000), strict=True):
            rank.slice(us)
    assert straggler([rank.record for rank in ranks], "decode") is None
    found = straggler([rank.record for rank in ranks[1:]], "decode")
    assert found is not None
    assert (found.rank, found.others_wait) == (0, False)


def test_a_lone_rank_is_of_no_job_and_the_jobs_of_a_launcher_are_told_apart() -> None:
    first, second = MadeRank(0).record, MadeRank(1).record
    assert first.hello is not None
    assert second.hello is not None
    assert job_of(first) == job_of(second)
    second.hello = replace(second.hello, job="102")
    assert job_of(first) != job_of(second)
    first.hello = replace(first.hello, world_size=1)
    assert job_of(first) is None


@given(st.lists(histories, min_size=3, max_size=8), st.floats(1.15, 10), st.data())
def test_two_ranks_that_are_equally_slow_name_nobody(
    ranks: list[list[float]], factor: float, data: st.DataObject
) -> None:
    slow = data.draw(st.sets(st.integers(0, len(ranks) - 1), min_size=2))
    assert verdict_on([[us * factor for us in h] if at in slow else h for at, h in enumerate(ranks)]) is None


@first_by_default("count", [2, 4, 8])
def test_ten_of_ten_looks_are_right_both_ways(count: int) -> None:
    """Ten simulated jobs have 3 % noise. In 10 % of the time slices, a rank pauses for as long as 20 steps."""

    def history(chance: random.Random, factor: float) -> list[float]:
        paused = (20 / MadeRank.STEPS if chance.random() < 0.1 else 0 for _ in range(SLICES))
        return [1000 * factor * (chance.gauss(1, 0.03) + pause) for pause in paused]

    for run in range(10):
        chance = random.Random(run)
        assert verdict_on([history(chance, 1) for _ in range(count)]) is None
        assert verdict_on([history(chance, 1.2 if at == 1 else 1) for at in range(count)]) == 1
        two = [history(chance, 1.2 if at < 2 else 1) for at in range(count)]
        assert verdict_on(two) is None


def test_while_a_rank_is_new_nobody_is_named_for_it_may_be_as_slow() -> None:
    ranks = [MadeRank(number) for number in range(4)]
    for _ in range(MIN_SLICES + 3):
        for rank in ranks[:3]:
            rank.slice(1500 if rank is ranks[2] else 1000)
    ranks[3].slice(1500)
    for _ in range(MIN_SLICES - 1):
        assert straggler([rank.record for rank in ranks], "decode") is None
        ranks[3].slice(1500)
    assert straggler([rank.record for rank in ranks], "decode") is None
    found = straggler([rank.record for rank in ranks[:3]], "decode")
    assert found is not None
    assert found.rank == 2


@pytest.mark.parametrize(("count", "bound"), [(3, 0), (4, 1), (10, 3), (20, 7)])
def test_the_bound_of_a_median_is_that_of_the_binomial_distribution(count: int, bound: int) -> None:
    assert bound_of_median(count) == bound
