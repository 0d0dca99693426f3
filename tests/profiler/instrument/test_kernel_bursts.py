"""Tests of kernel recording on request, with a fake CUDA in torch: the request, the kernels, and the answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.representatives import first_by_default

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import (  # noqa: E402
    attach,
    capturing,
    kernel_bursts,
    kernel_makers,
    swapping,
    uninstall,
)
from cbtop.profiler.instrument.call_attribute import standing  # noqa: E402
from cbtop.profiler.instrument.governor import GovernedProfiler  # noqa: E402
from cbtop.profiler.profiler import BrickProfiler  # noqa: E402
from cbtop.profiler.recorder import RingRecorder  # noqa: E402
from cbtop.protocol.catalog import CatalogReader  # noqa: E402
from cbtop.protocol.kernel_messages import KernelBurst  # noqa: E402
from cbtop.protocol.messages import Node  # noqa: E402
from cbtop.protocol.requests import RequestSlot, State  # noqa: E402
from cbtop.protocol.ring import FLAG_CANCELLED  # noqa: E402
from cbtop.protocol.ring_reader import RingReader  # noqa: E402
from tests.profiler.device.fake_cupti import CuptiWorld, FakeCupti  # noqa: E402
from tests.profiler.instrument import test_captured_graphs as played  # noqa: E402

STREAM = played.STREAM


class World(CuptiWorld, played.World):
    """A fake device that captures a graph and records its kernels with a fake CUPTI."""

    def kernel(self, duration_ns: int) -> None:
        if self.captured is None:
            self.eager(duration_ns)
        else:
            super().kernel(duration_ns)

    def is_done(self, stream: int) -> bool:
        self.pass_time(100_000)  # The caller waits for the device, so the device progresses.
        return super().is_done(stream)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    play(world, monkeypatch)
    yield world
    world.pass_time(10_000_000)
    uninstall()


def play(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's CUDA, and cbtop's CUPTI and driver, by the fake device `world`."""
    played.play(world, monkeypatch)
    monkeypatch.setattr(kernel_bursts, "new_cupti", lambda: FakeCupti(world))
    monkeypatch.setattr(kernel_bursts, "new_driver", lambda: world)
    monkeypatch.setattr(kernel_bursts, "is_on_cuda", lambda: True)
    monkeypatch.setattr(kernel_bursts, "_is_left_on", False)


class Host:
    """A program with an attached model and a ring. A requester asks it for kernels."""

    def __init__(self, world: World, directory: Path, every: int = 2, layers: int = 4) -> None:
        self.world = world
        self.recorder = RingRecorder(directory)
        self.profiler = BrickProfiler(recorder=self.recorder, sample_every=every, clock_ns=world.now_ns)
        self.model = played.model_of(world, layers)
        attach(self.model, self.profiler)
        self.recorder.open()
        ring = self.recorder.path
        assert ring is not None
        self.ring = ring
        self.asker = RequestSlot(ring)
        self.reader = CatalogReader(ring.with_suffix(".catalog"))
        self.nodes: dict[int, Node] = {}
        self.bursts: list[KernelBurst] = []

    def call(self) -> None:
        self.model(torch.ones(2, 1, dtype=torch.long))
        self.world.pass_time(10_000_000)

    def state(self) -> State | None:
        answer = self.asker.answer()
        return None if answer is None else answer.state

    def found(self) -> dict[tuple[str, ...], tuple[float, float]]:
        """Return (launches per step, mean time in ns) of the kernels that were recorded last, by their path."""
        for said in self.reader.read():
            if isinstance(said, Node):
                self.nodes[said.id] = said
            if isinstance(said, KernelBurst):
                self.bursts.append(said)
        return {self.path(one.node): (one.launches / one.steps, one.mean_ns) for one in self.bursts[-1].kernels}

    def path(self, node: int | None) -> tuple[str, ...]:
        if node is None:
            return ()
        return (*self.path(self.nodes[node].parent), self.nodes[node].name)

    def records(self) -> int:
        self.profiler.finalize()
        reader = RingReader(self.ring)
        batch = reader.read()
        reader.close()
        return int(((batch.flags & FLAG_CANCELLED) == 0).sum())


@pytest.fixture
def host(world: World, tmp_path: Path) -> Iterator[Host]:
    host = Host(world, tmp_path)
    yield host
    host.asker.close()


