"""Tests of captured CUDA graphs with a fake CUDA in torch: which replays get time stamps, and their records."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests.representatives import first_by_default

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.device import pairs  # noqa: E402
from cbtop.profiler.device.cuda_calls import DriverError  # noqa: E402
from cbtop.profiler.device.device import CudaDevice  # noqa: E402
from cbtop.profiler.instrument import (  # noqa: E402
    attach,
    captured_graph,
    captured_graphs,
    device_graphs,
    functions,
    kernel_bursts,
    trouble,
    uninstall,
)
from cbtop.profiler.instrument.governor import GovernedProfiler, Sort  # noqa: E402
from cbtop.profiler.profiler import BrickProfiler  # noqa: E402
from cbtop.protocol.messages import Manifest, Node  # noqa: E402
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_PLAIN, LANE_SHIFT, NO_NODE  # noqa: E402
from cbtop.protocol.vocabulary import NodeKind  # noqa: E402
from tests.profiler.device.fake_driver import FakeDriver  # noqa: E402
from tests.profiler.memory import Memory  # noqa: E402

STREAM = 7
# times of one layer in ns: a norm, a product, and work outside bricks
NORM_NS, PRODUCT_NS, REST_NS = 3_000, 20_000, 2_000


class World(FakeDriver):
    """A fake device, with the CUDA graph that is captured on it."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: int | None = None  # the graph being captured
        self.last: list[int] = []
        self.drawn = 0
        self.draws = 0  # number of random numbers that each replay draws
        self.replayed = 0  # how often the program's own graph was replayed, without time stamps
        self.forks = False

    def kernel(self, duration_ns: int) -> None:
        """Enqueue a kernel of the program, or add it to the graph that is being captured."""
        if self.captured is not None:
            self.last = [self.add(self.captured, self.last, duration_ns)]

    def captured_last(self, stream: int) -> list[int] | None:
        return None if self.captured is None else list(self.last)

    def captured_graph(self, stream: int) -> int | None:
        return self.captured

    def is_capturing(self, stream: int) -> bool:
        return self.captured is not None

    def get_offset(self) -> int:
        return self.drawn


def graph_class(world: World) -> Any:
    class CUDAGraph:
        def __new__(cls, keep_graph: bool = False) -> CUDAGraph:
            return super().__new__(cls)

        def __init__(self, keep_graph: bool = False) -> None:
            self.keeps = keep_graph
            self.executable = 0
            self.graph = 0

        def capture_begin(self) -> None:
            self.graph = world.captured = world.new_graph()
            world.last = []

        def capture_end(self) -> None:
            world.captured = None
            if not self.keeps:
                self.instantiate()
                world.destroy_graph(self.graph)
                self.graph = 0

        def instantiate(self) -> None:
            self.executable = world.instantiate(self.graph)

        def replay(self) -> None:
            assert self.executable
            world.launch_graph(self.executable, STREAM)
            world.drawn += world.draws
            world.replayed += 1

        def reset(self) -> None:
            if self.executable:
                world.destroy_executable(self.executable)
            if self.graph:
                world.destroy_graph(self.graph)
            self.executable = self.graph = 0

        def register_generator_state(self) -> None:
            pass

    return CUDAGraph


@pytest.fixture
def world(stamping: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    play(world, monkeypatch)
    yield world
    world.pass_time(10_000_000)
    uninstall()


def play(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's CUDA by the fake device `world`."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph_class(world))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", [world])
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: world.captured is not None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(device_graphs, "CudaDriver", lambda: world)
    monkeypatch.setattr(device_graphs, "CudaDevice", lambda driver: CudaDevice(driver, driver.now_ns))
    monkeypatch.setattr(captured_graphs, "device_of", lambda *modules: "cuda")
    monkeypatch.setattr(trouble, "_said", {})


def model_of(world: World, layers: int = 4) -> Any:
    class RMSNorm(torch.nn.Module):
        def forward(self, rows: Any) -> Any:
            world.kernel(NORM_NS)
            return rows

    class Product(torch.nn.Linear):
        def forward(self, rows: Any) -> Any:
            world.kernel(PRODUCT_NS)
            return rows

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_layernorm = RMSNorm()
            self.down_proj = Product(8, 8)

        def forward(self, rows: Any) -> Any:
            rows = self.down_proj(self.input_layernorm(rows))
            world.kernel(REST_NS)
            if world.forks:
                before = world.last
                world.kernel(PRODUCT_NS)
                world.last = [*world.last, world.add(world.captured or 0, before)]
            return rows

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))

        def forward(self, input_ids: Any) -> Any:
            rows = input_ids
            for layer in self.layers:
                rows = layer(rows)
            world.kernel(REST_NS)
            return rows

    return Model()


def attached_in(world: World, *, every: int = 2, layers: int = 4) -> tuple[Memory, BrickProfiler, Any]:
    """Attach a profiler to a new model. Returns the records in memory, the profiler and the model."""
    memory = Memory()
    profiler, model = profiler_of(world, memory, every=every), model_of(world, layers=layers)
    attach(model, profiler)
    return memory, profiler, model


def captured(model: Any, batch: int = 2) -> Any:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    model(torch.ones(batch, 1, dtype=torch.long))
    graph.capture_end()
    return graph


