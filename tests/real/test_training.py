"""Real programs under `cbtop run`: time between steps in which gradients are computed promises no gain."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.programs import view_of

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


@pytest.mark.parametrize("overhead", ["3%", "100%"])
def test_a_training_loop_is_a_forward_and_gains_nothing_between_its_steps(
    tmp_path: Path, runtime: Path, overhead: str
) -> None:
    view = view_of(GPT.format(between=TRAINS), tmp_path, overhead)
    assert view.phase == "forward"
    assert view.trains
    (idle,) = [verdict for verdict in view.verdicts if verdict.id == "idle-between-steps"]
    assert idle.sentence.endswith("; gradients are computed between steps")
    assert idle.gain_tokens_per_sec is None


def test_a_loop_that_waits_between_steps_would_gain_even_without_no_grad(tmp_path: Path, runtime: Path) -> None:
    view = view_of(GPT.format(between=WAITS), tmp_path, "3%")
    assert not view.trains
    (idle,) = [verdict for verdict in view.verdicts if verdict.id == "idle-between-steps"]
    assert idle.gain_tokens_per_sec
