"""Tests of the guard on a CUDA device: figures that arrive later, and flags inside captured graphs.

These tests have not run on a GPU yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from tests.profiler.instrument.tiny import torch

from cbtop.profiler.instrument import attach, guard, uninstall  # isort: skip - it loads torch
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.guard_messages import FINITE, GuardedSteps, GuardFault
from tests.profiler.memory import Memory

if torch.cuda.is_available():
    from benchmarks.gpu.lean import Engine, lean

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SMALL = {"hidden": 512, "inner": 1024, "heads": 8, "layers": 4, "context": 64, "vocabulary": 1000}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(guard, "ANNOUNCE_NS", 0)
    monkeypatch.setattr(guard, "READ_EVERY_NS", 0)
    yield Memory()
    uninstall()


def fault(memory: Memory) -> GuardFault | None:
    return [said for said in memory.said if isinstance(said, GuardedSteps)][-1].fault


def test_a_replay_shows_a_weight_that_became_nan_after_the_capture(memory: Memory) -> None:
    model = lean(**SMALL)
    bare = Engine(model, 1).capture()
    bare.step()
    expected = bare.scores.clone()
    attach(model, BrickProfiler(recorder=memory), guard="log")
    engine = Engine(model, 1).capture()
    for _ in range(5):
        engine.step()
        torch.cuda.synchronize()
    assert torch.equal(engine.scores, expected)
    assert fault(memory) is None
    with torch.no_grad():
        model.layers[2].mlp.down_proj.weight[3, 5] = math.nan
    for _ in range(5):
        engine.step()
        torch.cuda.synchronize()
    found = fault(memory)
    assert found is not None
    assert (found.module, found.layer, found.given, found.weight) == ("layers.2.mlp.down_proj", 2, FINITE, "weight")


def test_an_eager_step_names_its_fault_in_a_later_step(memory: Memory) -> None:
    model = lean(**SMALL)
    attach(model, BrickProfiler(recorder=memory), guard="log")
    words, at = torch.ones((1, 1), dtype=torch.long, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
    with torch.no_grad():
        for number in range(12):
            if number == 6:
                model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
            model(words, at)
            torch.cuda.synchronize()
    found = fault(memory)
    assert found is not None
    assert (found.module, found.step) == ("layers.1.mlp.down_proj", 7)
