"""Tests of the time that each call gets in a backward pass.

The clock of these tests ticks once after each node of autograd, so the expected times are numbers of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.definitions import BrickDefinition, own_operations  # noqa: E402
from cbtop.profiler.instrument import install, training_calls, uninstall  # noqa: E402
from cbtop.profiler.instrument.training import TrainingSteps, training_here  # noqa: E402
from cbtop.profiler.instrument.training_calls import Part  # noqa: E402
from cbtop.profiler.profiler import BrickProfiler  # noqa: E402
from tests.profiler.memory import Memory  # noqa: E402

from torch import nn  # noqa: E402  # isort: skip

NODES, WIDTH, TICK_NS = 6, 8, 1_000_000


class Sum(nn.Module):
    """Adds up the messages of each node of the graph."""

    def forward(self, messages: Any, target: Any) -> Any:
        return torch.zeros(NODES, WIDTH).index_add(0, target, messages)


class Convolution(nn.Module):
    """A convolution on a graph. It has two children, and operations of its own before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.aggregate = nn.Linear(WIDTH, WIDTH, bias=False), Sum()
        self.attention, self.bias = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Any, edges: Any) -> Any:
        source, target = edges
        h = self.lin(x.tanh())
        score = (h * self.attention).sum(-1)
        weight = nn.functional.leaky_relu(score[source] + score[target]).exp()
        return self.aggregate(h.index_select(0, source) * weight.unsqueeze(-1), target) + self.bias


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolution() for _ in range(2))

    def forward(self, x: Any, edges: Any) -> Any:
        for layer in self.layers:
            x = nn.functional.elu(layer(x, edges))
        return x


class Attributes(nn.Module):
    """The same model without a list of layers, so a convolution is a brick and not a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Convolution(), Convolution()

    def forward(self, x: Any, edges: Any) -> Any:
        return nn.functional.elu(self.second(nn.functional.elu(self.first(x, edges)), edges))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Part]]:
    """Yield a list that always has the parts of the latest recorded training step."""
    latest: list[Part] = []

    def write(self: object, model: object, name: str, step: object, inside: list[Part] | None) -> None:
        latest[:] = inside or []

    monkeypatch.setattr(TrainingSteps, "_write", write)
    install(BrickProfiler(recorder=Memory()))
    try:
        yield latest
    finally:
        uninstall()
        training_here().give_up()


def nodes_behind(node: Any) -> set[Any]:
    """Return all nodes of autograd that `node` leads to."""
    found, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [after for after, _ in node.next_functions if after is not None]
    return found


def exclusive_ticks(parts: list[Part]) -> Counter[str]:
    """Return the exclusive time of each brick of the backward pass, in ticks of the clock."""
    ticks: Counter[str] = Counter()
    around: list[tuple[str, int]] = []  # name and end of the parts that contain the next one
    for keys, begin_ns, end_ns, _ in sorted(parts, key=lambda part: (part[1], -part[2], len(part[0]))):
        brick: Any = own_operations(keys[-1]) or keys[-1]
        name = brick.name if isinstance(brick, BrickDefinition) else str(brick)
        while around and around[-1][1] <= begin_ns:
            around.pop()
        ns = end_ns - begin_ns
        if around:
            ticks[around[-1][0]] -= ns // TICK_NS
        ticks[name] += ns // TICK_NS
        around.append((name, end_ns))
    return +Counter({name: count for name, count in ticks.items() if name.endswith(" backward")})


@pytest.mark.parametrize("kind", [Layers, Attributes])
def test_each_node_of_a_backward_counts_for_the_module_that_made_it(
    recorded: list[Part], monkeypatch: pytest.MonkeyPatch, kind: Callable[[], Any]
) -> None:
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, edges = torch.randn(NODES, WIDTH), torch.randint(0, NODES, (2, 20))
    now_ns = [0]
    expected = {
        "Sum backward": 2,
        # The product and the transposition of each, and the gradient that is added to the weight.
        "Linear backward": 2 * 3,
    }
    for _ in range(6):
        optimizer.zero_grad()
        with monkeypatch.context() as patched:
            patched.setattr(training_calls, "clock", SimpleNamespace(perf_counter_ns=lambda: now_ns[0]))
            loss = model(x, edges).square().mean()
            nodes = nodes_behind(loss.grad_fn)
            hooks = [node.register_hook(lambda *_: now_ns.__setitem__(0, now_ns[0] + TICK_NS)) for node in nodes]
            loss.backward()
        for hook in hooks:  # the nodes of weights stay
            hook.remove()
        optimizer.step()
    of_the_loss, of_elu = 2, 2
    expected["Convolution backward"] = len(nodes) - sum(expected.values()) - of_the_loss - of_elu
    found = exclusive_ticks(recorded)
    assert {name: found[name] for name in expected} == expected
