"""The memory of bricks in training steps: outputs on a CPU are those that torch's own profiler counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from cbtop.profiler import instrument
from cbtop.profiler.instrument.brick_memory import BrickSizes, RecordedBricks, bytes_of
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.memory_messages import MAX_BRICK_MEMORIES, BrickMemories
from cbtop.protocol.messages import Node
from tests.profiler.memory import Memory


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up_proj, self.down_proj = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.relu(self.up_proj(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    instrument.install(BrickProfiler(recorder=made))
    yield made
    instrument.uninstall()


def test_outputs_of_a_training_step_are_those_of_torchs_profiler(memory: Memory) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(6):
        model(torch.ones(5, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    told = [one for one in memory.said if isinstance(one, BrickMemories)]
    assert told
    assert not told[-1].is_measured
    nodes = {node.id: node for node in memory.said if isinstance(node, Node)}
    outputs: dict[str, int] = {}
    for brick in told[-1].bricks:
        assert (brick.allocated_bytes, brick.reserved_bytes, brick.kept_bytes) == (0, 0, 0)
        name = nodes[brick.node].name
        outputs[name] = outputs.get(name, 0) + brick.output_bytes
    instrument.uninstall()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, torch.no_grad():
        model(torch.ones(5, 32))
    of_torch = {one.key: one.self_cpu_memory_usage for one in profiled.key_averages()}
    assert outputs["UpProjection"] + outputs["DownProjection"] == of_torch["aten::addmm"]
    assert outputs["LayerNorm"] == 2 * 5 * 32 * 4  # torch's profiler adds the mean and the deviation of each row


def test_sizes_are_of_tensors_of_torch_alone() -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_args: Any, **_kwargs: Any) -> Any:
            raise AssertionError("the host's code was run")

    tensor = torch.ones(3, 4, dtype=torch.float16)
    assert bytes_of(tensor) == 24
    assert bytes_of((tensor, [tensor, None], 7)) == 48
    assert bytes_of(torch.ones(2).as_subclass(Own)) == 0
    assert bytes_of(None) == 0


def test_bricks_are_announced_rarely_and_the_largest_of_them() -> None:
    recorded = RecordedBricks(is_measured=True)
    assert recorded.message("train", "", len) is None
    told = []
    for number in range(1, 20):
        recorded.add(
            "train", {("a",): BrickSizes(1, number), ("a", "b"): BrickSizes(1, 2 * number), (): BrickSizes(9)}
        )
        if (message := recorded.message("train", "", len)) is not None:
            told.append(number)
            assert [brick.node for brick in message.bricks] == [2, 1]
    assert told == [1, 2, 4, 8, 16]
    recorded.add("eval", {("a",) * (1 + at): BrickSizes(0, at) for at in range(2 * MAX_BRICK_MEMORIES)})
    message = recorded.message("eval", "", len)
    assert message is not None
    assert len(message.bricks) == MAX_BRICK_MEMORIES
    assert message.bricks[0].node == 2 * MAX_BRICK_MEMORIES