def replay(world: World, graph: Any, times: int) -> None:
    for _ in range(times):
        graph.replay()
        world.pass_time(1_000_000)


def profiler_of(world: World, memory: Memory, every: int = 2) -> BrickProfiler:
    return BrickProfiler(recorder=memory, sample_every=every, clock_ns=world.now_ns)


def plain_steps_in(memory: Memory) -> list[tuple[int, int]]:
    """Return (duration, tokens) of each step that was only timed as a whole."""
    return [(end - start, tokens) for tag, start, end, tokens in memory.records if tag & ~0xFFFFFF == FLAG_PLAIN]


def steps_in(memory: Memory) -> list[Any]:
    """Return for each step: its name, its tokens, its duration, and the durations of the nodes inside it by name."""
    nodes = {said.id: said for said in memory.said if isinstance(said, Node)}
    found: list[Any] = []
    lanes: dict[int, Any] = {}
    for tag, start, end, elements in memory.records:
        node = nodes.get(tag & 0xFFFFFF)
        if node is None or tag & FLAG_AMOUNTS:
            continue
        inside = lanes.setdefault(tag >> LANE_SHIFT, defaultdict(list))
        if node.kind is NodeKind.STEP:
            found.append((node.name, elements, end - start, dict(lanes.pop(tag >> LANE_SHIFT))))
        else:
            inside["layer" if node.kind is NodeKind.LAYER else node.name].append(end - start)
    return found


def test_replays_are_steps_whose_bricks_and_named_gaps_add_up(world: World) -> None:
    memory, profiler, model = attached_in(world)
    graph = captured(model)
    assert not memory.records
    replay(world, graph, 9)
    profiler.finalize()
    found = steps_in(memory)
    assert len(found) == 4
    layer_ns = NORM_NS + PRODUCT_NS + REST_NS
    for name, tokens, duration_ns, inside in found:
        assert (name, tokens) == ("decode", 2)
        assert duration_ns == pytest.approx(4 * layer_ns + REST_NS, abs=20)
        assert inside["layer"] == pytest.approx([layer_ns] * 4, abs=3)
        assert inside["RmsNorm"] == pytest.approx([NORM_NS] * 4, abs=3)
        assert inside["DownProjection"] == pytest.approx([PRODUCT_NS] * 4, abs=3)
        assert inside["Layer"] == pytest.approx([REST_NS] * 4, abs=3)
        assert inside["Model"] == pytest.approx([REST_NS], abs=3)


def test_bricks_of_a_graph_are_the_devices_and_have_rates(world: World) -> None:
    memory, profiler, model = attached_in(world)
    replay(world, captured(model), 9)
    profiler.finalize()
    bricks = {said.name: said for said in memory.said if isinstance(said, Node) and said.kind is NodeKind.BRICK}
    assert {brick.backend for brick in bricks.values()} == {"torch on cuda"}
    assert bricks["DownProjection"].work.flops_per_element == 16
    said = [said for said in memory.said if isinstance(said, Manifest)][-1]
    assert "less 1.00 +- 0.00 us a stamp" in said.backend


def test_the_steps_stand_where_the_host_saw_them(world: World) -> None:
    memory, profiler, model = attached_in(world, every=1)
    graph = captured(model)
    replay(world, graph, 3)
    memory.records.clear()
    begun_ns = world.host_ns
    replay(world, graph, 1)
    profiler.finalize()
    _, start, end, _ = [record for record in memory.records if not record[0] & FLAG_AMOUNTS][-1]
    assert begun_ns - 5_000 <= start < end <= world.host_ns + 5_000


def test_if_every_step_is_recorded_each_one_has_the_bricks_of_all_layers(world: World) -> None:
    memory, profiler, model = attached_in(world, every=1, layers=8)
    replay(world, captured(model), 12)  # Of the first six replays, three measure how much time the stamps cost.
    profiler.finalize()
    found = steps_in(memory)
    assert len(found) == 8
    assert len(plain_steps_in(memory)) == 3
    for *_, inside in found:
        assert len(inside["layer"]) == 8
        assert len(inside["RmsNorm"]) == 8


def test_a_replay_in_an_open_step_is_a_part_of_that_step(world: World) -> None:
    memory, profiler, model = attached_in(world)
    graph = captured(model)
    replay(world, graph, 1)
    for _ in range(4):
        with profiler.step("mine", tokens=5):
            with profiler.brick("host work"):
                world.pass_time(10_000)
            graph.replay()
        assert not [name for name, *_ in steps_in(memory)[2:] if name == "decode"]
        world.pass_time(1_000_000)
    profiler.finalize()
    found = steps_in(memory)
    assert [(name, tokens) for name, tokens, *_ in found] == [("mine", 5)] * 2
    for _, _, duration_ns, inside in found:
        assert len(inside["RmsNorm"]) == 4
        assert inside["host work"]
        assert duration_ns > sum(inside["layer"])


def test_every_replay_is_a_step_and_unrecorded_ones_are_timed_as_a_whole(world: World) -> None:
    memory, profiler, model = attached_in(world)
    replay(world, captured(model), 21)
    profiler.finalize()
    plain = plain_steps_in(memory)
    assert len(steps_in(memory)) == len(plain) == 10
    assert {tokens for _, tokens in plain} == {2}
    for (_, _, duration_ns, _), (plain_ns, _) in zip(steps_in(memory), plain, strict=True):
        # A plain step has one time stamp before it and one after it. The two time stamps cost about 2 µs.
        assert plain_ns == pytest.approx(duration_ns, abs=2_100)


