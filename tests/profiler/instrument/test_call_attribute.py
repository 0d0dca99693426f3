"""Tests of how cbtop replaces the calls of a module: which attribute cbtop uses, and when the attribute changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.instrument import attach, call_attribute, install, uninstall
from cbtop.profiler.profiler import BrickProfiler
from tests.profiler.instrument.tiny import torch
from tests.profiler.memory import Memory

from torch import nn  # isort: skip

CALLERS = 8


class Stack(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8) for _ in range(layers))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def _uninstalled(without_gradients: None) -> Iterator[None]:
    yield
    uninstall()


def test_who_asks_whether_a_model_is_compiled_is_told_that_it_is_not(profiler: BrickProfiler) -> None:
    model, asked = Stack().eval(), []

    class Asks(nn.Module):
        def forward(self, x: Any) -> Any:
            asked.append([getattr(one, "_compiled_call_impl", False) for one in model.modules()])
            return x

    model.layers.append(Asks())
    attach(model, profiler)
    for _ in range(3):
        model(torch.ones(1, 3, 8))
    assert [set(answers) for answers in asked] == [{None}] * 3


def test_threads_that_make_the_first_call_at_once_all_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(BrickProfiler(recorder=Memory()))
    inputs = torch.ones(1, 3, 8)
    for _ in range(2):
        model, begin = Stack(2).eval(), threading.Barrier(CALLERS)

        def call(model: nn.Module = model, begin: threading.Barrier = begin) -> Any:
            begin.wait()
            return model(inputs)

        with ThreadPoolExecutor(CALLERS) as threads:
            outputs = [one.result() for one in [threads.submit(call) for _ in range(CALLERS)]]
        assert all(torch.equal(one, outputs[0]) for one in outputs)


def test_a_replacement_may_go_between_the_two_questions_of_a_call(profiler: BrickProfiler) -> None:
    class Model(Stack):
        is_asked = False

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name == "_compiled_call_impl" and found is not None and not self.is_asked:
                type(self).is_asked = True
                # Another thread may restore the call at any time, even while this thread looks up the call.
                call_attribute.put(self, None)
            return found

    model, inputs = Model().eval(), torch.ones(1, 3, 8)
    expected = model(inputs)
    attach(model, profiler)
    assert torch.equal(model(inputs), expected)
    assert Model.is_asked


def test_a_model_with_lazy_weights_is_attached_at_its_second_call() -> None:
    memory = Memory()
    install(BrickProfiler(recorder=memory))
    model = Stack().eval()
    for layer in model.layers:
        layer.linear1 = nn.LazyLinear(8)
    model(torch.ones(1, 3, 8))
    assert not memory.records
    model(torch.ones(1, 3, 8))
    assert memory.records


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_that_was_traced_whole_has_steps_without_bricks(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory()
    traced = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.ones(3, 8))
    install(BrickProfiler(recorder=memory))
    for _ in range(3):
        traced(torch.ones(3, 8))
    assert [name for *_, name in memory.nodes] == ["forward"]
    steps = [record for record in memory.records if record[0] == memory.nodes[0][0]]
    assert len(steps) == 2  # It is attached in its first call.
    assert not caplog.records
