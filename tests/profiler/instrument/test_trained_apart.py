"""Tests of networks of one class that are called in turns: optimizers tell them from layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

import torch
from torch import nn

from cbtop.profiler import instrument
from cbtop.profiler.instrument import attachment
from cbtop.profiler.instrument.trained_apart import (
    MAX_MODELS,
    MAX_OPERATIONS,
    MAX_OPTIMIZER_STEPS,
    TrainedApart,
    are_apart,
    depends_on,
)
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Node
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.memory import Memory


class Net(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, size), nn.Linear(size, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    instrument.install(BrickProfiler(recorder=made))
    yield made
    instrument.uninstall()


def shown() -> list[nn.Module | None]:
    return [one.root() for one in attachment.attachments()]


def optimizer_of(*nets: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*chain.from_iterable(net.parameters() for net in nets)], 0.01)


def train(nets: list[Net], optimizer: torch.optim.Optimizer) -> None:
    """Call the networks one after the other, as layers, and train."""
    x = torch.ones(2, 4)
    for net in nets:
        x = net(x)
    x.sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def adversarial_step(
    generator: Net, critic: Net, of_generator: torch.optim.Optimizer, of_critic: torch.optim.Optimizer
) -> None:
    (critic(torch.ones(2, 4)) - critic(generator(torch.ones(2, 4)).detach())).mean().backward()
    of_critic.step()
    of_critic.zero_grad()
    critic(generator(torch.ones(2, 4))).mean().backward()
    of_generator.step()
    of_generator.zero_grad()


def test_both_networks_of_a_gan_are_shown_if_they_have_one_class(memory: Memory) -> None:
    generator, critic = Net(), Net(8)
    of_generator, of_critic = optimizer_of(generator), optimizer_of(critic)
    for _ in range(4):
        adversarial_step(generator, critic, of_generator, of_critic)
    assert shown() == [critic, generator] or shown() == [generator, critic]
    nodes = [one for one in memory.said if isinstance(one, Node)]
    steps = {node.id: node.name for node in nodes if node.kind is NodeKind.STEP}
    assert {"train", "train SGD 2"} <= set(steps.values())
    # Both networks' modules are timed in the steps of both optimizers.
    for phase in ("train", "train SGD 2"):
        inside = [node for node in nodes if node.parent is not None and steps.get(node.parent) == phase]
        assert {"Net", "Net 2", "Linear", "Linear backward"} <= {node.name for node in inside}
        shapes = {node.module.weight_shape for node in inside if node.name == "Linear"}
        assert shapes == {"4x4", "8x4", "4x8"}


def test_a_target_network_that_no_optimizer_trains_is_shown(memory: Memory) -> None:
    network, target = Net(), Net()
    target.requires_grad_(False)
    optimizer = optimizer_of(network)
    for _ in range(3):
        (network(torch.ones(2, 4)) - target(torch.ones(2, 4))).sum().backward()
        optimizer.step()
    assert set(map(id, shown())) == {id(network), id(target)}


@pytest.mark.parametrize("trained", [slice(None), slice(2, None)], ids=["all", "the last ones"])
def test_layers_that_a_program_calls_itself_stay_layers(memory: Memory, trained: slice) -> None:
    layers = [Net() for _ in range(4)]
    for frozen in layers:
        frozen.requires_grad_(any(frozen is one for one in layers[trained]))
    optimizer = optimizer_of(*layers[trained])
    for _ in range(3):
        train(layers, optimizer)
    assert shown() == []


def test_two_encoders_under_one_optimizer_are_shown(memory: Memory) -> None:
    left, right, shared = Net(), Net(8), nn.Embedding(3, 4)
    optimizer = torch.optim.SGD([*left.parameters(), *right.parameters(), *shared.parameters()], 0.01)
    for _ in range(5):
        ids = torch.tensor([0, 2])
        (left(shared(ids)) * right(shared(ids))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(map(id, shown())) == {id(left), id(right)}
    nodes = [one for one in memory.said if isinstance(one, Node)]
    names = {node.name for node in nodes}
    assert {"train", "Net", "Net 2"} <= names


def test_an_actor_and_its_critic_are_shown_if_they_first_run_without_gradients(memory: Memory) -> None:
    actor, critic = Net(), Net()
    optimizer = optimizer_of(actor, critic)
    for _ in range(2):
        with torch.no_grad():
            for _ in range(3):
                (actor(torch.ones(2, 4)), critic(torch.ones(2, 4)))
        for _ in range(3):
            (actor(torch.ones(2, 4)) - critic(x=torch.ones(2, 4))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert set(map(id, shown())) == {id(actor), id(critic)}


@pytest.mark.parametrize(
    "follow", [lambda net, x: x + net(x), lambda net, x: net(x=x) * 2], ids=["residual", "named"]
)
def test_layers_stay_layers_however_they_follow_each_other(
    memory: Memory, follow: Callable[[Net, torch.Tensor], torch.Tensor]
) -> None:
    layers = [Net() for _ in range(3)]
    optimizer = optimizer_of(*layers)
    for _ in range(5):
        x = torch.ones(2, 4)
        for layer in layers:
            x = follow(layer, x)
        x.sum().backward()
        optimizer.step()
    assert shown() == []


def test_an_input_made_by_very_many_operations_counts_as_dependent() -> None:
    weight, x = nn.Parameter(torch.ones(())), torch.ones((), requires_grad=True)
    few = many = x + 1
    for _ in range(MAX_OPERATIONS + 1):
        many = many + 1
    assert not depends_on([few, torch.ones(())], {id(weight)})
    assert depends_on([few * weight], {id(weight)})
    assert depends_on([many], {id(weight)})


def test_layers_with_an_optimizer_for_each_kind_of_weight_stay_layers() -> None:
    layers = [Net(), Net()]
    of_matrices = {id(weight) for layer in layers for weight in layer.parameters() if weight.dim() == 2}
    assert not are_apart([*layers], of_matrices)
    assert not are_apart([*layers], set(map(id, layers[0].up.parameters())))


def test_many_modules_of_one_class_are_layers() -> None:
    layers: list[nn.Module] = [Net() for _ in range(MAX_MODELS + 1)]
    trained = set(map(id, layers[0].parameters()))
    assert are_apart(layers[:MAX_MODELS], trained)
    assert not are_apart(layers, trained)
    assert not are_apart(layers[:1], trained)


def test_optimizers_are_followed_only_until_they_have_told() -> None:
    from torch.optim import optimizer

    hooks = optimizer._global_optimizer_post_hooks
    before = len(hooks)
    layers, apart = [Net(), Net()], TrainedApart()
    trains = optimizer_of(*layers)
    for layer in layers:
        apart.add(layer)
    assert len(hooks) == before + 1
    for _ in range(MAX_OPTIMIZER_STEPS):
        trains.step()
    assert len(hooks) == before
    apart.add(layers[0])
    assert len(hooks) == before
    apart.clear()
    apart.add(layers[0])
    apart.clear()
    assert len(hooks) == before
