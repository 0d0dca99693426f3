"""Tests of eager models with a fake CUDA in torch: their steps are recorded by the kernels that they launch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.device import kernel_burst  # noqa: E402
from cbtop.profiler.device.cupti import CuptiError  # noqa: E402
from cbtop.profiler.device.kernel_burst import KernelBurstResults, LaunchedKernel  # noqa: E402
from cbtop.profiler.instrument import (  # noqa: E402
    attach,
    eager_stamps,
    kernel_bursts,
    kernel_steps,
    trouble,
    uninstall,
)
from cbtop.profiler.instrument.governor import GovernedProfiler  # noqa: E402
from cbtop.profiler.instrument.kernel_steps import parts_from, steps_for, together  # noqa: E402
from cbtop.profiler.instrument.kernel_windows import RecordedStep  # noqa: E402
from cbtop.profiler.instrument.phases import Call  # noqa: E402
from cbtop.protocol import clock  # noqa: E402
from cbtop.protocol.kernel_messages import HostTimes  # noqa: E402
from cbtop.protocol.kernel_messages import KernelBurst as Found  # noqa: E402
from cbtop.protocol.messages import Manifest, Node, Sampling  # noqa: E402
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_PLAIN  # noqa: E402
from cbtop.protocol.vocabulary import BY_KERNELS, IDLE_BEFORE, NodeKind  # noqa: E402
from tests.profiler.instrument import test_captured_graphs as played  # noqa: E402
from tests.profiler.instrument import test_kernel_bursts as bursts  # noqa: E402
from tests.profiler.instrument.test_captured_graphs import NORM_NS, PRODUCT_NS, REST_NS  # noqa: E402
from tests.profiler.memory import Memory  # noqa: E402

KERNEL = LaunchedKernel("gemm", (1, 1, 1), (1, 1, 1), 32, 0, 0)
LAYERS = 4
FORWARD = Call("forward", 2, 2, None)
Message = TypeVar("Message")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[bursts.World]:
    world = bursts.World()
    bursts.play(world, monkeypatch)
    monkeypatch.setattr(eager_stamps, "_kinds_of_devices", lambda model: {"cuda"})
    monkeypatch.setattr(eager_stamps, "_only_cuda_device", lambda model: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kernel_steps, "LEAST_PAUSE_NS", 1)
    monkeypatch.setattr(kernel_steps, "MOST_PAUSE_NS", 1)
    monkeypatch.setattr(trouble, "_said", {})
    yield world
    world.pass_time(10_000_000)
    uninstall()
    # A window of a model that was freed is closed by a thread of cbtop.
    assert kernel_bursts.one_at_a_time.acquire(timeout=20)
    kernel_bursts.one_at_a_time.release()


class Host:
    def __init__(self, world: bursts.World) -> None:
        self.world, self.memory = world, Memory()
        self.profiler = GovernedProfiler(3, recorder=self.memory)
        self.profiler.parts.by_kernels = True
        self.model = played.model_of(world, LAYERS)
        self.attachment = attach(self.model, self.profiler)

    def call(self, times: int) -> None:
        for _ in range(times):
            self.model(torch.ones(2, 1, dtype=torch.long))
            self.world.pass_time(10_000_000)

    def call_until(self, is_enough: Callable[[], bool]) -> None:
        """Call the model until `is_enough()`. On a busy machine, the warm-up takes more steps."""
        for _ in range(200):
            self.call(20)
            if is_enough():
                return
        raise AssertionError("4,000 steps were not enough")

    def said(self, kind: type[Message]) -> list[Message]:
        return [one for one in self.memory.said if isinstance(one, kind)]

    def step_nodes(self) -> set[int]:
        """Return the ids of the nodes of steps."""
        return {node.id for node in self.said(Node) if node.kind is NodeKind.STEP}

    def steps(self) -> list[list[tuple[str, int, int]]]:
        """Return the records of each recorded step as (name, duration, elements). The step itself comes last."""
        nodes = {node.id: node for node in self.memory.said if isinstance(node, Node)}
        found: list[list[tuple[str, int, int]]] = [[]]
        for tag, start_ns, end_ns, elements in self.memory.records:
            node = nodes[tag & 0xFFFF]
            if tag & FLAG_AMOUNTS or (tag & FLAG_PLAIN and node.kind is NodeKind.STEP):
                continue
            found[-1].append((node.name, end_ns - start_ns, elements))
            if node.kind is NodeKind.STEP:
                found.append([])
        return found[:-1]


def test_a_brick_takes_as_long_as_its_kernels_and_a_layer_as_its_bricks(world: bursts.World) -> None:
    host = Host(world)
    host.call_until(lambda: len(host.steps()) >= 2)
    recorded = host.steps()
    for step in recorded:
        took = {name: [ns for one, ns, _ in step if one == name] for name, _, _ in step}
        assert took["RmsNorm"] == [NORM_NS] * LAYERS
        assert took["DownProjection"] == [PRODUCT_NS] * LAYERS
        assert took["Layer"] == [REST_NS] * LAYERS
        assert took["Model"] == [REST_NS]
        layers = [ns for name, ns, _ in step if name.isdigit()]
        assert layers == [NORM_NS + PRODUCT_NS + REST_NS] * LAYERS
        (whole,) = took[step[-1][0]]
        assert whole >= sum(layers) + REST_NS


def test_what_the_windows_cost_is_told_and_kernels_are_in_the_graph(world: bursts.World) -> None:
    host = Host(world)
    host.call_until(lambda: len(host.said(Sampling)) > kernel_steps.LEAST_WINDOWS)
    said = host.said(Sampling)
    early, late = said[: kernel_steps.LEAST_WINDOWS - 1], said[kernel_steps.LEAST_WINDOWS - 1 :]
    assert early[0].overhead_percent is None
    assert all(one.overhead_percent is not None for one in early[1:])
    assert {one.low_percent for one in early} == {None}  # There are too few measurements for an interval.
    for one in late:
        assert one.low_percent is not None
        assert one.overhead_percent is not None
        assert one.high_percent is not None
        assert 0 <= one.low_percent <= one.overhead_percent <= one.high_percent
    assert BY_KERNELS + IDLE_BEFORE in [one.backend for one in host.memory.said if isinstance(one, Manifest)][-1]
    (found, *_) = [one for one in host.memory.said if isinstance(one, Found)]
    assert (found.number, found.steps) == (0, kernel_steps.KEPT)
    nodes = {node.id: node for node in host.memory.said if isinstance(node, Node)}
    assert {nodes[one.node].kind for one in found.kernels} == {NodeKind.KERNEL}


def test_the_host_is_timed_in_steps_between_those_of_kernels(world: bursts.World) -> None:
    host = Host(world)
    host.call_until(lambda: bool(host.said(HostTimes)))
    found = host.said(HostTimes)[-1]
    nodes = {node.id: node for node in host.memory.said if isinstance(node, Node)}
    timed = {nodes[one.node].name for one in found.bricks}
    assert {"RmsNorm", "DownProjection"} <= timed
    assert {nodes[one.node].kind for one in found.bricks} == {NodeKind.BRICK}
    assert {one.calls for one in found.bricks} == {found.steps}  # Each brick runs once per step in its layer.
    of_device = {node for node, name in ((node.id, node.name) for node in nodes.values()) if name in timed}
    assert {one.node for one in found.bricks} <= of_device
    recorded = host.steps()
    assert all(len([ns for name, ns, _ in step if name == "RmsNorm"]) == LAYERS for step in recorded)


def test_a_step_with_lost_kernels_is_dropped_and_it_is_said_once(
    world: bursts.World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_burst, "MAX_RECORDS", 10)
    host = Host(world)
    with caplog.at_level(logging.WARNING, "cbtop"):
        host.call(200)
    (line,) = [record.getMessage() for record in caplog.records if "too many kernels" in record.getMessage()]
    assert line.endswith("records were lost: they have no bricks")
    assert not host.steps()


def test_where_cupti_is_refused_the_model_runs_on_and_it_is_said_once(
    world: bursts.World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Held:
        def begin(self, kinds: Any) -> None:
            raise CuptiError("another tool has it")

    monkeypatch.setattr(kernel_bursts, "new_cupti", Held)
    host = Host(world)
    with caplog.at_level(logging.WARNING, "cbtop"):
        host.call(40)
    assert not host.profiler.parts.by_kernels
    assert not host.profiler.governor.models_by_kernels
    lines = [record.getMessage() for record in caplog.records if "kernels are not recorded" in record.getMessage()]
    assert lines == [
        "cbtop: kernels are not recorded (CuptiError: another tool has it): "
        "the device is timed by stamps, which slow the steps they are in"
    ]


def test_parts_lie_inside_each_other_one_after_another() -> None:
    took = {("layer", "block", "norm"): 10, ("layer", "block"): 5, ("layer", "down"): 20, ("head",): 7}
    parts = {keys: (begin, end, elements) for keys, begin, end, elements in parts_from(took, 100, {("head",): 3})}
    assert parts == {
        ("layer",): (100, 135, 0),
        ("layer", "block"): (100, 115, 0),
        ("layer", "block", "norm"): (105, 115, 0),
        ("layer", "down"): (115, 135, 0),
        ("head",): (135, 142, 3),
    }


def test_bursts_add_up_and_stay_what_they_were() -> None:
    bursts_, keys = [KernelBurstResults() for _ in range(2)], ("step", "brick")
    for burst, duration_ns in zip(bursts_, (10, 30), strict=True):
        burst.add(keys, KERNEL, duration_ns)
        burst.steps["step"] += 1
    found = together(deque(bursts_))
    durations = found.kernels[keys, KERNEL]
    assert (durations.count, durations.mean_ns, durations.min_ns, durations.max_ns) == (2, 20, 10, 30)
    assert found.steps["step"] == 2
    assert bursts_[0].kernels[keys, KERNEL].count == 1


def steps_of(count: int, *, plain_ms: float, took_ms: float) -> list[RecordedStep]:
    steps = [RecordedStep("step", FORWARD, round(1e6 * plain_ms)) for _ in range(count)]
    for step in steps:
        step.ended_ns = step.began_ns + round(1e6 * took_ms)
    return steps


@pytest.mark.parametrize(
    ("plain_ms", "took_ms", "missing", "expected"),
    [
        (5, 8, 0, 8),  # eight steps cost as much as opening and closing
        (5, 17, 0, 2),
        (5, 50, 0, 1),
        (5, 5, 0, kernel_steps.MOST_STEPS),
        (5, 17, 20, kernel_steps.MOST_STEPS),
        (5, 17, 3, 3),
        (100, 102, 20, 2),  # the steps of a window take at most 250 ms
        (500, 501, 20, 1),
    ],
)
def test_a_window_has_many_steps_until_there_are_enough(
    plain_ms: float, took_ms: float, missing: int, expected: int
) -> None:
    assert steps_for(steps_of(3, plain_ms=plain_ms, took_ms=took_ms), 24_000_000, missing) == expected


def test_a_window_has_fewer_steps_if_they_have_many_kernels() -> None:
    (step,) = steps = steps_of(1, plain_ms=5, took_ms=5)
    for _ in range(40_000):
        step.burst.add(("step",), KERNEL, 1)
    assert steps_for(steps, 10**9, 20) == 2


def test_time_in_which_no_step_begins_brings_no_window_closer(
    world: bursts.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(world)
    host.call_until(lambda: len(host.steps()) >= 2)
    by_kernels = host.attachment.steps.kernel_steps
    assert by_kernels is not None
    now_ns = clock.perf_counter_ns()
    by_kernels._pause(2_000_000_000)
    assert not by_kernels.is_due(now_ns + 300_000_000)  # a busy host looks four times a second
    assert not by_kernels.is_due(now_ns + 10_000_000_000)
    late_ns = range(10_100_000_000, 11_900_000_000, 100_000_000)
    due = [at_ns for at_ns in late_ns if by_kernels.is_due(now_ns + at_ns)]
    assert due[0] >= 11_400_000_000
    by_kernels._pause(2_000_000_000)
    steps_ns = range(100_000_000, 2_000_000_000, 100_000_000)
    begun_ns = clock.perf_counter_ns()
    assert not any([by_kernels.is_due(begun_ns + at_ns) for at_ns in steps_ns])
    assert by_kernels.is_due(begun_ns + 2_100_000_000)
    by_kernels._pause(2_000_000_000)
    idle_ns, begun_ns = by_kernels._idle_ns, clock.perf_counter_ns()
    governor = host.profiler.governor
    governor.ended("prefill", "", 5_000_000_000, governor.began(object(), "", recorded=False))
    assert by_kernels.is_due(begun_ns + 5_100_000_000)  # a step that takes long is no idle time
    assert by_kernels._idle_ns == idle_ns