def in_layers(step: str) -> dict[tuple[str, ...], tuple[float, float]]:
    found = {(step, "Model", "norm_kernel"): (1.0, played.REST_NS)}
    for layer in range(4):
        at = (step, str(layer))
        found[*at, "RmsNorm", "norm_kernel"] = (1.0, played.NORM_NS)
        found[*at, "DownProjection", "gemm_kernel"] = (1.0, played.PRODUCT_NS)
        found[*at, "Layer", "norm_kernel"] = (1.0, played.REST_NS)
    return found


def test_the_kernels_of_replays_lie_under_their_bricks(world: World, host: Host) -> None:
    graph = played.captured(host.model)
    played.replay(world, graph, 3)
    asked = host.asker.ask(3)
    assert host.state() is None
    played.replay(world, graph, 1)
    assert host.asker.answer() == (asked.number, State.RUNNING, 1)
    played.replay(world, graph, 2)
    assert host.asker.answer() == (asked.number, State.DONE, 3)
    assert host.found() == in_layers("decode")
    burst = host.bursts[-1]
    assert (burst.number, burst.steps, burst.unplaced, burst.lost, burst.left_out) == (asked.number, 3, 0, 0, 0)
    kernel = next(node for node in host.nodes.values() if node.name == "gemm_kernel").kernel
    assert (kernel.grid, kernel.block, kernel.registers) == ((8, 1, 1), (128, 1, 1), 32)
    assert (kernel.shared_memory_bytes, kernel.static_shared_memory_bytes) == (1024, 16)
    assert kernel.local_memory_bytes == 0


def test_the_kernels_of_calls_lie_under_their_bricks(world: World, host: Host) -> None:
    host.call()
    host.asker.ask(2)
    host.call()
    host.call()
    assert host.state() is State.DONE
    step = next(iter(host.found()))[0]
    assert host.found() == in_layers(step)
    assert host.bursts[-1].unplaced == 0


