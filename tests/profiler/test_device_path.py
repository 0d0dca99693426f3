"""Tests of sync modes, which decide when the profiler waits for a device.

A sync mode never changes the time of a brick.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbtop.profiler.clocks import HostClock
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.vocabulary import BrickId, SyncMode
from tests.profiler.memory import Memory

RECORDING = [SyncMode.IMMEDIATE, SyncMode.PER_LAYER, SyncMode.DEFERRED]


class FakeDevice:
    """A device that works through a queue.

    The times of its time stamps are known only after the profiler has waited for the device.
    """

    def __init__(self) -> None:
        self.enqueued_ns = 0
        self.reached_ns = 0
        self.waits = 0

    def work(self, duration_ns: int) -> None:
        self.enqueued_ns += duration_ns

    def mark(self) -> int:
        return self.enqueued_ns

    def synchronize(self) -> None:
        self.waits += 1
        self.reached_ns = self.enqueued_ns

    def time_ns(self, mark: object, /) -> int:
        assert isinstance(mark, int)
        assert mark <= self.reached_ns, "asked for a mark that was not waited for"
        return mark


Layers = list[list[int]]  # the bricks in each layer, by their durations in ns
layers = st.lists(st.lists(st.integers(0, 10**6), max_size=4), max_size=4)


def run(mode: SyncMode, steps: list[Layers]) -> tuple[list[tuple[int, int, int, int]], FakeDevice]:
    memory, device = Memory(), FakeDevice()
    profiler = BrickProfiler(recorder=memory, device_clock=device, sync_mode=mode)
    for step in steps:
        with profiler.step("decode", tokens=1):
            for index, bricks in enumerate(step):
                with profiler.layer(index):
                    for duration_ns in bricks:
                        with profiler.brick(BrickId.ACTIVATION, duration_ns):
                            device.work(duration_ns)
                    device.work(7)
    profiler.finalize()
    assert profiler.pending_count == 0
    return memory.records, device


@given(st.lists(layers, min_size=1, max_size=3))
def test_every_mode_gives_the_same_durations(steps: list[Layers]) -> None:
    immediate, per_layer, deferred = (run(mode, steps)[0] for mode in RECORDING)
    assert immediate == per_layer == deferred


@given(st.lists(layers, min_size=1, max_size=3))
def test_each_brick_has_its_own_end_and_siblings_fit_their_parent(steps: list[Layers]) -> None:
    records, _ = run(SyncMode.DEFERRED, steps)
    bricks = [(end - start, elements) for tag, start, end, elements in records if elements not in (1,)]
    assert all(duration == elements for duration, elements in bricks)
    wall = sum(end - start for tag, start, end, _ in records if tag == 1)
    assert wall == sum(sum(bricks) + 7 for step in steps for bricks in step)


def test_the_modes_wait_as_often_as_they_say() -> None:
    # There are 3 steps with 2 layers of 2 bricks: 12 bricks and 6 layers.
    steps: list[Layers] = [[[5, 5], [5, 5]]] * 3
    waits = {mode: run(mode, steps)[1].waits for mode in RECORDING}
    assert waits[SyncMode.DEFERRED] == 3
    assert waits[SyncMode.PER_LAYER] == 6 + 3
    assert waits[SyncMode.IMMEDIATE] == 2 * (12 + 6 + 3)


def test_none_records_nothing_and_never_waits() -> None:
    records, device = run(SyncMode.NONE, [[[5]]])
    assert (records, device.waits) == ([], 0)


def test_changing_the_mode_records_what_was_put_off() -> None:
    memory, device = Memory(), FakeDevice()
    profiler = BrickProfiler(recorder=memory, device_clock=device)
    with profiler.brick(BrickId.RMS_NORM):
        device.work(3)
    assert (profiler.pending_count, memory.records) == (1, [])
    profiler.set_sync_mode(SyncMode.IMMEDIATE)
    assert (profiler.sync_mode, memory.records) == (SyncMode.IMMEDIATE, [(1, 0, 3, 1)])


@given(st.sampled_from(RECORDING), st.integers(1, 30))
def test_on_the_hosts_own_clock_nothing_is_lost(mode: SyncMode, bricks: int) -> None:
    memory = Memory()
    profiler = BrickProfiler(recorder=memory, device_clock=HostClock(), sync_mode=mode)
    for _ in range(bricks):
        timer = profiler.start_brick(BrickId.RMS_NORM)
        profiler.stop_brick(timer, 1)
    profiler.close()
    assert len(memory.records) == bricks
    assert all(start <= end for _, start, end, _ in memory.records)


@pytest.mark.parametrize("mode", SyncMode)
def test_an_exception_marks_the_brick_failed_in_every_mode(mode: SyncMode, runtime: Path) -> None:
    profiler = BrickProfiler(device_clock=FakeDevice(), sync_mode=mode)
    with pytest.raises(ZeroDivisionError), profiler.brick(BrickId.RMS_NORM):
        raise ZeroDivisionError
    profiler.finalize()
    stats = profiler.stats_for(BrickId.RMS_NORM)
    assert (stats.calls.failed if stats else 0) == (0 if mode is SyncMode.NONE else 1)


def test_f103_deferred_timings_accumulate_and_f104_finalize_clears_them() -> None:
    memory, device = Memory(), FakeDevice()
    profiler = BrickProfiler(recorder=memory, device_clock=device, sync_mode=SyncMode.DEFERRED)
    for pending in (1, 2, 3):
        with profiler.brick(BrickId.RMS_NORM):
            device.work(pending)
        assert (profiler.pending_count, len(memory.records)) == (pending, 0)
    profiler.finalize()
    assert profiler.pending_count == 0
    assert [end - start for _, start, end, _ in memory.records] == [1, 2, 3]
