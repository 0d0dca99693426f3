"""Tests with an inference engine that compiles its model and captures whole calls as graphs.

torch has a fake CUDA.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import (  # noqa: E402
    attachment,
    eager_stamps,
    install,
    kernel_steps,
    trouble,
    uninstall,
)
from cbtop.profiler.instrument.functions import brick_of_name  # noqa: E402
from cbtop.profiler.instrument.governor import GovernedProfiler  # noqa: E402
from cbtop.profiler.instrument.phases import DECODE, PREFILL, Call  # noqa: E402
from cbtop.profiler.instrument.runners import Engine, loads, runs, runs_without_requests  # noqa: E402
from cbtop.protocol.messages import Node  # noqa: E402
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_PLAIN  # noqa: E402
from cbtop.protocol.vocabulary import NodeKind  # noqa: E402
from tests.profiler.instrument import test_kernel_bursts as bursts  # noqa: E402
from tests.profiler.memory import Memory  # noqa: E402

LAYERS = 3
ATTENTION_NS, WRITE_NS, PIECE_NS = 20_000, 4_000, 9_000


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[bursts.World]:
    world = bursts.World()
    bursts.play(world, monkeypatch)
    monkeypatch.setattr(eager_stamps, "_kinds_of_devices", lambda model: {"cuda"})
    monkeypatch.setattr(eager_stamps, "_only_cuda_device", lambda model: 0)
    monkeypatch.setattr(attachment, "device_of", lambda model: "cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kernel_steps, "LEAST_PAUSE_NS", 1)
    monkeypatch.setattr(kernel_steps, "MOST_PAUSE_NS", 1)
    monkeypatch.setattr(trouble, "_said", {})
    yield world
    world.pass_time(10_000_000)
    uninstall()


class Attention(torch.nn.Module):
    """Attention as vLLM writes it: compilers do not look into its operation, which calls the backend `impl`."""

    def __init__(self, world: bursts.World) -> None:
        super().__init__()
        self.impl = SimpleNamespace(
            forward=lambda: world.kernel(ATTENTION_NS), do_kv_cache_update=lambda: world.kernel(WRITE_NS)
        )


class Layer(torch.nn.Module):
    def __init__(self, world: bursts.World) -> None:
        super().__init__()
        self.self_attn = torch.nn.Module()
        self.self_attn.qkv_proj, self.self_attn.attn = torch.nn.Linear(8, 24), Attention(world)
        self.down_proj = torch.nn.Linear(8, 8)

    def forward(self, rows: Any) -> Any:
        raise AssertionError("compiled code calls no modules")


class Model(torch.nn.Module):
    def __init__(self, world: bursts.World) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(world) for _ in range(LAYERS))


class Runner:
    """A runner of an engine.

    The runner captures each decode step as one graph, and a prompt as one graph for each piece.
    """

    def __init__(self, world: bursts.World) -> None:
        self.world = world

    def load_model(self) -> None:
        self.model = Model(self.world)

    def run_dry(self, *, is_whole: bool) -> None:
        if is_whole:
            self.whole = torch.cuda.CUDAGraph()
            self.whole.capture_begin()
            for layer in self.model.layers:
                self.world.kernel(PIECE_NS)
                layer.self_attn.attn.impl.do_kv_cache_update()
                layer.self_attn.attn.impl.forward()
            self.whole.capture_end()
        else:
            self.pieces = [torch.cuda.CUDAGraph() for _ in range(LAYERS)]
            for piece in self.pieces:
                piece.capture_begin()
                self.world.kernel(PIECE_NS)
                piece.capture_end()

    def execute(self, phase: str) -> None:
        for graph in [self.whole] if phase == DECODE else self.pieces:
            graph.replay()
        self.world.pass_time(10_000_000)


def opaque_methods(module: Any) -> Any:
    if isinstance(module, Attention):
        yield module.impl, "forward", None
        yield module.impl, "do_kv_cache_update", brick_of_name("KvWrite")


def engine() -> Engine:
    return Engine(
        "an engine",
        model_of=lambda runner: runner.model,
        bricks=lambda runner: (False, ""),
        describe=lambda phase: Call(phase, 2, 2, None),
        samples_later=lambda result: False,
        describe_capture=lambda runner, is_whole: Call(DECODE, 2, 2, None) if is_whole else None,
        opaque_methods=opaque_methods,
    )


def runner_in(world: bursts.World) -> tuple[Runner, Memory]:
    memory = Memory()
    profiler = GovernedProfiler(3, recorder=memory)
    profiler.parts.by_kernels = True
    install(profiler)
    kind: Any = type("WrappedRunner", (Runner,), {})
    kind.load_model = loads(Runner.load_model, engine())
    kind.run_dry = runs_without_requests(Runner.run_dry, engine())
    kind.execute = runs(Runner.execute, engine())
    runner = kind(world)
    runner.load_model()
    runner.run_dry(is_whole=False)
    runner.run_dry(is_whole=True)
    return runner, memory


def recorded_steps(memory: Memory) -> list[list[tuple[str, str]]]:
    """Return (name, name of its layer) of each record, in a list for each recorded step.

    The record of the step itself is the last one.
    """
    nodes = {node.id: node for node in memory.said if isinstance(node, Node)}
    found: list[list[tuple[str, str]]] = [[]]
    for tag, _, _, _ in memory.records:
        node = nodes[tag & 0xFFFF]
        if not (tag & FLAG_AMOUNTS or (tag & FLAG_PLAIN and node.kind is NodeKind.STEP)):
            parent = nodes.get(node.parent)
            found[-1].append((node.name, parent.name if parent and parent.kind is NodeKind.LAYER else ""))
            if node.kind is NodeKind.STEP:
                found.append([])
    return found[:-1]


def execute_until_recorded(runner: Runner, memory: Memory, phase: str) -> list[list[tuple[str, str]]]:
    for _ in range(200):
        for _ in range(20):
            runner.execute(phase)
        if len(recorded_steps(memory)) > 2:
            return recorded_steps(memory)
    raise AssertionError("4,000 steps were not enough")


def test_a_replayed_whole_call_has_attention_by_layer_and_other_kernels(world: bursts.World) -> None:
    runner, memory = runner_in(world)
    *_, step = execute_until_recorded(runner, memory, DECODE)
    layers = [str(number) for number in range(LAYERS)]
    assert [layer for name, layer in step if name == "KvWrite"] == layers
    assert [layer for name, layer in step if name == "Attention (fused)"] == layers
    assert ("Other kernels", "") in step
    assert step[-1] == ("decode", "")


def test_pieces_in_graphs_of_their_own_are_left_alone_and_that_is_said(
    world: bursts.World, caplog: pytest.LogCaptureFixture
) -> None:
    runner, memory = runner_in(world)
    with caplog.at_level(logging.WARNING, "cbtop"):
        for _ in range(200):
            runner.execute(PREFILL)
    assert not recorded_steps(memory)
    assert caplog.messages == [
        "cbtop: prefill steps replay captured graphs that cbtop does not clone: they have no bricks"
    ]
    assert world.let_go + world.finalized == 1  # CUPTI was active in one step only.
    assert not [module for module in runner.model.modules() if module.__dict__.get("_compiled_call_impl")]
