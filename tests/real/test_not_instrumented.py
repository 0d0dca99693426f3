"""Tests of time in code that cbtop cannot see inside.

This time has the name of the module that runs the code. No gain is promised for it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cbtop.reports import REPORTS
from tests.real.programs import Run, has_compiler, view_of

pytest.importorskip("torch", reason="torch is not installed: make torch")

# A program with a fused path: each layer of the encoder runs as one operator, without calls of its modules.
ENCODER = """
import torch
from torch import nn
torch.set_num_threads(1)
layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
model.{mode}()
with torch.no_grad():
    for _ in range(150):
        model(torch.ones(2, 32, 256))
"""
# A program with experts that are parameters. So no module is called for an expert.
EXPERTS = """
import torch
from torch import nn
torch.set_num_threads(1)

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(256, 4)
        {weights}

    def forward(self, x):
        chosen = self.router(x).softmax(-1)
        return x + sum(chosen[..., at : at + 1] * {product} for at in range(4))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

model = Model().eval()
with torch.no_grad():
    for _ in range(100):
        model(torch.ones(2, 64, 256))
"""
FUSED = "an encoder's fused path"
PROGRAMS = {
    FUSED: (ENCODER.format(mode="eval"), ENCODER.format(mode="train")),
    "experts that are parameters": (
        EXPERTS.format(weights="self.w = nn.Parameter(torch.randn(4, 256, 1024))", product="(x @ self.w[at]).mean()"),
        EXPERTS.format(
            weights="self.w = nn.ModuleList(nn.Linear(256, 1024) for _ in range(4))", product="self.w[at](x).mean()"
        ),
    ),
}


@pytest.mark.slow  # test_unseen.py tests the line
@pytest.mark.parametrize(
    "name", [FUSED, *(pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS if name != FUSED)]
)
def test_time_that_cbtop_does_not_see_inside_is_not_called_host_bound(
    name: str, tmp_path: Path, runtime: Path
) -> None:
    faulty, healthy = (
        view_of(program, tmp_path / kind) for program, kind in zip(PROGRAMS[name], ("faulty", "healthy"), strict=True)
    )
    for view in (faulty, healthy):
        assert "host-bound" not in [verdict.id for verdict in view.verdicts]
    assert faulty.bricks[0].name == ("TransformerEncoderLayer" if name == FUSED else "Experts")
    assert "\nnot instrumented: " not in REPORTS["text"]([faulty], ["bricks"])
    assert "\nnot instrumented: " not in REPORTS["text"]([healthy], ["bricks"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("compiled_layers", "torch.compile compiled code of this process"),
        ("compiled_forward", "torch.compile compiled code of this process"),
        ("traced_layer", "a script"),
    ],
)
def test_unseen_time_is_named_with_its_reason_and_the_twin_has_none(run: Run, script: str, why: str) -> None:
    if script.startswith("compiled") and not has_compiler():
        pytest.skip("torch.compile finds no C++ compiler")
    faulty, healthy = run(script, "faulty"), run(script, "healthy")
    (line,) = [line for line in faulty.text.splitlines() if line.startswith("not instrumented: ")]
    assert why in line
    assert "\nnot instrumented: " not in healthy.text
    for outcome in (faulty, healthy):
        assert not outcome.warnings


@pytest.mark.slow
def test_python_in_a_models_forward_has_the_models_name(run: Run) -> None:
    faulty, healthy = run("python_heavy", "faulty"), run("python_heavy", "healthy")
    assert faulty.view.bricks[0].name == "Model"
    assert "Model" not in {row.name for row in healthy.view.bricks[:2]}
    for outcome in (faulty, healthy):
        assert not outcome.warnings
        assert "\nnot instrumented: " not in outcome.text
