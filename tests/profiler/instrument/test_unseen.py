"""Tests of processes for which cbtop has nothing to show. The reported reason names classes and functions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

import torch
from torch import nn

from cbtop.profiler import instrument
from cbtop.profiler.instrument import attachment, trouble, unseen
from cbtop.profiler.profiler import BrickProfiler
from tests.integration.hosts import CBTOP, DEADLINE_S
from tests.profiler.memory import Memory

LAYERS = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x): return self.down_proj(self.up_proj(x))
x = torch.ones(1, 4)
for layer in nn.ModuleList(Block() for _ in range(3)): x = layer(x)
"""


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up_proj = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up_proj(self.norm(x))  # type: ignore[no-any-return]


class Recursive(nn.Module):
    """A model that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        return self.first(x) if not depth else self(self.second(x), depth - 1)  # type: ignore[no-any-return]


class Net(nn.Module):
    """A model that calls two modules of one class.

    The modules are attributes, not in a list, so they are no layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(unseen, "_called", {})
    monkeypatch.setattr(unseen, "_once", set())
    monkeypatch.setattr(trouble, "_said", {})
    if "torch._dynamo.utils" in sys.modules:  # Forget what other tests have compiled.
        sys.modules["torch._dynamo.utils"].counters.clear()
    instrument.install(BrickProfiler(recorder=Memory()))
    yield
    instrument.uninstall()


def test_no_reason_is_given_if_nothing_or_only_a_single_module_was_called() -> None:
    nn.Linear(4, 4)(torch.ones(1, 4))
    assert unseen.why() == ""


def test_a_model_without_a_list_of_layers_is_shown_from_its_second_call_on() -> None:
    net = Net()
    net(torch.ones(1, 4))
    assert unseen.why() == "Net was called once; without a list of layers it is shown from its second call on"
    assert not attachment.attachments()
    net(torch.ones(1, 4))
    (attached,) = attachment.attachments()
    assert attached.root() is net


def test_a_model_that_calls_itself_is_shown() -> None:
    model = Recursive()
    for _ in range(2):
        model(torch.ones(1, 4), 3)
    (attached,) = attachment.attachments()
    assert attached.root() is model


def test_a_model_with_one_product_is_named_and_not_what_it_calls() -> None:
    nn.Sequential(nn.Linear(4, 4), nn.ReLU())(torch.ones(1, 4))
    assert unseen.why() == "Sequential holds no list of layers, nor two modules with weights"


def test_two_models_of_one_class_one_after_the_other_are_both_shown() -> None:
    nets = [Net(), Net()]
    for net in nets:
        for _ in range(2):
            net(torch.ones(1, 4))
    assert [one.root() for one in attachment.attachments()] == nets


def test_layers_that_the_program_calls_itself_are_named() -> None:
    for layer in nn.ModuleList(Inner() for _ in range(3)):
        layer(torch.ones(1, 4))
    assert unseen.why() == "Inner was called layer by layer, and nothing that holds these layers"


def test_a_model_that_cannot_be_attached_to_is_named() -> None:
    nn.DataParallel(nn.Sequential(Inner(), Inner()))(torch.ones(1, 4))
    assert "nn.DataParallel copies its model at each call" in unseen.why()


def test_a_model_called_only_inside_a_compiled_function_is_said() -> None:
    model = nn.Sequential(Inner(), Inner())

    @torch.compile(backend="eager")
    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x)  # type: ignore[no-any-return]

    forward(torch.ones(1, 4))
    assert unseen.why() == "no call of a model was seen outside of functions that torch.compile has compiled"


@pytest.mark.slow  # test_import_hook.py tests the line
def test_a_run_says_at_its_end_what_was_called_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(LAYERS)
    command = [*CBTOP, "run", "--", sys.executable, str(tmp_path / "main.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    why = "Block was called layer by layer, and nothing that holds these layers"
    assert (done.stdout, done.stderr, done.returncode) == ("", f"cbtop: nothing was instrumented: {why}\n", 0)