def test_a_burst_has_the_makers_of_kernels_and_the_size_of_the_device(
    world: World, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, text in (("ttir", '#loc = loc("/a/norms.py":41:1)'), ("json", '{"num_warps": 4, "shared": 1024}')):
        (tmp_path / f"norm.{kind}").write_text(text)
    files = {path.name: str(path) for path in tmp_path.glob("norm.*")}
    kernel_makers._loaded(None, None, "norm_kernel", files, "hash")
    monkeypatch.setattr(kernel_bursts, "device_here", lambda: (132, "sm_90"))
    host.asker.ask(1)
    host.call()
    host.found()
    burst = host.bursts[-1]
    assert (burst.multiprocessors, burst.architecture) == (132, "sm_90")
    assert {(host.nodes[one.node].name, one.maker, one.source) for one in burst.kernels} == {
        ("gemm_kernel", "", ""),
        ("norm_kernel", "Triton, 4 warps", "/a/norms.py:41"),
    }


def test_the_steps_of_a_burst_are_in_no_statistics(world: World, host: Host) -> None:
    graph = played.captured(host.model)
    played.replay(world, graph, 4)
    host.call()
    before = host.records()
    host.asker.ask(4)
    played.replay(world, graph, 2)
    host.call()
    host.call()
    assert host.state() is State.DONE
    assert host.records() == before
    played.replay(world, graph, 4)
    assert host.records() > before


def test_no_executable_of_the_hosts_runs_while_kernels_are_recorded(world: World, host: Host) -> None:
    graph = played.captured(host.model)
    played.replay(world, graph, 3)
    host.asker.ask(3)
    before = world.replayed
    played.replay(world, graph, 3)
    assert world.replayed == before
    assert len(world.launched_while_recorded) == 3
    assert graph.executable not in world.launched_while_recorded


def test_a_graph_that_draws_random_numbers_is_replayed_by_the_host(world: World, host: Host) -> None:
    class Mixed(type(host.model)):  # type: ignore[misc]
        def forward(self, words: Any) -> Any:
            rows = super().forward(words)
            self.graph.replay()
            return rows

    world.draws = 4
    graph = played.captured(played.model_of(world))
    host.model.__class__ = Mixed
    host.model.graph = graph
    played.replay(world, graph, 2)
    host.asker.ask(1)
    before = world.replayed
    host.call()
    assert world.replayed == before + 1
    assert graph.executable not in world.launched_while_recorded
    assert host.state() is State.DONE
    assert world.owner is None


def test_a_replay_in_a_call_runs_as_an_executable_of_ours(world: World, host: Host) -> None:
    graph = played.captured(host.model)
    played.replay(world, graph, 2)
    other = Host.__new__(Host)
    other.model = played.model_of(world)

    class Outer(type(other.model)):  # type: ignore[misc]
        def forward(self, words: Any) -> Any:
            self.graph.replay()
            return super().forward(words)

    other.model.__class__ = Outer
    other.model.graph = graph
    attach(other.model, host.profiler)
    host.asker.ask(1)
    other.model(torch.ones(2, 1, dtype=torch.long))
    world.pass_time(10_000_000)
    assert host.state() is State.DONE
    launches = sum(one.launches for one in host.bursts[-1].kernels) if host.found() else 0
    assert launches == 2 * (4 * 3 + 1)
    assert graph.executable not in world.launched_while_recorded


def test_modules_and_what_times_them_are_afterwards_as_they_were(world: World, host: Host) -> None:
    def there() -> list[object]:
        return [standing(module) for module in host.model.modules()]

    host.call()
    host.call()
    before, swapped_in = there(), dict(swapping.swapped_in)
    host.asker.ask(1)
    host.call()
    assert host.state() is State.DONE
    assert there() == before
    assert not capturing.captures
    assert swapping.swapped_in == swapped_in
    assert kernel_bursts.recording_here() is None
    assert not kernel_bursts.one_at_a_time.locked()


def test_a_call_that_fails_ends_its_step_of_the_burst(world: World, host: Host) -> None:
    class Fails(type(host.model)):  # type: ignore[misc]
        def forward(self, words: Any) -> Any:
            super().forward(words)
            raise ValueError("mine")

    host.call()
    was, host.model.__class__ = type(host.model), Fails
    host.asker.ask(1)
    with pytest.raises(ValueError, match="mine"):
        host.call()
    assert host.state() is State.DONE
    assert world.owner is None
    assert not kernel_bursts.one_at_a_time.locked()
    host.model.__class__ = was
    host.call()


def test_a_profiler_that_is_disabled_begins_no_burst(world: World, host: Host) -> None:
    graph = played.captured(host.model)
    played.replay(world, graph, 2)
    host.profiler.disable()
    host.asker.ask(1)
    played.replay(world, graph, 1)
    host.call()
    assert (host.state(), world.finalized) == (None, 0)


def test_who_is_attached_says_that_it_looks_at_requests(host: Host) -> None:
    assert host.asker.listens


def test_who_does_not_ask_costs_a_look_at_one_word(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bursts.Bursts, "_look", lambda self, word: pytest.fail("nobody asked"))
    host.call()
    graph = played.captured(host.model)
    played.replay(host.world, graph, 3)


def test_a_request_that_makes_no_sense_is_refused(world: World, host: Host) -> None:
    host.asker.ask(3)
    request = host.asker.request
    assert request is not None
    host.asker._write(request.word() & ~0xFF | 2)
    host.call()
    assert host.state() is State.NOT_UNDERSTOOD
    assert world.finalized == 0


@pytest.mark.parametrize("replays", [True, False])
def test_another_owner_of_cupti_is_left_alone(world: World, host: Host, replays: bool) -> None:
    graph = played.captured(host.model)
    played.replay(world, graph, 2)
    world.owner = "torch.profiler"
    host.asker.ask(3)
    before = world.launched_graphs
    if replays:
        played.replay(world, graph, 1)
    else:
        host.call()
    assert host.state() is State.TAKEN
    assert world.owner == "torch.profiler"
    assert world.launched_graphs == before + replays or not replays
    assert world.finalized == world.let_go == 0


@pytest.mark.parametrize("what", ["begin", "push", "node_number", "end", "finalize"])
@first_by_default("replays", [True, False])
def test_whatever_fails_ends_the_burst_in_one_line_and_the_host_goes_on(
    world: World, host: Host, what: str, replays: bool, caplog: pytest.LogCaptureFixture
) -> None:
    graph = played.captured(host.model)
    played.replay(world, graph, 2)
    world.fails_at = what
    host.asker.ask(1)
    before = world.launched_graphs
    if replays:
        played.replay(world, graph, 1)
        assert world.launched_graphs == before + 1
    else:
        host.call()
    is_used = {"push": not replays, "node_number": replays}.get(what, True)
    assert host.state() is (State.FAILED if is_used else State.DONE)
    assert world.owner is None
    lines = [record for record in caplog.records if "kernels are not recorded" in record.getMessage()]
    assert len(lines) == is_used
    world.fails_at = ""
    before = host.records()
    played.replay(world, graph, 2)
    host.call()
    assert host.records() > before


def test_a_model_that_lies_on_no_cuda_device_refuses(
    host: Host, monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    monkeypatch.setattr(kernel_bursts, "is_on_cuda", lambda: False)
    host.asker.ask(3)
    host.call()
    assert host.state() is State.NOT_ON_CUDA
    assert world.finalized == 0


def test_a_request_that_is_taken_back_is_not_begun(world: World, host: Host) -> None:
    host.asker.ask(3)
    host.asker.close()
    host.call()
    assert world.finalized == 0
    host.asker = RequestSlot(host.ring)


def test_a_burst_that_is_taken_back_half_way_ends(world: World, host: Host) -> None:
    host.asker.ask(3)
    host.call()
    host.asker.close()
    host.asker = RequestSlot(host.ring)
    host.call()
    assert world.finalized == 1
    host.asker.ask(1)
    host.call()
    assert host.state() is State.DONE
    host.found()
    assert host.bursts[-1].steps == 1


def test_a_later_burst_replaces_the_one_before(world: World, host: Host) -> None:
    graph = played.captured(host.model)
    played.replay(world, graph, 2)
    for _ in range(2):
        asked = host.asker.ask(2)
        played.replay(world, graph, 2)
        found = host.found()
        assert host.bursts[-1].number == asked.number
        assert found == in_layers("decode")
    assert len(host.bursts) == 2
    assert len([node for node in host.nodes.values() if node.name == "gemm_kernel"]) == 4


def test_where_cupti_stays_there_is_no_other_burst(world: World, host: Host) -> None:
    graph = world.new_graph()
    world.add(graph)
    theirs = world.instantiate(graph)

    class Mixed(type(host.model)):  # type: ignore[misc]
        def forward(self, words: Any) -> Any:
            world.launch_graph(theirs, STREAM)  # The program launches this graph itself, not through torch.
            return super().forward(words)

    host.model.__class__ = Mixed
    host.asker.ask(1)
    host.call()
    assert host.state() is State.DONE
    assert (world.let_go, world.finalized) == (1, 0)
    host.asker.ask(1)
    host.call()
    assert host.state() is State.LEFT_ON
    assert (world.let_go, world.finalized) == (1, 0)


def test_another_threads_step_is_none_of_the_burst(world: World, host: Host) -> None:
    seen = []

    class Waits(type(host.model)):  # type: ignore[misc]
        def forward(self, words: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                thread = threading.Thread(target=host.call)
                thread.start()
                thread.join()
                seen.append(world.finalized)
            return super().forward(words)

    host.model.__class__ = Waits
    host.call()
    seen.clear()
    host.asker.ask(1)
    host.call()
    assert seen == [0]
    assert host.state() is State.DONE
    assert host.found() == in_layers(next(iter(host.found()))[0])
    assert host.bursts[-1].unplaced == 4 * 3 + 1


def test_a_governed_process_does_not_take_a_burst_for_its_own_cost(world: World, tmp_path: Path) -> None:
    recorder = RingRecorder(tmp_path)
    profiler = GovernedProfiler(1.0, recorder=recorder)
    model = played.model_of(world)
    attach(model, profiler)
    recorder.open()
    assert recorder.path is not None
    asker = RequestSlot(recorder.path)
    graph = played.captured(model)
    played.replay(world, graph, 5)
    profiler.finalize()
    before = profiler.governor.seen
    asker.ask(2)
    played.replay(world, graph, 2)
    profiler.finalize()
    assert profiler.governor.seen == before
    answer = asker.answer()
    assert answer is not None
    assert answer.state is State.DONE
    asker.close()


def test_what_is_said_of_a_burst_that_failed_is_said_once(
    world: World, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    world.fails_at = "begin"
    for _ in range(3):
        host.asker.ask(1)
        host.call()
        assert host.state() is State.FAILED
    assert len([line for line in caplog.messages if "kernels are not recorded" in line]) == 1
