"""Tests of training steps with recorded kernels, with a fake CUDA in torch and on a real GPU."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.device import kernel_burst  # noqa: E402
from cbtop.profiler.device.cupti import CuptiError  # noqa: E402
from cbtop.profiler.device.kernel_burst import KernelBurstResults, KernelWindow  # noqa: E402
from cbtop.profiler.instrument import (  # noqa: E402
    attach,
    eager_stamps,
    kernel_bursts,
    step_memory,
    training_windows,
    trouble,
    uninstall,
)
from cbtop.profiler.instrument import training_kernels as kernels  # noqa: E402
from cbtop.profiler.instrument.communication_times import StepCommunication  # noqa: E402
from cbtop.profiler.instrument.governor import GovernedProfiler  # noqa: E402
from cbtop.profiler.instrument.training import EndedStep, StepTimes, training_here  # noqa: E402
from cbtop.profiler.instrument.training_kernels import IdleTimes, StepEvents  # noqa: E402
from cbtop.profiler.instrument.training_windows import TrainingWindow  # noqa: E402
from cbtop.protocol import clock  # noqa: E402
from cbtop.protocol.memory_messages import BrickMemories, TrainingMemory  # noqa: E402
from cbtop.protocol.messages import Manifest, Node, Sampling  # noqa: E402
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_PLAIN  # noqa: E402
from cbtop.protocol.training_messages import TrainingTimes  # noqa: E402
from cbtop.protocol.vocabulary import BY_KERNELS, NodeKind, TrainingPart  # noqa: E402
from tests.profiler.device.fake_cupti import FakeCupti  # noqa: E402
from tests.profiler.instrument import test_kernel_bursts as bursts  # noqa: E402
from tests.profiler.instrument.test_step_memory import Allocator  # noqa: E402
from tests.profiler.memory import Memory  # noqa: E402

from torch import nn  # noqa: E402  # isort: skip
from torch.utils.checkpoint import checkpoint  # noqa: E402  # isort: skip

LAYERS = 3
NO_TIMES = StepTimes(4, {}, StepCommunication())
FORWARD_NS, BACKWARD_NS, NORM_NS, OPTIMIZER_NS, LOSS_NS, LOOP_NS = 20_000, 45_000, 3_000, 9_000, 1_000, 700


class Event:
    """A CUDA event. The device either keeps up with the host or is `behind_ns` behind it."""

    world: bursts.World
    behind_ns = 0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at_ns = 0

    def record(self) -> None:
        self.at_ns = self.world.now_ns()

    def query(self) -> bool:
        return self.world.now_ns() >= self.at_ns + Event.behind_ns

    def elapsed_time(self, end: Event) -> float:
        return (end.at_ns - self.at_ns) / 1e6


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[bursts.World]:
    world = Event.world = bursts.World()
    Event.behind_ns = 0
    bursts.play(world, monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(eager_stamps, "_kinds_of_devices", lambda model: {"cuda"})
    monkeypatch.setattr(eager_stamps, "_only_cuda_device", lambda model: 0)
    monkeypatch.setattr(kernels, "LEAST_PAUSE_NS", 1)
    monkeypatch.setattr(kernels, "MOST_PAUSE_NS", 1)
    monkeypatch.setattr(trouble, "_said", {})
    yield world
    world.pass_time(10_000_000)
    uninstall()
    training_here().give_up()


class Host:
    """A program that trains a model on the fake device."""

    def __init__(self, world: bursts.World, *, repeats: bool = False) -> None:
        class Launches(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, rows: Any, before_ns: int, after_ns: int) -> Any:
                context.after_ns = after_ns
                world.kernel(before_ns)
                context.save_for_backward(rows)
                return rows.clone()

            @staticmethod
            def backward(context: Any, *gradients: Any) -> Any:
                world.kernel(context.after_ns)
                return gradients[0], None, None

        class Product(nn.Linear):
            def forward(self, rows: Any) -> Any:
                return Launches.apply(super().forward(rows), FORWARD_NS, BACKWARD_NS)

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.input_layernorm, self.down_proj = nn.LayerNorm(8), Product(8, 8)

            def forward(self, rows: Any) -> Any:
                return self.down_proj(Launches.apply(self.input_layernorm(rows), NORM_NS, NORM_NS))

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(9, 8)
                self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

            def forward(self, input_ids: Any) -> Any:
                rows = self.embedding(input_ids)
                for layer in self.layers:
                    rows = checkpoint(layer, rows, use_reentrant=False) if repeats else layer(rows)
                return rows

        class Optimizer(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                world.kernel(OPTIMIZER_NS)
                return super().step(closure)

        self.world, self.memory = world, Memory()
        self.profiler = GovernedProfiler(3, recorder=self.memory)
        self.profiler.parts.by_kernels = True
        torch.manual_seed(1)
        self.model = Model()
        self.optimizer = Optimizer(self.model.parameters(), lr=0.01)
        attach(self.model, self.profiler)

    def step(self) -> None:
        loss = self.model(torch.ones(2, 4, dtype=torch.long)).square().mean()
        self.world.kernel(LOSS_NS)
        self.world.pass_time(2_000_000)
        loss.backward()
        self.optimizer.step()
        self.world.kernel(LOOP_NS)
        self.optimizer.zero_grad()

    def train_until_recorded(self, windows: int) -> None:
        for _ in range(2_000):
            self.step()
            if len(self.recorded()) >= windows:
                return
        raise AssertionError("2,000 steps were not enough")

    def said(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.memory.said if isinstance(one, kind)]

    def recorded(self) -> list[Counter[str]]:
        """Return the time in ns of each brick in each recorded training step."""
        nodes = {node.id: node for node in self.memory.said if isinstance(node, Node)}
        found: list[Counter[str]] = [Counter()]
        for tag, start_ns, end_ns, _ in self.memory.records:
            node = nodes[tag & 0xFFFF]
            if tag & (FLAG_AMOUNTS | FLAG_PLAIN):
                continue
            if node.kind is NodeKind.BRICK:
                found[-1][node.name] += end_ns - start_ns
            elif node.kind is NodeKind.STEP:
                found.append(Counter())
        return found[:-1]


def test_a_recorded_step_has_the_kernels_of_each_pass_of_a_brick(world: bursts.World) -> None:
    host = Host(world)
    host.train_until_recorded(3)
    for step in host.recorded():
        assert step["DownProjection"] == LAYERS * FORWARD_NS
        assert step["DownProjection backward"] == LAYERS * BACKWARD_NS
        assert step["Layer"] == LAYERS * NORM_NS
        assert step["Layer backward"] == LAYERS * NORM_NS
        assert not step["Other kernels"]
        assert step["Optimizer"] == OPTIMIZER_NS
        assert step["Loss"] == LOSS_NS
        assert step["Loop"] == LOOP_NS


def test_what_a_checkpoint_repeats_has_its_own_kernels(world: bursts.World) -> None:
    host = Host(world, repeats=True)
    host.train_until_recorded(2)
    for step in host.recorded():
        assert step["DownProjection"] == step["DownProjection recompute"] == LAYERS * FORWARD_NS
        assert step["DownProjection backward"] == LAYERS * BACKWARD_NS
        assert step["Layer recompute"] == LAYERS * NORM_NS


def test_the_parts_of_a_step_are_those_of_its_kernels_and_close(world: bursts.World) -> None:
    host = Host(world)
    host.train_until_recorded(20)
    times = host.said(TrainingTimes)[-1]
    mean_ns = {part.name: part.sum_ns / times.steps for part in times.parts}
    assert mean_ns[TrainingPart.FORWARD] == LAYERS * (FORWARD_NS + NORM_NS)
    assert mean_ns[TrainingPart.BACKWARD] == LAYERS * (BACKWARD_NS + NORM_NS)
    assert mean_ns[TrainingPart.OPTIMIZER] == OPTIMIZER_NS
    assert mean_ns[TrainingPart.LOSS] == LOSS_NS
    assert mean_ns[TrainingPart.NO_KERNEL] > 0
    assert sum(part.sum_ns for part in times.parts) == times.wall_ns
    assert BY_KERNELS in host.said(Manifest)[-1].backend


def test_parts_by_kernels_say_how_many_steps_were_recorded(world: bursts.World) -> None:
    host = Host(world)
    host.train_until_recorded(20)
    assert [times.by_kernels for times in host.said(TrainingTimes)][:2] == [1, 4]


def test_the_memory_of_a_step_is_told_with_the_brick_at_its_peak(
    world: bursts.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = Allocator()
    monkeypatch.setattr(step_memory, "counters_here", allocator.counters)
    monkeypatch.setattr(step_memory, "free_here", lambda: allocator.free)
    host = Host(world)
    of_duration = {FORWARD_NS: 300, BACKWARD_NS: -300}
    kernel = world.kernel

    def launch(duration_ns: int) -> None:
        kernel(duration_ns)
        allocator.allocate(of_duration.get(duration_ns, 0))

    monkeypatch.setattr(world, "kernel", launch)
    host.train_until_recorded(20)
    found = host.said(TrainingMemory)[-1]
    memory = {part.name: part.allocated_bytes for part in found.parts}
    assert memory[TrainingPart.FORWARD] == memory[TrainingPart.BACKWARD] == found.torch_peak_bytes == LAYERS * 300
    assert memory[TrainingPart.OPTIMIZER] == 0
    nodes = {node.id: node for node in host.memory.said if isinstance(node, Node)}
    brick = nodes[found.node]
    assert (brick.name, nodes[brick.parent].name) == ("DownProjection", str(LAYERS - 1))
    assert found.limit_bytes == allocator.reserved + allocator.free
    told = host.said(BrickMemories)[-1]
    assert told.is_measured
    kept = {(nodes[nodes[one.node].parent].name, nodes[one.node].name): one.kept_bytes for one in told.bricks}
    for layer in map(str, range(LAYERS)):
        assert kept[layer, "DownProjection"] == 300
    assert sum(kept.values()) == 0  # the backward frees what the forward has allocated
    assert max(one.allocated_bytes for one in told.bricks) == LAYERS * 300


def test_lost_kernels_are_not_shown_as_time_without_a_kernel(
    world: bursts.World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_burst, "MAX_RECORDS", 10)
    host = Host(world)
    with caplog.at_level(logging.WARNING, "cbtop"):
        for _ in range(200):
            host.step()
    (line,) = [record.getMessage() for record in caplog.records if "training steps" in record.getMessage()]
    assert "records were lost" in line
    assert line.endswith("parts of a step are the host's times")
    last = host.said(TrainingTimes)[-1]
    assert TrainingPart.NO_KERNEL not in {part.name for part in last.parts}
    assert not last.by_kernels
    assert not host.recorded()


def test_if_cupti_is_refused_the_parts_are_the_hosts_and_it_is_said(
    world: bursts.World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Held:
        def begin(self, kinds: Any) -> None:
            raise CuptiError("another tool has it")

    host = Host(world)
    monkeypatch.setattr(kernel_bursts, "new_cupti", Held)
    with caplog.at_level(logging.WARNING, "cbtop"):
        for _ in range(200):
            host.step()
    (line,) = [record.getMessage() for record in caplog.records if "training steps" in record.getMessage()]
    assert "another tool has it" in line
    assert not host.recorded()
    assert TrainingPart.NO_KERNEL not in {part.name for part in host.said(TrainingTimes)[-1].parts}
    assert kernel_bursts.one_at_a_time.acquire(blocking=False)
    kernel_bursts.one_at_a_time.release()


def test_a_window_is_dropped_if_an_evaluation_follows(world: bursts.World) -> None:
    host = Host(world)
    host.train_until_recorded(1)
    while not isinstance(world.owner, FakeCupti):
        host.step()
    host.model.eval()
    with torch.no_grad():
        host.model(torch.ones(2, 4, dtype=torch.long))
    assert world.owner is None
    assert training_here().calls is None
    host.model.train()
    before = len(host.recorded())
    host.train_until_recorded(before + 1)


@pytest.fixture
def windows(world: bursts.World, monkeypatch: pytest.MonkeyPatch) -> list[TrainingWindow]:
    """All windows of a test. After the first one, each may have four steps."""
    found: list[TrainingWindow] = []
    original = TrainingWindow.__init__

    def opened(self: TrainingWindow, *args: Any) -> None:
        original(self, *args)
        found.append(self)

    monkeypatch.setattr(TrainingWindow, "__init__", opened)
    monkeypatch.setattr(TrainingWindow, "most_next", lambda *_: 4)
    monkeypatch.setattr(training_windows, "MOST_OPEN_NS", 60_000_000_000)
    return found


def test_a_window_records_several_training_steps_in_a_row(world: bursts.World, windows: list[TrainingWindow]) -> None:
    host = Host(world)
    while len(windows) < 3 or windows[2].window.is_on:
        host.step()
    assert [len(window.steps) for window in windows[:3]] == [1, 4, 4]
    recorded = host.recorded()
    assert len(recorded) == 9
    assert all(step["DownProjection backward"] == LAYERS * BACKWARD_NS for step in recorded)
    assert all(step["Optimizer"] == OPTIMIZER_NS for step in recorded)
    nodes = {node.id for node in host.said(Node) if node.kind is NodeKind.STEP}
    plain = FLAG_AMOUNTS | FLAG_PLAIN
    steps = [one[1:3] for one in host.memory.records if one[0] & 0xFFFF in nodes and not one[0] & plain]
    assert all(before[1] <= after[0] for before, after in pairwise(steps[5:9]))
    assert host.said(Sampling)[-1].overhead_percent is not None


def test_steps_before_an_evaluation_closes_their_window_are_recorded(
    world: bursts.World, windows: list[TrainingWindow]
) -> None:
    host = Host(world)
    while not windows or len(windows[-1].steps) != 2 or not windows[-1].window.is_on:
        host.step()
    before = len(host.recorded())
    host.model.eval()
    with torch.no_grad():
        host.model(torch.ones(2, 4, dtype=torch.long))
    assert world.owner is None
    assert len(host.recorded()) == before + 2
    host.model.train()
    host.step()
    assert len(host.recorded()) == before + 2


def test_kernels_of_a_failed_step_do_not_count_for_the_next(
    world: bursts.World, windows: list[TrainingWindow]
) -> None:
    host = Host(world)
    while not windows or len(windows[-1].steps) != 2 or not windows[-1].window.is_on:
        host.step()
    window, before = windows[-1], len(host.recorded())
    calls = training_here().calls
    assert calls is not None
    calls.failed(CuptiError("lost"))
    host.step()
    assert not window.window.is_on
    assert len(host.recorded()) == before + 2
    host.train_until_recorded(before + 6)
    assert all(step["DownProjection backward"] == LAYERS * BACKWARD_NS for step in host.recorded())


def test_models_that_train_in_turns_share_windows_and_pauses(
    world: bursts.World, windows: list[TrainingWindow], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(world)
    other = copy.copy(host)
    other.model = copy.deepcopy(host.model)
    other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.01)
    attach(other.model, host.profiler)
    monkeypatch.setattr(kernels, "LEAST_PAUSE_NS", 50_000_000)
    monkeypatch.setattr(kernels, "MOST_PAUSE_NS", 50_000_000)
    before = 0
    while len(windows) < 8 or windows[7].window.is_on:  # by then, plain steps of both models were measured
        before = len(host.recorded()) if len(windows) < 8 else before
        host.step()
        other.step()
    assert len({id(one.model) for one in windows[7].steps}) == 2
    assert len(host.recorded()) == before + 4
    monkeypatch.setattr(kernels, "LEAST_PAUSE_NS", 60_000_000_000)
    monkeypatch.setattr(kernels, "MOST_PAUSE_NS", 60_000_000_000)
    while windows[-1].window.is_on or windows[-1] is windows[7]:
        host.step()
        other.step()
    count = len(windows)
    for _ in range(20):
        host.step()
        other.step()
    assert len(windows) == count


def test_of_two_models_of_a_step_the_announced_one_is_timed_by_kernels(world: bursts.World) -> None:
    host = Host(world)
    # The larger model is announced, and steps are counted for the first one.
    other = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64))
    attach(other, host.profiler)
    first = host.model.forward
    host.model.forward = lambda input_ids: first(input_ids) + other(torch.ones(2, 4, 64)).mean()
    host.train_until_recorded(2)
    manifest = host.said(Manifest)[-1]
    assert manifest.architecture == "Sequential"
    assert BY_KERNELS in manifest.backend


def test_windows_of_dear_steps_have_few_of_them() -> None:
    window = TrainingWindow.__new__(TrainingWindow)
    window.opened_ns, window.begun_ns, window.closing_ns = 0, 0, clock.perf_counter_ns()
    for paid_ms, most in ((10, 8), (140, 4), (400, 1), (2_000, 1)):
        window.steps = [NotImplemented]
        assert window.most_next(1_000, 45e6, paid_ms * 1_000_000, 19, 6e8) == most
        window.steps = [NotImplemented] * 4
        assert window.most_next(4_000, 45e6, paid_ms * 4_000_000, 19, 6e8) == most


def test_weights_are_bit_equal_with_and_without_cbtop(world: bursts.World) -> None:
    host = Host(world)
    for _ in range(60):
        host.step()
    assert host.recorded()
    uninstall()
    bare = Host.__new__(Host)
    Host.__init__(bare, world)
    uninstall()
    for _ in range(60):
        bare.step()
    for weight, other in zip(host.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(weight, other)


def test_an_error_in_a_hook_reaches_no_backward(world: bursts.World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: object, keys: object) -> None:
        raise CuptiError("lost")

    host = Host(world)
    host.train_until_recorded(1)
    monkeypatch.setattr(KernelWindow, "move", fails)
    for _ in range(60):
        host.step()
    assert all(weight.isfinite().all() for weight in host.model.parameters())


def test_kernels_that_overlap_count_once() -> None:
    results = KernelBurstResults()
    results.covered_ns = Counter()
    results.cover([(10, 30, ("a",)), (0, 20, ("b",)), (12, 18, ("c",)), (40, 45, ())])
    assert results.covered_ns == {("b",): 20, ("a",): 10, ("c",): 0, (): 5}


def test_a_host_ahead_of_its_device_gets_the_devices_times(world: bursts.World) -> None:
    Event.behind_ns = 50_000_000
    events, found = StepEvents(), []
    begun_ns = world.now_ns()
    for number in range(100):
        world.pass_time(10_000_000)
        # The host needed 1 µs to launch this step. The device needed 10 ms.
        step = EndedStep("train", 1, 1, begun_ns, begun_ns + 1_000, NO_TIMES, [])
        found += events.ended(f"step {number}", step, follows=number > 0)
    assert 80 < len(found) < 100
    assert [step.wall_ns for _, step in found[1:]] == pytest.approx([10_000_000] * (len(found) - 1), rel=1e-4)
    for (_, before), (_, after) in pairwise(found):
        assert before.ended_ns == after.begun_ns


def test_no_more_than_some_steps_wait_for_their_device(world: bursts.World) -> None:
    Event.behind_ns = 1 << 60
    events = StepEvents()
    step = EndedStep("train", 1, 1, 5, 9, NO_TIMES, [])
    found = [one for number in range(200) for one in events.ended(str(number), step, follows=True)]
    assert len(found) == 200 - kernels.MOST_RUNNING
    assert {step.wall_ns for _, step in found} == {4}


def test_idle_time_of_waits_is_measured_by_events(world: bursts.World) -> None:
    idle = IdleTimes()
    idle.begin_step()
    world.pass_time(1_000)
    idle.changed(TrainingPart.DATA_WAIT)
    world.pass_time(70_000)
    idle.changed(TrainingPart.FORWARD)
    world.pass_time(500_000)
    idle.changed(TrainingPart.OTHER)
    world.pass_time(2_000)
    found = idle.end_step()
    assert found == {
        TrainingPart.DATA_WAIT: pytest.approx(70_000, rel=0.1),
        TrainingPart.OTHER: pytest.approx(3_000, rel=0.3),
    }


def test_an_evaluation_between_steps_is_not_other_work_of_the_loop(world: bursts.World) -> None:
    host = Host(world)
    for _ in range(400):
        host.step()
        host.step()
        host.model.eval()
        with torch.no_grad():
            host.model(torch.ones(2, 4, dtype=torch.long))
        world.pass_time(900_000_000)
        host.model.train()
        if len(host.recorded()) >= 20:
            break
    parts = {part.name: part for part in host.said(TrainingTimes)[-1].parts}
    assert parts[TrainingPart.NO_KERNEL].p50_ns > 10 * parts[TrainingPart.OTHER].p50_ns
    assert parts[TrainingPart.NO_KERNEL].sum_ns > 10 * parts[TrainingPart.OTHER].sum_ns


def test_a_capture_inside_a_step_stops_its_measurement(world: bursts.World, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = IdleTimes()
    idle.begin_step()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    idle.changed(TrainingPart.DATA_WAIT)
    assert idle.end_step() is None


@pytest.mark.gpu
def test_training_on_a_gpu_is_bit_equal_and_its_parts_close() -> None:
    """The training runs in its own process, because torch.profiler in an earlier test keeps CUPTI for good."""
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        processes.submit(_train_on_a_gpu).result()


def _train_on_a_gpu() -> None:
    torch.use_deterministic_algorithms(mode=True)
    try:
        bare, _ = _trained_on_a_gpu(is_attached=False)
        watched, memory = _trained_on_a_gpu(is_attached=True)
    finally:
        torch.use_deterministic_algorithms(mode=False)
        uninstall()
        training_here().give_up()
    for weight, other in zip(bare, watched, strict=True):
        assert torch.equal(weight, other)
    times = [one for one in memory.said if isinstance(one, TrainingTimes)][-1]
    parts = {part.name: part.sum_ns for part in times.parts}
    assert sum(parts.values()) == times.wall_ns
    assert parts[TrainingPart.BACKWARD] > parts[TrainingPart.FORWARD] > 0
    names = {node.name for node in memory.said if isinstance(node, Node)}
    assert {"UpProjection backward", "LayerNorm backward", "Optimizer"} <= names


def _trained_on_a_gpu(*, is_attached: bool) -> tuple[list[Any], Memory]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, rows: Any) -> Any:
            return rows + self.down(self.up(self.norm(rows)).relu())

    torch.manual_seed(4)
    memory = Memory()
    model = nn.Sequential(*[Block() for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    if is_attached:
        profiler = GovernedProfiler(100, recorder=memory)
        profiler.parts.by_kernels = True
        attach(model, profiler)
    for number in range(200):
        rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(number)).cuda()
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return [weight.detach().clone() for weight in model.parameters()], memory
