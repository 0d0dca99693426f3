"""Tests with real programs that train under `cbtop run`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.real.programs import Run, view_of

pytest.importorskip("torch", reason="torch is not installed: make torch")

GPT = """
import time
import torch
from torch import nn
torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 128)
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(128, 100)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

model, ids = GPT(), torch.ones(4, 32, dtype=torch.long)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(150):
    scores = model(ids)
    {between}
"""
TRAINS = "optimizer.zero_grad(); scores.logsumexp(-1).mean().backward(); optimizer.step()"
WAITS = "time.sleep(0.02)"


@pytest.mark.slow
@pytest.mark.parametrize("overhead", ["3%", pytest.param("100%", marks=pytest.mark.slow)])
def test_a_training_loop_has_training_steps_and_nothing_between_them(
    tmp_path: Path, runtime: Path, overhead: str
) -> None:
    view = view_of(GPT.format(between=TRAINS), tmp_path, overhead)
    assert view.phase == "train"
    assert view.trains
    assert not [verdict for verdict in view.verdicts if verdict.id == "idle-between-steps"]
    assert view.training is not None
    assert {part.name for part in view.training.parts} >= {"forward", "loss", "backward", "optimizer", "zero grad"}
    assert sum(part.percent for part in view.training.parts) == pytest.approx(100)


@pytest.mark.slow  # test_training.py of viewmodels tests the parts
def test_the_parts_of_a_step_cover_the_last_second_of_a_program(tmp_path: Path, runtime: Path) -> None:
    view = view_of(GPT.format(between=TRAINS).replace("range(150)", "range(50)"), tmp_path)
    assert view.training is not None
    assert view.steps is not None
    assert view.training.steps == view.steps.count > 16


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        pytest.param("slow_data", "input-bound", marks=pytest.mark.slow),
        pytest.param("heavy_optimizer", "optimizer-bound", marks=pytest.mark.slow),
        pytest.param("repeated_forward", "recompute", marks=pytest.mark.slow),
    ],
)
def test_what_slows_training_is_named_and_its_twin_has_no_warning(run: Run, script: str, verdict: str) -> None:
    faulty, healthy = run.faulty(script, verdict), run(script, "healthy")
    assert verdict in faulty.verdicts or faulty.is_starved
    assert verdict not in healthy.verdicts
    assert not healthy.warnings
    assert faulty.warnings <= {verdict}


@pytest.mark.slow
def test_frozen_layers_have_no_backward_and_evaluations_are_inference(run: Run) -> None:
    trained, frozen = run("frozen_backbone", "faulty"), run("frozen_backbone", "healthy")
    for outcome, layers in ((trained, 6), (frozen, 1)):
        assert outcome.view.phase == "train"
        assert {phase.phase for phase in outcome.view.phases} >= {"train", "forward"}
        assert not outcome.warnings
        steps = outcome.view.steps
        assert steps is not None
        assert outcome.brick("UpProjection").count == 6 * steps.recorded
        backward = outcome.brick("UpProjection backward")
        assert backward.count == layers * steps.recorded


@pytest.mark.slow
def test_the_trainer_of_transformers_is_shown_with_its_micro_batches(run: Run) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    outcome = run("hf_trainer", "healthy")
    steps = outcome.view.steps
    assert outcome.view.phase == "train"
    assert steps is not None
    # A step has two micro-batches of four samples, each with 48 tokens.
    assert steps.tokens == 2 * 4 * 48 * steps.count
    assert outcome.brick("Attention (fused)").count == 2 * 4 * steps.recorded
    assert not outcome.warnings


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed: make torch")
def test_lightning_is_shown_with_its_micro_batches_and_validations(run: Run) -> None:
    outcome = run("lightning_fit", "80")
    steps = outcome.view.steps
    assert outcome.view.phase == "train"
    assert steps is not None
    assert steps.tokens == 2 * 4 * 64 * steps.count  # two micro-batches of four samples
    assert outcome.brick("UpProjection backward").count >= 2 * 6 * steps.recorded
    assert not outcome.warnings


@pytest.mark.slow  # test_gains.py tests the gain
def test_a_loop_that_waits_between_steps_would_gain_even_without_no_grad(tmp_path: Path, runtime: Path) -> None:
    view = view_of(GPT.format(between=WAITS), tmp_path, "3%")
    assert not view.trains
    (idle,) = [verdict for verdict in view.verdicts if verdict.id == "idle-between-steps"]
    assert idle.gain_tokens_per_sec
