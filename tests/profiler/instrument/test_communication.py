"""Tests of communication in training steps: exposed waits by kind, and possible overlap. Programs are not changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from tests.representatives import first_by_default

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

import torch.distributed as dist  # noqa: E402

from cbtop.profiler.instrument import communication, install, training, trouble, uninstall  # noqa: E402
from cbtop.profiler.instrument.communication_times import OTHERS, StepCommunication, together  # noqa: E402
from cbtop.profiler.instrument.training import training_here  # noqa: E402
from cbtop.profiler.profiler import BrickProfiler  # noqa: E402
from cbtop.protocol.messages import Node  # noqa: E402
from cbtop.protocol.ring import FLAG_AMOUNTS  # noqa: E402
from cbtop.protocol.training_messages import MAX_STEP_PARTS, TrainingTimes  # noqa: E402
from cbtop.protocol.vocabulary import BrickCategory, NodeKind, TrainingPart  # noqa: E402
from tests.profiler.instrument.test_training import NODE, Block, bricks_of, steps_of  # noqa: E402
from tests.profiler.memory import Memory  # noqa: E402

from torch import nn  # noqa: E402  # isort: skip
from torch.distributed.fsdp import fully_shard  # noqa: E402  # isort: skip
from torch.utils.checkpoint import checkpoint  # noqa: E402  # isort: skip
from torch.nn.parallel import DistributedDataParallel  # noqa: E402  # isort: skip
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402  # isort: skip


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    monkeypatch.setattr(training, "ANNOUNCE_NS", 0)
    kept = Memory()
    install(BrickProfiler(recorder=kept))
    try:
        yield kept
    finally:
        uninstall()
        training_here().give_up()


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Create a fake group of four ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


class Layers(nn.Module):
    """A model with layers. With `repeats`, its layers run again in the backward pass, as with checkpointing."""

    def __init__(self, repeats: bool) -> None:
        super().__init__()
        self.layers, self.first = nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 16)
        self.repeats = repeats

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.repeats else layer(x)
        return x


def plain() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(3)))


def train(
    model: Any, steps: int = 30, between: Callable[[], object] = lambda: None, context: Any = nullcontext
) -> Any:
    """Train `model`. Returns its weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.ones(2, 16)
    for _ in range(steps):
        optimizer.zero_grad()
        with context():
            model(batch).square().mean().backward()
        between()
        optimizer.step()
    return [weight.detach().clone() for weight in model.parameters()]


def times_of(memory: Memory) -> TrainingTimes:
    """Return the last report of training times. Check that the parts of a step add up."""
    found = [message for message in memory.said if isinstance(message, TrainingTimes)][-1]
    assert sum(part.sum_ns for part in found.parts) == found.wall_ns
    exposed_ns = sum(kind.sum_ns for kind in found.communication.exposed) if found.communication else 0
    assert exposed_ns == sum(part.sum_ns for part in found.parts if part.name == TrainingPart.COMMUNICATION)
    return found


def exposed(memory: Memory) -> set[str]:
    found = times_of(memory).communication
    return {kind.name for kind in found.exposed} if found else set()


def test_the_wait_of_ddp_for_gradients_is_a_part_and_a_brick(memory: Memory, gloo: None) -> None:
    train(DistributedDataParallel(plain(), bucket_cap_mb=0.001))
    found = times_of(memory).communication
    assert found is not None
    assert exposed(memory) == {"GradientSync, backward"}
    assert found.overlapped_ns is not None
    # Because gradients are sent in several buckets, some are sent while the backward pass still runs.
    assert found.overlapped_ns > 0
    bricks = bricks_of(memory)
    assert bricks["GradientSync"] == bricks["BackwardEnd"] > 0


def test_gradients_that_are_sent_together_overlap_with_nothing(memory: Memory, gloo: None) -> None:
    train(DistributedDataParallel(plain()))
    found = times_of(memory).communication
    assert found is not None
    assert (found.overlapped_ns, found.why_unknown) == (0, "")


def test_the_order_of_buckets_may_be_unknown(memory: Memory, gloo: None) -> None:
    train(DistributedDataParallel(plain(), bucket_cap_mb=0.001, find_unused_parameters=True))
    found = times_of(memory).communication
    assert found is not None
    assert (found.overlapped_ns, found.why_unknown) == (None, communication.NO_BUCKETS)
    assert exposed(memory) == {"GradientSync, backward"}


def test_without_averaging_there_is_no_communication(memory: Memory, gloo: None) -> None:
    model = DistributedDataParallel(plain())
    train(model, context=model.no_sync)
    assert times_of(memory).communication is None
    assert not bricks_of(memory)["GradientSync"]


def test_a_backward_inside_a_backward_waits_for_gradients_once(memory: Memory, gloo: None) -> None:
    train(DistributedDataParallel(Layers(True), static_graph=True))
    assert exposed(memory) == {"GradientSync, backward"}
    part = next(part for part in times_of(memory).parts if part.name == TrainingPart.BACKWARD)
    assert part.sum_ns > 0


