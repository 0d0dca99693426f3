"""Tests of steps that wait for a device before they are recorded: their times, names and waits.

The device is fake.
"""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

from cbtop.profiler import held_steps
from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.device.cuda_calls import DriverError
from cbtop.profiler.device.stamp_clock import StampClock
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.attributes import Work
from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS, NO_NODE
from cbtop.protocol.vocabulary import BrickId, NodeKind
from tests.profiler.device.fake_driver import FakeDriver
from tests.profiler.memory import Memory

STREAM, SIDE_STREAM = 7, 8
QKV = BrickDefinition.of(BrickId.QKV_PROJECTION, backend="torch on cuda", work=Work(2.0, 0.0, 64.0, 0.0))
RESOLUTION_NS = 64


class Played:
    """A profiler and a fake device. Each brick takes a given time on the host and a different time on the device."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.stream: int | None = STREAM
        self.memory = Memory()
        self.clock = StampClock(lambda: self.stream, self.driver, self.driver.now_ns, measures_cost=True)
        self.driver.pass_time(1_000_000)
        self.clock.look()
        self.profiler = BrickProfiler(recorder=self.memory, device_clock=self.clock, clock_ns=self.driver.now_ns)

    def step(self, host_ns: int, device_ns: int, bricks: int = 30) -> None:
        with self.profiler.step("decode", tokens=1), self.profiler.layer(0):
            for _ in range(bricks):
                with self.profiler.brick(QKV, 10):
                    self.driver.work(self.stream or STREAM, device_ns)
                    self.driver.pass_time(host_ns)
                self.driver.work(self.stream or STREAM, 500)  # work between bricks

    def finish(self) -> None:
        """Let the device finish its work, then finish the recording."""
        self.driver.pass_time(100_000_000)
        self.profiler.finalize()

    def nodes(self) -> dict[int, Node]:
        return {said.id: said for said in self.memory.said if isinstance(said, Node)}

    def times(self, kind: NodeKind) -> list[tuple[str, int, int]]:
        nodes = self.nodes()
        return [
            (nodes[tag & 0xFFFFFF].name, start, end)
            for tag, start, end, _ in self.memory.records
            if tag & 0xFFFFFF != NO_NODE and nodes[tag & 0xFFFFFF].kind is kind and not tag & FLAG_AMOUNTS
        ]

    def lost(self) -> int:
        return sum(tag & 0xFFFFFF == NO_NODE for tag, *_ in self.memory.records)


@pytest.fixture
def played() -> Played:
    return Played()


def test_bricks_take_as_long_as_their_kernels_where_the_device_is_behind(played: Played) -> None:
    played.step(host_ns=5_000, device_ns=100_000)
    played.finish()
    bricks = played.times(NodeKind.BRICK)
    assert len(bricks) == 30
    assert {name for name, *_ in bricks} == {"QkvProjection"}
    assert all(abs(end - start - 100_000) <= RESOLUTION_NS for _, start, end in bricks[1:])
    works = [node.work for node in played.nodes().values() if node.kind is NodeKind.BRICK]
    assert works == [QKV.work]


def test_bricks_and_what_lies_between_them_add_up_to_the_step(played: Played) -> None:
    played.step(host_ns=5_000, device_ns=100_000)
    played.finish()
    (_, begun, ended), bricks = played.times(NodeKind.STEP)[0], played.times(NodeKind.BRICK)
    gaps = sum(after[1] - before[2] for before, after in pairwise(bricks))
    assert sum(end - start for _, start, end in bricks) + gaps + (bricks[0][1] - begun) + (ended - bricks[-1][2]) == (
        ended - begun
    )
    assert all(before[2] <= after[1] for before, after in pairwise(bricks))
    spent_ns = 30 * (100_000 + 500)  # no stamps
    assert spent_ns - 3_000 <= ended - begun <= spent_ns + 20_000


def test_a_step_that_waits_for_the_host_is_launch_bound_and_has_no_rate(played: Played) -> None:
    played.step(host_ns=100_000, device_ns=2_000)
    played.finish()
    bricks = [node for node in played.nodes().values() if node.kind is NodeKind.BRICK]
    assert [(node.name, node.backend) for node in bricks] == [
        ("QkvProjection, launch-bound", "torch on cuda: until the device got there")
    ]
    assert bricks[0].work == Work()
    assert all(end - start > 90_000 for _, start, end in played.times(NodeKind.BRICK))


def test_steps_of_both_kinds_are_told_apart_in_one_phase(played: Played) -> None:
    for _ in range(3):
        played.step(host_ns=100_000, device_ns=2_000)
        played.step(host_ns=5_000, device_ns=100_000)
        # The device finishes all of its work here, so the next step finds it idle.
        played.driver.pass_time(10_000_000)
    played.finish()
    steps = [node.name for node in played.nodes().values() if node.kind is NodeKind.STEP]
    names = [name for name, *_ in played.times(NodeKind.BRICK)]
    assert steps == ["decode"]
    assert (names.count("QkvProjection"), names.count("QkvProjection, launch-bound")) == (90, 90)


def test_a_step_is_not_launch_bound_if_only_its_first_bricks_find_it_idle(played: Played) -> None:
    with played.profiler.step("prefill", tokens=9):
        for at in range(60):
            with played.profiler.brick(QKV, 10):
                played.driver.work(STREAM, 1_000 if at < 3 else 400_000)
                played.driver.pass_time(20_000)
    played.finish()
    assert {name for name, *_ in played.times(NodeKind.BRICK)} == {"QkvProjection"}


def test_nobody_waits_for_the_device_and_steps_are_recorded_when_it_is_there(played: Played) -> None:
    played.driver.stands_still = True
    before_ns = played.driver.host_ns
    played.step(host_ns=1_000, device_ns=100_000, bricks=3)
    played.step(host_ns=1_000, device_ns=100_000, bricks=3)
    # The host has read its clock and has not waited for the device.
    assert played.driver.host_ns - before_ns < 6 * 1_000 + 400 * 50
    assert not played.memory.records
    played.driver.stands_still = False
    played.driver.pass_time(10_000_000)
    played.step(host_ns=1_000, device_ns=100_000, bricks=3)
    assert len(played.times(NodeKind.STEP)) == 2
    played.finish()
    assert len(played.times(NodeKind.STEP)) == 3
    assert played.lost() == 0


def test_steps_that_wait_are_bounded_and_the_oldest_is_counted_as_lost(played: Played) -> None:
    played.driver.stands_still = True
    for _ in range(held_steps.MAX_STEPS + 5):
        played.step(host_ns=0, device_ns=1_000, bricks=2)
    assert played.lost() == 5 * (2 + 1 + 1)  # bricks, layer, step
    played.driver.stands_still = False
    played.driver.pass_time(100_000_000)
    played.finish()
    assert len(played.times(NodeKind.STEP)) == held_steps.MAX_STEPS


def test_a_step_that_began_in_a_capture_leaves_nothing(played: Played) -> None:
    launched, played.stream = played.driver.launched, None
    played.step(host_ns=0, device_ns=1_000)
    played.finish()
    assert played.driver.launched == launched
    assert not played.memory.records


def test_what_runs_on_a_side_stream_is_stamped_there(played: Played) -> None:
    with played.profiler.step("decode", tokens=1):
        for _ in range(20):
            with played.profiler.brick(QKV, 10):
                played.driver.work(STREAM, 200_000)
            played.stream = SIDE_STREAM
            with played.profiler.brick("side"):
                played.driver.work(SIDE_STREAM, 300_000)
            played.stream = STREAM
    played.finish()
    took = {name: end - start for name, start, end in played.times(NodeKind.BRICK)}
    assert abs(took["QkvProjection"] - 200_000) <= RESOLUTION_NS
    assert abs(took["side"] - 300_000) <= RESOLUTION_NS


def test_what_the_host_timed_in_a_launch_bound_step_keeps_its_name(played: Played) -> None:
    with played.profiler.step("decode", tokens=1):
        played.profiler.record_elapsed("prepared", 1_000)
        for _ in range(5):
            with played.profiler.brick(QKV, 10):
                played.driver.pass_time(100_000)
    played.finish()
    assert {name for name, *_ in played.times(NodeKind.BRICK)} == {"prepared", "QkvProjection, launch-bound"}


def test_the_cost_of_a_stamp_and_the_lag_of_an_idle_device_are_measured(played: Played) -> None:
    assert played.clock.stamp_cost_ns == pytest.approx(1_000, abs=RESOLUTION_NS)
    assert played.clock.idle_lag_ns is not None
    assert 0 <= played.clock.idle_lag_ns < 10_000


def test_a_device_that_is_lost_ends_recording_and_not_the_host(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(kernel: int, stream: int, arguments: int) -> None:
        raise DriverError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(played.driver, "launch", lost)
    played.step(host_ns=0, device_ns=1_000)
    assert not played.profiler.recording


def test_a_forked_child_records_no_step_of_its_parent_and_asks_no_device(played: Played) -> None:
    played.driver.stands_still = True
    played.step(host_ns=0, device_ns=1_000)
    launched = played.driver.launched
    child = os.fork()
    if child == 0:
        played.driver.stands_still = False
        played.step(host_ns=0, device_ns=1_000)
        played.profiler.finalize()
        os._exit(played.driver.launched != launched or bool(played.memory.records))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_a_step_waits_for_is_recorded_in_it_without_the_stamps_before(played: Played) -> None:
    told = BrickDefinition.of(BrickId.LM_HEAD, backend="torch on cuda")
    with played.profiler.step("decode", tokens=1) as step:
        step.wait()
        for _ in range(30):
            with played.profiler.brick(QKV, 10):
                played.driver.work(STREAM, 100_000)
        played.driver.work(STREAM, 400_000)  # A captured graph with times that are recorded elsewhere.
        graph_ended_ns = played.driver.host_ns + 30 * 100_000 + 60 * 1_000 + 400_000
    played.finish()
    assert not played.times(NodeKind.STEP)
    step.told([((told,), graph_ended_ns - 400_000, graph_ended_ns, 1)])
    played.profiler.finalize()
    (_, _, ended), bricks = played.times(NodeKind.STEP)[0], played.times(NodeKind.BRICK)
    assert [name for name, *_ in bricks] == ["QkvProjection"] * 30 + ["LmHead"]
    assert bricks[-1][2] - bricks[-1][1] == 400_000
    # The 60 earlier time stamps took 60 µs. This time must not be part of this brick.
    assert bricks[-2][2] - 2_000 <= bricks[-1][1] <= bricks[-2][2] + 10_000
    assert ended - 10_000 <= bricks[-1][2] <= ended


def test_times_a_device_never_reports_are_lost_and_the_step_is_recorded(
    played: Played,
) -> None:
    with played.profiler.step("decode", tokens=1) as step:
        step.wait()
        step.wait()
    step.told(None)
    played.finish()
    assert not played.times(NodeKind.STEP)
    step.told([])
    played.finish()
    assert len(played.times(NodeKind.STEP)) == 1
    assert played.lost() == 1


def test_reset_forgets_what_is_kept(played: Played) -> None:
    played.step(host_ns=1_000, device_ns=100_000)
    played.profiler.reset()
    played.finish()
    assert not played.memory.records