def test_a_host_that_is_ahead_of_its_device_runs_its_own_and_all_are_counted(world: World) -> None:
    memory, profiler, model = attached_in(world, every=1)
    graph = captured(model)
    replay(world, graph, 1)
    for _ in range(20):
        graph.replay()
    # Five replays have time stamps: four have them inside, and one has them only before and after. All other replays
    # run the program's own graph.
    assert world.replayed == 1 + 15
    world.pass_time(10_000_000)
    replay(world, graph, 2)
    profiler.finalize()
    assert len(steps_in(memory)) >= 2
    assert len(steps_in(memory)) + len(plain_steps_in(memory)) == 22
    assert not [record for record in memory.records if record[0] & 0xFFFFFF == NO_NODE]


def test_beyond_what_is_kept_of_a_device_that_is_behind_the_host_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "PAIRS", 8)
    memory, profiler, model = attached_in(world)
    graph = captured(model)
    replay(world, graph, 1)
    for _ in range(50):
        graph.replay()
    world.pass_time(50_000_000)
    replay(world, graph, 2)
    profiler.finalize()
    lost = [record for record in memory.records if record[0] & 0xFFFFFF == NO_NODE]
    assert len(lost) > 40
    assert len(steps_in(memory)) + len(plain_steps_in(memory)) + len(lost) == 52
    uninstall()
    assert not world.graphs


def test_graphs_that_draw_random_numbers_are_left_alone_with_one_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    memory, profiler, model = attached_in(world, every=1)
    world.draws = 4
    with caplog.at_level(logging.WARNING, "cbtop"):
        for graph in (captured(model), captured(model)):
            replay(world, graph, 5)
    profiler.finalize()
    assert world.replayed == 10
    assert not memory.records
    assert [record.message for record in caplog.records] == [
        "cbtop: a captured graph is not looked into: it draws random numbers"
    ]