@pytest.mark.slow
def test_micro_batches_of_which_the_last_sends_are_one_step(memory: Memory, gloo: None) -> None:
    model = DistributedDataParallel(plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(30):
        with model.no_sync():
            model(torch.ones(2, 16)).square().mean().backward()
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert exposed(memory) == {"GradientSync, backward"}
    bricks = bricks_of(memory)
    assert bricks["BackwardEnd"] == 2 * bricks["GradientSync"] > 0


def test_a_backward_that_raises_ends_its_wait_and_removes_its_hook(memory: Memory, gloo: None) -> None:
    model = DistributedDataParallel(plain())
    train(model)

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            raise ValueError("no gradient")

    loss = Raises.apply(model(torch.ones(2, 16))).sum()
    with pytest.raises(ValueError, match="no gradient"):
        loss.backward()
    assert training_here().clock.is_in is None


def test_ddp_trains_bit_equal_with_and_without_us(gloo: None) -> None:
    def weights() -> Any:
        return train(DistributedDataParallel(plain(), bucket_cap_mb=0.001))

    bare = weights()
    install(BrickProfiler(recorder=Memory()))
    try:
        shown = weights()
    finally:
        uninstall()
        training_here().give_up()
    assert all(torch.equal(one, other) for one, other in zip(bare, shown, strict=True))


@pytest.mark.slow
def test_gathering_and_scattering_of_fsdp_are_exposed_by_pass(memory: Memory, four_ranks: None) -> None:
    model = plain()
    for layer in model:
        fully_shard(layer)
    train(fully_shard(model))
    assert exposed(memory) == {"AllGather, forward", "AllGather, backward", "ReduceScatter, backward"}
    found = times_of(memory).communication
    assert found is not None
    assert found.overlapped_ns == 0
    assert bricks_of(memory)["BackwardEnd"] > 0


@pytest.mark.slow
@first_by_default("repeats", [False, True])
def test_no_backward_of_a_layer_or_brick_contains_communication(
    memory: Memory, four_ranks: None, repeats: bool
) -> None:
    model = Layers(repeats)
    for layer in model.layers:
        fully_shard(layer)
    train(fully_shard(model), steps=60)
    nodes = {node.id: node for node in memory.said if isinstance(node, Node)}
    backward, communicates, kinds = [], [], set()
    for tag, start, end, _ in memory.records:
        node = nodes[tag & NODE]
        if tag & FLAG_AMOUNTS:
            continue
        if node.name.endswith(" backward") or (node.kind is NodeKind.LAYER and node.label == "backward"):
            backward.append((start, end))
            kinds.add(node.kind)
        elif node.kind is NodeKind.BRICK and node.category is BrickCategory.COMMUNICATION:
            communicates.append((start, end))
    assert kinds == {NodeKind.LAYER, NodeKind.BRICK}
    assert communicates
    for start, end in communicates:
        assert not [one for one in backward if one[0] < end and start < one[1]]


def test_gradients_averaged_by_the_program_are_a_part_and_a_brick(memory: Memory, gloo: None) -> None:
    model = plain()

    def average() -> None:
        for weight in model.parameters():
            dist.all_reduce(weight.grad)

    train(model, between=average)
    assert exposed(memory) == {"AllReduce"}
    found = times_of(memory).communication
    assert found is not None
    assert (found.overlapped_ns, found.why_unknown) == (0, "")
    assert bricks_of(memory)["GradientSync"] > 0


def test_what_overlaps_with_an_asynchronous_collective_is_unknown(memory: Memory, gloo: None) -> None:
    value = torch.ones(4)
    train(plain(), between=lambda: dist.all_reduce(value, async_op=True).wait())
    found = times_of(memory).communication
    assert found is not None
    assert (found.overlapped_ns, found.why_unknown) == (None, communication.ASYNCHRONOUS)
    assert exposed(memory) == {"AllReduce"}


def test_communication_outside_of_training_is_in_no_step(memory: Memory, gloo: None) -> None:
    model, value = plain(), torch.ones(4)
    with torch.no_grad():
        for _ in range(5):
            model(torch.ones(2, 16))
            dist.all_reduce(value)
    assert training_here().clock.begun_ns is None
    assert not steps_of(memory)["train"]


def test_a_failure_of_ours_does_not_reach_the_host(
    memory: Memory, gloo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise LookupError("no")

    monkeypatch.setattr(trouble, "_said", {})
    monkeypatch.setattr(communication, "_first_bucket", fails)
    monkeypatch.setattr(communication, "_running_function", fails)
    value = torch.ones(4)
    train(DistributedDataParallel(plain()), between=lambda: dist.all_reduce(value))
    assert exposed(memory) == {"GradientSync, backward"}
    assert "LookupError: no" in trouble.first_said()


def test_detaching_puts_the_methods_of_torch_back(gloo: None) -> None:
    kinds = dist.ProcessGroup, dist.distributed_c10d.Work
    before = [dict(vars(kind)) for kind in kinds]
    install(BrickProfiler(recorder=Memory()))
    train(plain(), steps=3)
    assert [dict(vars(kind)) for kind in kinds] != before
    uninstall()
    training_here().give_up()
    assert [dict(vars(kind)) for kind in kinds] == before


def test_further_kinds_of_communication_are_one() -> None:
    step = StepCommunication()
    for number in range(50):
        step.waited(f"kind {number}", 1)
    found = together([step, StepCommunication()])
    assert found is not None
    assert len(found.exposed) == MAX_STEP_PARTS
    assert {kind.name: kind.sum_ns for kind in found.exposed}[OTHERS] == 50 - (MAX_STEP_PARTS - 1)
    assert together([StepCommunication()]) is None


def test_steps_whose_overlap_is_unknown_count_as_the_others() -> None:
    steps = [StepCommunication() for _ in range(4)]
    for step in steps:
        step.waited("AllReduce", 10)
        step.overlapped_ns = 100
    steps[0].unknown = "too early"
    found = together(steps)
    assert found is not None
    assert (found.overlapped_ns, found.why_unknown) == (400, "")
    for step in steps[:3]:
        step.unknown = "too early"
    found = together(steps)
    assert found is not None
    assert (found.overlapped_ns, found.why_unknown) == (None, "too early")
