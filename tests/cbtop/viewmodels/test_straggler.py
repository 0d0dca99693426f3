"""The straggler is the rank that works longer, not the one that waits longer; a hiccup is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cbtop.client.busy import MAX_SILENT_SLICES, SLICE_S, SLICES
from cbtop.client.store import SourceRecord, Store
from cbtop.daemon.source import Source
from cbtop.viewmodels.straggler import straggler
from tests.cbtop.recorded import Clock, apply, profiler_in, source_of

SLICE_NS = round(SLICE_S * 1e9)


class RankRun:
    """One rank under a made-up clock, whose updates reach the store a slice apart."""

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
        apply(self.store, [*self.source.snapshot()])

    def step(self, **us: float) -> None:
        """One step; `us` is what each brick took."""
        with self.profiler.step("decode", 1):
            for name, value in us.items():
                with self.profiler.brick(name, 1):
                    self.clock.sleep_us(value)

    def slice(self, *steps: dict[str, float]) -> None:
        """A slice in which these steps ended."""
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
    from cbtop.client.busy import BusySlices

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


@pytest.mark.parametrize("name", ["AllReduce", "all_gather", "ncclDevKernel_ReduceScatter", "barrier", "recv"])
def test_who_waits_for_the_slow_one_is_not_taken_for_it(three: list[RankRun], name: str) -> None:
    run_slices(three, [{"Ffn": 1000, name: 900}, {"Ffn": 1200, name: 10}, {"Ffn": 1000, name: 900}])
    assert found(three) == 1


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