def test_only_bricks_that_begin_or_end_among_parallel_kernels_are_left_out(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    memory, profiler, model = attached_in(world)
    world.forks = True
    with caplog.at_level(logging.WARNING, "cbtop"):
        replay(world, captured(model), 3)
    profiler.finalize()
    assert "side by side" in caplog.text
    *_, inside = steps_in(memory)[0]
    assert inside["RmsNorm"] == pytest.approx([NORM_NS], abs=3)
    assert inside["DownProjection"] == pytest.approx([PRODUCT_NS] * 4, abs=3)
    assert "layer" not in inside


def test_what_cannot_be_instantiated_is_said_and_the_hosts_replay_runs(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    memory, _profiler, model = attached_in(world, every=1)
    graph = captured(model)
    world.most_nodes = 15
    with caplog.at_level(logging.WARNING, "cbtop"):
        replay(world, graph, 6)
    assert world.replayed == 6
    assert len(caplog.records) == 1
    assert "OUT_OF_MEMORY" in caplog.text
    assert not memory.records


def test_graphs_captured_again_reset_or_dropped_leave_nothing(world: World) -> None:
    memory = Memory()
    profiler = profiler_of(world, memory, every=1)
    model = model_of(world)
    attachment = attach(model, profiler)
    kind = torch.cuda.CUDAGraph
    assert kind.replay.__module__ == captured_graphs.__name__

    def executables() -> int:
        replay(world, kept, 2)
        return len(world.executables)

    kept = captured(model)
    replay(world, kept, 6)
    before = executables()
    for _ in range(10):
        graph = captured(model)
        replay(world, graph, 6)
        graph.reset()
        graph.capture_begin()
        model(torch.ones(2, 1, dtype=torch.long))
        graph.capture_end()
        replay(world, graph, 6)
        world.destroy_executable(graph.executable)  # torch destroys the executable when a graph is dropped.
        del graph
        gc.collect()
    assert executables() == before
    assert len(device_graphs.devices[0].device._spare) < 10
    attachment.detach()
    assert kind.replay.__module__ == __name__
    assert len(world.executables) == 1
    assert not device_graphs.devices
    replayed = world.replayed
    kept.replay()
    assert world.replayed == replayed + 1


def test_a_graph_that_is_dropped_takes_its_copies_along_at_once(world: World) -> None:
    """NCCL waits at its end until no graph contains its kernels any longer.

    If our copy of a graph remained, the program would wait for ever.
    """
    model = model_of(world)
    attach(model, profiler_of(world, Memory(), every=1))
    graph = captured(model)
    replay(world, graph, 6)
    assert len(world.executables) > 1
    assert world.graphs
    world.destroy_executable(graph.executable)  # torch destroys the executable when a graph is dropped.
    del graph
    gc.collect()
    assert not world.executables
    assert not world.graphs


def test_graphs_dropped_while_running_are_freed_before_a_process_group_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: left.append(len(world.graphs)))
    model = model_of(world)
    attachment = attach(model, profiler_of(world, Memory(), every=1))
    graph = captured(model)
    replay(world, graph, 6)
    graph.replay()
    world.destroy_executable(graph.executable)
    del graph
    gc.collect()
    assert world.graphs
    monkeypatch.setattr(device_graphs.time, "sleep", lambda _: world.pass_time(1_000_000))
    torch.distributed.destroy_process_group()
    assert left == [0]
    attachment.detach()
    assert torch.distributed.destroy_process_group.__name__ == "<lambda>"


def test_copies_of_graphs_the_host_still_has_are_freed_at_interpreter_exit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: set[Any] = set()
    monkeypatch.setattr(captured_graphs.atexit, "register", at_exit.add)
    monkeypatch.setattr(captured_graphs.atexit, "unregister", at_exit.discard)
    monkeypatch.setattr(device_graphs.time, "sleep", lambda _: world.pass_time(1_000_000))
    memory = Memory()
    attachment = attach(model := model_of(world), profiler_of(world, memory, every=1))
    graph = captured(model)
    replay(world, graph, 5)
    graph.replay()  # The device has not finished this replay.
    (ends,) = at_exit
    ends()
    assert list(world.executables) == [graph.executable]
    assert not world.graphs
    # The first replay has no record, because cbtop uses it to count random numbers.
    assert len(steps_in(memory)) + len(plain_steps_in(memory)) == 5
    replayed = world.replayed
    replay(world, graph, 2)
    assert world.replayed == replayed + 2
    attachment.detach()
    assert not at_exit


def test_a_graph_that_its_host_asked_to_keep_is_instantiated_by_its_host(world: World) -> None:
    memory, profiler, model = attached_in(world)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    graph.capture_begin()
    model(torch.ones(2, 1, dtype=torch.long))
    graph.capture_end()
    assert not graph.executable
    graph.instantiate()
    replay(world, graph, 5)
    profiler.finalize()
    assert len(steps_in(memory)) == 2


def test_the_model_is_held_by_no_graph(world: World) -> None:
    import weakref

    profiler = profiler_of(world, Memory())
    model = model_of(world)
    attach(model, profiler)
    graph = captured(model)
    replay(world, graph, 4)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    replay(world, graph, 2)


@pytest.mark.parametrize("eager_by_kernels", [False, True])
def test_the_governor_chooses_the_recorded_replays_and_learns_their_cost(
    world: World, monkeypatch: pytest.MonkeyPatch, eager_by_kernels: bool
) -> None:
    monkeypatch.setattr(captured_graph.clock, "perf_counter_ns", world.now_ns)
    memory = Memory()
    profiler = GovernedProfiler(1.0, recorder=memory)
    if eager_by_kernels:
        profiler.governor.models_by_kernels.add("")
    model = model_of(world)
    attach(model, profiler)
    graph = captured(model)
    replay(world, graph, 200)
    profiler.finalize()
    found = steps_in(memory)
    assert 5 < len(found) < 150
    # For each recorded replay, there is a second replay that is only timed as a whole, by a time stamp before and
    # after it.
    assert 200 - 3 * len(found) <= world.replayed <= 200 - len(found)
    assert profiler.governor.seen


def test_own_work_counts_as_cost_only_if_the_device_is_idle(world: World) -> None:
    profiler = GovernedProfiler(1.0, recorder=Memory())
    model = model_of(world)
    attach(model, profiler)
    graph = captured(model)
    replay(world, graph, 1)

    def own_ns() -> int:
        graph.replay()
        return captured_graphs.graphs[graph].launches[-1].own_ns

    device = device_graphs.devices[0]
    settle = device.settle

    passes_ns = 0

    def slow(**how: bool) -> None:
        settle(**how)
        time.sleep(0.05)
        world.pass_time(passes_ns)

    device.settle = slow  # type: ignore[method-assign]
    assert own_ns() < 50_000_000
    passes_ns = 1_000_000_000  # In this time, the device finishes before the host asks.
    assert own_ns() >= 50_000_000


def test_the_hosts_own_failure_at_a_replay_is_the_hosts_and_happens_once(world: World) -> None:
    _memory, _profiler, model = attached_in(world, every=1)
    graph = captured(model)
    graph.executable = 0  # 0 is an invalid graph, as after a reset of the graph.
    for _ in range(2):
        with pytest.raises(AssertionError):
            graph.replay()
    assert world.replayed == 0


def test_a_launch_that_the_driver_refuses_is_said_and_the_hosts_replay_runs(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = profiler_of(world, Memory(), every=1)
    model = model_of(world)
    attach(model, profiler)
    graph = captured(model)
    replay(world, graph, 2)
    launch, replayed = world.launch_graph, world.replayed

    def refuse(executable: int, stream: int) -> None:
        if executable != graph.executable:
            raise DriverError("CUDA_ERROR_LAUNCH_FAILED")
        launch(executable, stream)

    world.launch_graph = refuse  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "cbtop"):
        replay(world, graph, 3)
    assert world.replayed == replayed + 3
    assert "LAUNCH_FAILED" in caplog.text


def lost_in(memory: Memory) -> int:
    return sum(tag & 0xFFFFFF == NO_NODE for tag, *_ in memory.records)


@first_by_default("is_first", [True, False], ids=["stamps inside", "stamps at the ends"])
def test_a_launch_the_driver_refuses_is_counted_and_leaves_nothing_behind(is_first: bool, world: World) -> None:
    memory = Memory()
    profiler = profiler_of(world, memory, every=1)
    model = model_of(world)
    attachment = attach(model, profiler)
    graph = captured(model)
    replay(world, graph, 1 if is_first else 2)
    launch = world.launch_graph

    def refuse_once(executable: int, stream: int) -> None:
        world.launch_graph = launch  # type: ignore[method-assign]
        raise DriverError("CUDA_ERROR_OUT_OF_MEMORY")

    world.launch_graph = refuse_once  # type: ignore[method-assign]
    replay(world, graph, 2)
    assert world.launch_graph is launch
    profiler.finalize()
    attachment.detach()
    assert len(plain_steps_in(memory)) == 1
    # The replay with time stamps is lost, because it is not yet known how much time they cost.
    assert lost_in(memory) == (not is_first)
    assert world.left == [graph.executable]


def test_where_the_device_is_lost_its_host_is_left_in_peace(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An illegal address on the device: every driver call fails, and the context cannot be used any longer."""

    def fails(*_: Any) -> Any:
        raise DriverError("CUDA_ERROR_ILLEGAL_ADDRESS")

    replay_of_the_bare = torch.cuda.CUDAGraph.replay
    memory = Memory()
    profiler = profiler_of(world, memory, every=1)
    model = model_of(world)
    attachment = attach(model, profiler)
    replay(world, captured(model), 5)
    for name in ("end_stream", "free_words", "unload", "destroy_graph", "destroy_executable", "launch_graph"):
        monkeypatch.setattr(world, name, fails)
    monkeypatch.setattr(world, "launch", fails)
    with caplog.at_level(logging.WARNING, "cbtop"):
        attachment.detach()
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in caplog.text
    assert torch.cuda.CUDAGraph.replay is replay_of_the_bare
    assert not device_graphs.devices


def test_a_step_that_never_ends_does_not_stop_other_replays_being_recorded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_graphs, "WAIT_S", 0)
    memory = Memory()
    profiler = profiler_of(world, memory)
    model = model_of(world)
    attachment = attach(model, profiler)
    graph = captured(model)
    replay(world, graph, 1)
    steps = []

    def never_ends() -> None:
        steps.append(profiler.step("stuck").__enter__())
        replay(world, graph, 1)

    thread = threading.Thread(target=never_ends)
    thread.start()
    thread.join()
    replay(world, graph, 20)
    profiler.finalize()
    assert len(steps_in(memory)) + len(plain_steps_in(memory)) == 20
    attachment.detach()
    assert lost_in(memory) == 1  # The replay inside the step is lost.
    assert world.left == [graph.executable]


def test_a_long_step_keeps_a_bounded_number_of_replays_and_counts_the_rest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_graph, "MOST_WAITING", 8)
    memory, profiler, model = attached_in(world)
    graph = captured(model)
    replay(world, graph, 8)  # enough replays to know how much time a stamp costs
    with profiler.step("generate"):
        replay(world, graph, 50)
        assert len(captured_graphs.graphs[graph].launches) == 8
    profiler.finalize()
    (found,) = [step for step in steps_in(memory) if step[0] == "generate"]
    assert len(found[3]["RmsNorm"]) == 4 * 8
    assert lost_in(memory) == 50 - 8


def test_a_replay_in_a_step_that_could_have_no_stamps_is_counted_as_lost(world: World) -> None:
    memory, profiler, model = attached_in(world)
    graph = captured(model)
    replay(world, graph, 1)
    with profiler.step("generate"):
        # The first time stamps stay in use until the device has finished the replay that contains them.
        for _ in range(5):
            graph.replay()
    world.pass_time(1_000_000)
    profiler.finalize()
    (found,) = steps_in(memory)
    assert len(found[3]["RmsNorm"]) == 4
    assert lost_in(memory) == 4


@first_by_default("in_steps", [False, True])
def test_replays_the_device_has_not_reported_at_detach_are_counted_as_lost(
    in_steps: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_graphs, "WAIT_S", 0)
    memory = Memory()
    profiler = profiler_of(world, memory, every=2)
    model = model_of(world)
    attachment = attach(model, profiler)
    graph = captured(model)
    replay(world, graph, 1)
    world.work(STREAM, 1_000_000_000)
    for _ in range(10):
        with profiler.step("mine") if in_steps else contextlib.nullcontext():
            graph.replay()
    attachment.detach()
    assert lost_in(memory) == (5 if in_steps else 10)
    assert [name for name, *_ in steps_in(memory)] == ["mine"] * (5 * in_steps)
    assert world.graphs  # Graphs that still run are kept until they end.
    world.pass_time(2_000_000_000)


def test_the_books_close_if_replays_of_two_graphs_are_recorded_out_of_order(world: World) -> None:
    """Replays of the second graph are recorded late: only when the time that its stamps cost is known."""
    profiler = BrickProfiler(sample_every=2, clock_ns=world.now_ns)
    model = model_of(world)
    attach(model, profiler)
    often, seldom = captured(model), captured(model)
    for graph, times in ((often, 1), (seldom, 3), (often, 20), (seldom, 10)):
        replay(world, graph, times)
    profiler.finalize()
    ((_, books),) = profiler.report().books
    assert (books.close, books.over) == (True, 0)
    profiler.close()


def test_a_forked_child_ends_nothing_of_a_device_on_which_no_graph_is_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(model := model_of(world), profiler_of(world, Memory()))
    captured(model).reset()
    world.pass_time(10_000_000)
    child = os.fork()
    if child == 0:
        calls: list[int] = []
        monkeypatch.setattr(world, "end_stream", calls.append)
        uninstall()
        os._exit(len(calls))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_capture_that_fails_leaves_later_ones_as_they_are(world: World) -> None:
    memory, profiler, model = attached_in(world, every=1)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    with pytest.raises(TypeError):
        model()
    graph.capture_end()
    replay(world, captured(model), 3)
    profiler.finalize()
    assert len(steps_in(memory)) + len(plain_steps_in(memory)) == 2
    assert not profiler.parts.steps.path.position.step


def test_a_forked_child_asks_nothing_of_the_device_and_ends(world: World) -> None:
    profiler = profiler_of(world, Memory(), every=1)
    model = model_of(world)
    attach(model, profiler)
    graph = captured(model)
    replay(world, graph, 3)
    child = os.fork()
    if child == 0:
        before = (list(world.executables), world.launched)
        profiler.finalize()
        uninstall()
        os._exit(0 if before == (list(world.executables), world.launched) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("is_alone", [True, False])
def test_functions_that_are_wrapped_are_bricks_of_the_graph_too(
    is_alone: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(query: Any, key: Any, value: Any) -> Any:
        world.kernel(7_000)
        return query

    # In torch, this function is a builtin. The fake function is no builtin, so it is replaced here.
    def swap(self: Any) -> None:
        self.swap(
            torch.nn.functional, "scaled_dot_product_attention", lambda own: functions._attention(own, "sdpa", 0)
        )

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(functions.TimedFunctions, "_swap_attention_of_torch", swap)
    another = model_of(world)
    # Another model was recorded before, as a draft model is. Its replaced calls stay after its recorded step.
    if not is_alone:
        attach(another, profiler_of(world, Memory(), every=1))
        another(torch.ones(2, 1, dtype=torch.long))
    memory = Memory()
    profiler = profiler_of(world, memory)
    model = model_of(world)
    norm = type(model.layers[0].input_layernorm)
    before = norm.forward

    def forward(self: Any, rows: Any) -> Any:
        shaped = rows.reshape(1, 1, 2, 1).float()
        torch.nn.functional.scaled_dot_product_attention(shaped, shaped, shaped)
        return before(self, rows)

    norm.forward = forward
    attach(model, profiler)
    graph = captured(model)
    assert not memory.records
    replay(world, graph, 5)
    profiler.finalize()
    found = steps_in(memory)
    assert len(found) == 2
    for *_, inside in found:
        assert inside["Attention (fused)"] == pytest.approx([7_000] * 4, abs=3)
        assert inside["RmsNorm"] == pytest.approx([7_000 + NORM_NS] * 4, abs=3)
    model(torch.ones(2, 1, dtype=torch.long))  # This call is not in a capture, so the call is a step again.
    assert [name for name, *_ in steps_in(memory)] == ["decode", "decode", "forward"]


def test_calls_of_the_model_in_another_thread_during_a_capture_are_ignored(world: World) -> None:
    memory, profiler, model = attached_in(world, every=1)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    kernel, inner = world.kernel, model.layers[2].down_proj.forward

    def called_by_another(rows: Any) -> Any:
        def run() -> None:
            world.kernel = lambda duration_ns: None  # type: ignore[method-assign]
            model.layers[0](rows)
            world.kernel = kernel  # type: ignore[method-assign]

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return inner(rows)

    model.layers[2].down_proj.forward = called_by_another
    model(torch.ones(2, 1, dtype=torch.long))
    graph.capture_end()
    replay(world, graph, 9)
    profiler.finalize()
    for *_, inside in steps_in(memory)[-4:]:
        assert len(inside["layer"]) == 4


def test_a_graph_made_before_attach_is_recorded_if_captured_after_it(world: World) -> None:
    memory = Memory()
    profiler = profiler_of(world, memory)
    model, graph = model_of(world), torch.cuda.CUDAGraph()
    attach(model, profiler)
    graph.capture_begin()
    model(torch.ones(2, 1, dtype=torch.long))
    graph.capture_end()
    replay(world, graph, 5)
    profiler.finalize()
    assert len(steps_in(memory)) == 2
    assert len(world.graphs) == 1  # our copy
    uninstall()
    assert not world.graphs


def test_where_a_capture_fails_no_copy_of_its_graph_is_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError("unjoined work")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", fails)
    model, graph = model_of(world), torch.cuda.CUDAGraph()
    attach(model, profiler_of(world, Memory()))
    graph.capture_begin()
    model(torch.ones(2, 1, dtype=torch.long))
    with pytest.raises(RuntimeError, match="unjoined work"):
        graph.capture_end()
    world.captured = None
    assert list(world.graphs) == [graph.graph]


def test_graphs_too_short_to_time_are_measured_less_then_not_and_reported(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_graph.clock, "perf_counter_ns", world.now_ns)
    monkeypatch.setattr(captured_graph, "ENOUGH_PLAIN", 8)
    memory = Memory()
    profiler = GovernedProfiler(1.0, recorder=memory)
    models = model_of(world), model_of(world, layers=64)
    for model in models:
        attach(model, profiler)
    short, long = (captured(model) for model in models)
    counts = []
    with caplog.at_level(logging.WARNING, "cbtop"):
        for _ in range(2):
            for _ in range(40):
                short.replay()
                world.pass_time(2_000)
            world.pass_time(1_000_000_000)
            profiler.finalize()
            counts.append(len(plain_steps_in(memory)))
            replay(world, long, 40)
    lines = [record.message.removeprefix("cbtop: ").split(":")[0] for record in caplog.records]
    assert lines == [
        "of a captured graph no replays are counted but those that are recorded",
        "a captured graph is not looked into",
    ]
    assert "us, of which timing it would take more than is allowed" in caplog.text
    graphs = [captured_graphs.graphs[graph] for graph in (short, long)]
    assert [graph.is_left_alone for graph in graphs] == [True, False]
    before = len(plain_steps_in(memory))
    replay(world, long, 8)
    profiler.finalize()
    assert len(plain_steps_in(memory)) > before
    world.pass_time(1_000_000_000)  # Let the device finish, so that no test has to wait for it at the end.


def test_steps_are_named_a_sample_if_only_recorded_replays_are_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the name "sample", a viewer would show recorded replays as if they were all replays.

    This applies to their number and to their rate.
    """
    monkeypatch.setattr(captured_graph.clock, "perf_counter_ns", world.now_ns)
    monkeypatch.setattr(captured_graph, "ENOUGH_PLAIN", 8)
    memory = Memory()
    profiler = GovernedProfiler(1.0, recorder=memory)
    model = model_of(world)
    attach(model, profiler)
    graph = captured(model)
    replay(world, graph, 40)
    with monkeypatch.context() as while_too_expensive:
        while_too_expensive.setattr(profiler.governor, "allowed_share", 1e-9)
        replay(world, graph, 12)
    profiler.finalize()
    before = len([name for name, *_ in steps_in(memory) if name == "decode"]), len(plain_steps_in(memory))
    replay(world, graph, 200)
    profiler.finalize()
    names = [name for name, *_ in steps_in(memory)]
    assert (names.count("decode"), len(plain_steps_in(memory))) == before
    assert names.count("decode, a sample") == len(names) - before[0] > 0


def test_recording_is_a_cost_but_work_while_the_host_is_ahead_is_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_graph.clock, "perf_counter_ns", world.now_ns)
    profiler = GovernedProfiler(1.0, recorder=Memory())
    model = model_of(world, layers=64)
    attach(model, profiler)
    graph = captured(model)
    replay(world, graph, 1)
    for _ in range(40):
        # Ten replays are enqueued within microseconds, but the device needs milliseconds for them.
        for _ in range(10):
            graph.replay()
            world.pass_time(30_000)
        world.pass_time(30_000_000)
    profiler.finalize()
    governor = profiler.governor
    (kind,) = governor.kinds.values()
    recorded = kind.estimate(Sort.RECORDED)
    assert recorded is not None
    stamps = len(captured_graphs.graphs[graph].variants[0][1].places)
    assert recorded.middle == pytest.approx(stamps * 1_000, rel=0.05)
    # the cost in ns of the two time stamps around a replay
    assert sorted(governor.own_ns)[len(governor.own_ns) // 2] == 2_000
    assert governor.every >= 100 * recorded.middle / 1_700_000


def test_rarely_recorded_steps_are_recorded_once_the_device_reports_them(world: World) -> None:
    memory, _profiler, model = attached_in(world, every=1_000)
    graph = captured(model)
    for count in range(1, 30):
        replay(world, graph, 1)
        assert len(plain_steps_in(memory)) >= count - 4


def test_replays_that_measure_stamp_cost_in_a_recorded_step_count_as_missing(world: World) -> None:
    memory, profiler, model = attached_in(world, every=1)
    graph = captured(model)
    replay(world, graph, 1)
    for _ in range(10):
        with profiler.step("mine", tokens=1):
            graph.replay()
        world.pass_time(1_000_000)
    profiler.finalize()
    lost = [record for record in memory.records if record[0] & 0xFFFFFF == NO_NODE]
    found = [step for step in steps_in(memory) if step[0] == "mine"]
    assert len(found) == 10
    assert len([step for step in found if "RmsNorm" in step[3]]) + len(lost) == 10
    assert len(lost) == 3


def test_what_runs_on_another_stream_and_is_waited_for_is_timed_too(world: World) -> None:
    memory, profiler, model = attached_in(world)
    product = type(model.layers[0].down_proj)
    forward = product.forward

    def then_reduced(self: Any, rows: Any) -> Any:
        rows = forward(self, rows)
        before = world.last
        # This kernel runs on a separate stream, as NCCL's kernels do. The stream of the caller waits for this kernel.
        world.kernel(REST_NS)
        world.last = [*before, *world.last]
        return rows

    product.forward = then_reduced
    replay(world, captured(model), 9)
    profiler.finalize()
    for *_, inside in steps_in(memory):
        assert inside["RmsNorm"] == pytest.approx([NORM_NS] * 4, abs=3)
        assert inside["DownProjection"] == pytest.approx([PRODUCT_NS + REST_NS] * 4, abs=3)
        assert len(inside["layer"]) == 4
    assert len(steps_in(memory)) == 4


@pytest.mark.parametrize("late_ns", [0, 30_000])
def test_launch_time_is_not_part_of_the_stamp_cost_in_a_graph_of_few_stamps(world: World, late_ns: int) -> None:
    memory, profiler, model = attached_in(world)
    graph = captured(model)
    replay_it = world.launch_graph

    def launch_graph(executable: int, stream: int) -> None:
        if executable == graph.executable:  # The program's own graph is launched after ours.
            world.pass_time(late_ns)
        replay_it(executable, stream)

    world.launch_graph = launch_graph  # type: ignore[method-assign]
    replay(world, graph, 41)
    profiler.finalize()
    cost = captured_graphs.graphs[graph].costs.known
    assert cost is not None
    assert cost.cost_ns == pytest.approx(1_000, abs=1)
    for *_, inside in steps_in(memory):
        assert inside["RmsNorm"] == pytest.approx([NORM_NS] * 4, abs=3)


def test_plain_replays_are_made_if_none_follows_one_with_stamps(world: World) -> None:
    memory, profiler, model = attached_in(world)
    recorded, other = captured(model), captured(model, batch=3)
    replay(world, recorded, 1)
    replay(world, other, 1)
    # Two graphs take turns. In torch, this happens if Dynamo compiles a separate version for steps that are not
    # recorded.
    for at in range(60):
        with profiler.step("mine", tokens=1):
            (other if at % 2 else recorded).replay()
        world.pass_time(1_000_000)
    profiler.finalize()
    found = [inside for name, _, _, inside in steps_in(memory) if "RmsNorm" in inside]
    assert len(found) >= 30 - 3 - captured_graph.FIRST_PLAIN
    for inside in found:
        assert inside["RmsNorm"] == pytest.approx([NORM_NS] * 4, abs=3)


def test_what_has_stamps_of_unknown_cost_in_it_is_lost(world: World) -> None:
    memory, profiler, model = attached_in(world)
    graph = captured(model)
    replay(world, graph, 1)
    with profiler.step("mine", tokens=1):
        graph.replay()
    world.pass_time(1_000_000)
    profiler.finalize()
    ((_, _, _, inside),) = steps_in(memory)
    assert not inside
    assert len([record for record in memory.records if record[0] & 0xFFFFFF == NO_NODE]) == 1


def test_a_graph_on_another_device_is_recorded_and_the_hosts_device_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, profiler, model = attached_in(world)
    graph = captured(model)
    current = [1]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        try:
            with world.within(0xC0DE):
                yield
        finally:
            current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    world.current = 0xD0DE
    replay(world, graph, 9)
    profiler.finalize()
    assert (current, world.current) == ([1], 0xD0DE)
    found = steps_in(memory)
    assert len(found) == 4
    for *_, inside in found:
        assert inside["RmsNorm"] == pytest.approx([NORM_NS] * 4, abs=3)
    uninstall()
    assert world.left == [graph.executable]
    world.current = 0xC0DE


def test_a_request_that_cannot_be_read_is_no_trouble_of_the_hosts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(world)
    attach(model, profiler_of(world, Memory(), every=4))
    graph = captured(model)

    def fails(self: Any) -> bool:
        raise OSError("gone")

    monkeypatch.setattr(kernel_bursts.Bursts, "is_asked", property(fails))
    replay(world, graph, 7)
    assert world.replayed >= 2


def test_a_replay_that_is_captured_itself_leaves_no_stamp_in_that_graph(world: World) -> None:
    _memory, _profiler, model = attached_in(world)
    graph, other = captured(model), torch.cuda.CUDAGraph()
    replay(world, graph, 1)
    other.capture_begin()
    for _ in range(4):
        launched, replayed = world.launched, world.replayed
        graph.replay()
        assert (world.launched, world.replayed) == (launched, replayed + 1)
    other.capture_end()
    assert not captured_graphs.graphs[graph].launches
    assert not device_graphs.devices[0].pairs.waiting


def test_a_thread_whose_first_call_is_a_replay_is_timed_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, profiler, model = attached_in(world)
    graph = captured(model)
    replay(world, graph, 1)

    def makes_current() -> bool:  # torch's own function also makes torch's context the current one.
        world.current = 0xC0DE
        return False

    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", makes_current)
    for _ in range(8):
        world.current = 0
        replay(world, graph, 1)
    profiler.finalize()
    assert len(steps_in(memory)) + len(plain_steps_in(memory)) == 8


def test_a_replay_asks_of_no_stream_whether_it_is_done(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(world, "is_done", asked.append)
    memory, profiler, model = attached_in(world)
    replay(world, captured(model), 20)
    profiler.finalize()
    assert len(steps_in(memory)) + len(plain_steps_in(memory)) == 19
    assert not asked


def test_own_work_before_a_replay_costs_only_if_the_last_replay_has_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_graph.clock, "perf_counter_ns", world.now_ns)
    _memory, _profiler, model = attached_in(world, every=1_000)
    graph = captured(model)
    replay(world, graph, 3)
    known = captured_graphs.graphs[graph]

    def slow() -> int:
        world.host_ns += 500_000  # The device only progresses when the host reads its clock.
        return STREAM

    known.on.current_stream = slow
    for is_idle in (True, False):
        graph.replay()
        assert (known.launches[-1].own_ns >= 500_000) is is_idle
